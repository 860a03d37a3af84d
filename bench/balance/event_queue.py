"""What is to happen when: the clock of a simulation."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Actions by time, in seconds since the beginning; those of one time in the order of their asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sequence_number = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` then; at once, when that is past."""
        self._sequence_number += 1
        heapq.heappush(self._events, (time, self._sequence_number, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` so many seconds from now."""
        self.at(self.now + seconds, action, *arguments)

    def run_until(self, end: float) -> None:
        """Do all that is due before `end`, which is the time then."""
        due = self._events
        while due and due[0][0] < end:
            time, _, action, arguments = heapq.heappop(due)
            self.now = max(self.now, time)
            action(*arguments)
        self.now = end
