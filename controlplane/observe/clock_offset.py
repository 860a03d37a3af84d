"""What another machine's times are by our clock. No I/O."""

from __future__ import annotations

_WINDOW_SECONDS = 30.0  # seconds after which a delay is forgotten; the clocks may have moved apart


class ClockOffset:
    """Converts times of one peer, be it a replica or an Envoy, by the shortest way of its messages lately.

    A message that had to wait (in a queue, or because one of us was stopped) so keeps its age: old counts
    must not pass for new ones. No time of the past comes out later than now.
    """

    def __init__(self) -> None:
        self._min_offset = self._previous_min_offset = float(
            "inf"
        )  # our time of hearing, less its time of telling
        self._window_started_at = float("-inf")

    def observe(self, sent_at: float, now: float) -> None:
        """A message that was told at that time of the peer's has come."""
        if now - self._window_started_at >= _WINDOW_SECONDS:
            self._previous_min_offset, self._min_offset, self._window_started_at = (
                self._min_offset,
                float("inf"),
                now,
            )
        self._min_offset = min(self._min_offset, now - sent_at)

    def to_local(self, peer_time: float) -> float:
        """A time of the peer's by our clock; something must have been heard."""
        return peer_time + min(self._min_offset, self._previous_min_offset)
