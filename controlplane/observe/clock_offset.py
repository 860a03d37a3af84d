"""What another machine's times are by our clock. No I/O."""

from __future__ import annotations

_WINDOW = 30.0  # seconds after which a delay is forgotten; the clocks may have moved apart


class PeerClock:
    """Converts times of one peer, be it a replica or an Envoy, by the shortest way of its messages lately.

    A message that had to wait (in a queue, or because one of us was stopped) so keeps its age: old counts
    must not pass for new ones. No time of the past comes out later than now.
    """

    def __init__(self) -> None:
        self._least = self._least_before = float("inf")  # our time of hearing, less its time of telling
        self._began = float("-inf")

    def hear(self, told: float, now: float) -> None:
        """A message that was told at that time of the peer's has come."""
        if now - self._began >= _WINDOW:
            self._least_before, self._least, self._began = self._least, float("inf"), now
        self._least = min(self._least, now - told)

    def here(self, there: float) -> float:
        """A time of the peer's by our clock; something must have been heard."""
        return there + min(self._least, self._least_before)
