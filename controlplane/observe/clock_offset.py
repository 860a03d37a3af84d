"""Converts the times of another machine's clock to ours. No I/O."""

from __future__ import annotations

_WINDOW_SECONDS = 30.0  # after this time an offset is dropped, since the clocks may have drifted apart


class ClockOffset:
    """Converts times of one peer (a replica or an Envoy), based on its recent message with the lowest delay.

    So a message that waited (in a queue, or because a process was stopped) keeps its age: old counts must not
    be taken for new ones. A time in the past never converts to a time later than now.
    """

    def __init__(self) -> None:
        # Our receive time minus the peer's send time, the minimum of this window and of the one before.
        self._min_offset = self._previous_min_offset = float("inf")
        self._window_started_at = float("-inf")

    def observe(self, sent_at: float, now: float) -> None:
        """Record a message that the peer sent at `sent_at`, by its clock, and that we received `now`."""
        if now - self._window_started_at >= _WINDOW_SECONDS:
            self._previous_min_offset, self._min_offset, self._window_started_at = (
                self._min_offset,
                float("inf"),
                now,
            )
        self._min_offset = min(self._min_offset, now - sent_at)

    def to_local(self, peer_time: float) -> float:
        """Convert a time of the peer's clock to our clock; `observe` must have been called before."""
        return peer_time + min(self._min_offset, self._previous_min_offset)
