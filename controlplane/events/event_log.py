"""What happened, lately: a short memory of events and a live feed of them."""

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
# A reader that is this far behind has stopped reading: it is cut off rather than kept in memory for ever.
_MAX_READER_BACKLOG = 1000


class EventLog:
    """The last events, and an iterator over those to come for each reader."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent_events: deque[Event] = deque(maxlen=_MAX_KEPT_EVENTS)
        # Weak: a reader that is dropped, even before its first look, needs no word to be forgotten.
        self._readers: weakref.WeakSet[asyncio.Queue[Event | None]] = weakref.WeakSet()
        self._is_closed = False
        # Ids grow over restarts too, so that a reader that resumes with an old id misses nothing new.
        self._next_id = int(clock() * 1000)

    def append(self, kind: str, subject: str, message: str, data: Mapping[str, Any] = EMPTY_MAP) -> Event:
        """Record an event and hand it to every reader."""
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
        """Events from this call on; first those still kept with an id above `after`, when it is given."""
        backlog = [] if after_id is None else [event for event in self._recent_events if event.id > after_id]
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        if self._is_closed:
            queue.put_nowait(None)
        else:
            self._readers.add(queue)
        return _iterate(backlog, queue)

    def close(self) -> None:
        """End all readers, those to come too."""
        self._is_closed = True
        for queue in self._readers:
            queue.put_nowait(None)


async def _iterate(backlog: list[Event], queue: asyncio.Queue[Event | None]) -> AsyncGenerator[Event, None]:
    for event in backlog:
        yield event
    while (upcoming := await queue.get()) is not None:
        yield upcoming
