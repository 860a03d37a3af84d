"""What happened, lately: a short memory of events and a live feed of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from controlplane.clock import Clock
from controlplane.model import NOTHING, Event

_KEPT = 1000
# A reader that is this far behind has stopped reading: it is cut off rather than kept in memory for ever.
_BACKLOG = 1000


class EventLog:
    """The last events, and an iterator over those to come for each reader."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: deque[Event] = deque(maxlen=_KEPT)
        self._readers: set[asyncio.Queue[Event | None]] = set()
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

    async def follow(self, after: int | None = None) -> AsyncIterator[Event]:
        """Events to come; first those still kept with an id above `after`, when it is given."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        if after is not None:
            for event in self._kept:
                if event.id > after:
                    queue.put_nowait(event)
        self._readers.add(queue)
        try:
            while (upcoming := await queue.get()) is not None:
                yield upcoming
        finally:
            self._readers.discard(queue)

    def close(self) -> None:
        """End all readers."""
        for queue in self._readers:
            queue.put_nowait(None)
