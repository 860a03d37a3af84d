"""The recent events that the console shows, and a way to wait for new ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from controlplane.engine.engine import Engine
from controlplane.model.events import Event

_MAX_EVENTS = 1000
_RETRY_SECONDS = 1.0  # delay before a new subscription, after the event stream has ended


class RecentEvents:
    """The last events of an engine, oldest first."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._appended = asyncio.Event()

    async def collect(self, engine: Engine) -> None:
        """Append the engine's events until cancelled."""
        while True:
            async for event in engine.events(self._events[-1].id if self._events else 0):
                self.append(event)
            # The stream ended because this task was too slow or because the engine stops.
            await asyncio.sleep(_RETRY_SECONDS)

    def append(self, event: Event) -> None:
        """Append an event and notify the waiting tasks."""
        self._events.append(event)
        self._appended.set()
        self._appended = asyncio.Event()

    @property
    def last_id(self) -> int:
        """The id of the latest event; 0: no event yet."""
        return self._events[-1].id if self._events else 0

    def since(self, after: int = 0) -> Sequence[Event]:
        """Return the stored events with an id above `after`."""
        if after >= self.last_id:
            return ()
        return [event for event in self._events if event.id > after]

    async def wait_after(self, event_id: int) -> None:
        """Wait for an event with an id above `event_id`."""
        while self.last_id <= event_id:
            await self._appended.wait()
