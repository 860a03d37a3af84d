"""The event queue and clock of a simulation."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Runs actions in the order of their times (seconds since the start), then in the order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sequence_number = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule `action` at `time`. If `time` is past, the action runs as soon as possible."""
        self._sequence_number += 1
        heapq.heappush(self._events, (time, self._sequence_number, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, action, *arguments)

    def run_until(self, end: float) -> None:
        """Run all actions due before `end`, then set the clock to `end`."""
        due = self._events
        while due and due[0][0] < end:
            time, _, action, arguments = heapq.heappop(due)
            self.now = max(self.now, time)
            action(*arguments)
        self.now = end
