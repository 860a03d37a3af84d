"""The event queue and clock of a simulation."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Actions by time, in seconds since the start; simultaneous ones in the order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sequence_number = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule `action` at `time`; if that is past, for the next run."""
        self._sequence_number += 1
        heapq.heappush(self._events, (time, self._sequence_number, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule `action` in `seconds`."""
        self.at(self.now + seconds, action, *arguments)

    def run_until(self, end: float) -> None:
        """Run all actions due before `end`, then set the clock to `end`."""
        due = self._events
        while due and due[0][0] < end:
            time, _, action, arguments = heapq.heappop(due)
            self.now = max(self.now, time)
            action(*arguments)
        self.now = end
