"""Log of recent events, with a live feed for each reader."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from controlplane.clock import Clock
from controlplane.model.events import Event
from controlplane.model.nodes import EMPTY_MAP

_MAX_KEPT_EVENTS = 1000
# A reader that is this far behind has stopped reading; its feed ends, so that its queue cannot grow for ever.
_MAX_READER_BACKLOG = 1000


class EventLog:
    """Keeps the most recent events and gives each reader an iterator over later ones."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent_events: deque[Event] = deque(maxlen=_MAX_KEPT_EVENTS)
        # Weak references: a reader that is dropped, even before its first read, needs no explicit removal.
        self._readers: weakref.WeakSet[asyncio.Queue[Event | None]] = weakref.WeakSet()
        self._is_closed = False
        # Ids also increase across restarts, so that a reader that resumes with an old id gets all new events.
        self._next_id = int(clock() * 1000)

    def append(self, kind: str, subject: str, message: str, data: Mapping[str, Any] = EMPTY_MAP) -> Event:
        """Record an event and send it to every reader."""
        event = Event(self._next_id, self._clock(), kind, subject, message, data)
        self._next_id += 1
        self._recent_events.append(event)
        for queue in list(self._readers):
            if queue.qsize() >= _MAX_READER_BACKLOG:
                self._readers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)
        return event

    def subscribe(self, after_id: int | None = None) -> AsyncGenerator[Event, None]:
        """Return an iterator over the events from this call on.

        If `after_id` is given, the kept events with a higher id come first.
        """
        backlog = [] if after_id is None else [event for event in self._recent_events if event.id > after_id]
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        if self._is_closed:
            queue.put_nowait(None)
        else:
            self._readers.add(queue)
        return _iterate(backlog, queue)

    def close(self) -> None:
        """End the iterators of all current and future readers."""
        self._is_closed = True
        for queue in self._readers:
            queue.put_nowait(None)


async def _iterate(backlog: list[Event], queue: asyncio.Queue[Event | None]) -> AsyncGenerator[Event, None]:
    for event in backlog:
        yield event
    while (next_event := await queue.get()) is not None:
        yield next_event
