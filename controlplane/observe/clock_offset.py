"""Converts times of another machine's clock to our clock. No I/O."""

from __future__ import annotations

_WINDOW_SECONDS = 30.0  # after one to two windows an offset is dropped, since clocks drift apart


class ClockOffset:
    """Converts times of one peer (a replica or an Envoy), based on its recent message with the lowest delay.

    So the age of a delayed message is known, and its old counts are not taken for new counts. The time at
    which a message was sent never converts to a time after its arrival.
    """

    def __init__(self, *, is_ordered: bool = False) -> None:
        """`is_ordered`: the times of the messages never decrease, unless the peer's clock is set back."""
        self._is_ordered = is_ordered
        # Minimum of (our receive time - the peer's send time) in this window and in the previous window.
        self._min_offset = self._previous_min_offset = float("inf")
        self._window_started_at = float("-inf")
        self._last_sent_at = float("-inf")

    def observe(self, sent_at: float, now: float) -> None:
        """Record a message that the peer sent at `sent_at`, by its clock, and that we received `now`."""
        if self._is_ordered and sent_at < self._last_sent_at:
            # With the offset from before the clock was set back, all messages would seem to be old.
            self._min_offset = self._previous_min_offset = float("inf")
        self._last_sent_at = sent_at
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
