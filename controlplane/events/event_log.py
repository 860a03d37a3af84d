"""What happened, lately: a short memory of events and a live feed of them."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from controlplane.clock import Clock
from controlplane.model.events import Event
from controlplane.model.nodes import NOTHING

_KEPT = 1000
# A reader that is this far behind has stopped reading: it is cut off rather than kept in memory for ever.
_BACKLOG = 1000


class EventLog:
    """The last events, and an iterator over those to come for each reader."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: deque[Event] = deque(maxlen=_KEPT)
        # Weak: a reader that is dropped, even before its first look, needs no word to be forgotten.
        self._readers: weakref.WeakSet[asyncio.Queue[Event | None]] = weakref.WeakSet()
        self._closed = False
        # Ids grow over restarts too, so that a reader that resumes with an old id misses nothing new.
        self._next = int(clock() * 1000)

    def append(self, kind: str, subject: str, message: str, data: Mapping[str, Any] = NOTHING) -> Event:
        """Record an event and hand it to every reader."""
        event = Event(self._next, self._clock(), kind, subject, message, data)
        self._next += 1
        self._kept.append(event)
        for queue in list(self._readers):
            if queue.qsize() >= _BACKLOG:
                self._readers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)
        return event

    def follow(self, after: int | None = None) -> AsyncGenerator[Event, None]:
        """Events from this call on; first those still kept with an id above `after`, when it is given."""
        kept = [] if after is None else [event for event in self._kept if event.id > after]
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        if self._closed:
            queue.put_nowait(None)
        else:
            self._readers.add(queue)
        return _read(kept, queue)

    def close(self) -> None:
        """End all readers, those to come too."""
        self._closed = True
        for queue in self._readers:
            queue.put_nowait(None)


async def _read(kept: list[Event], queue: asyncio.Queue[Event | None]) -> AsyncGenerator[Event, None]:
    for event in kept:
        yield event
    while (upcoming := await queue.get()) is not None:
        yield upcoming
