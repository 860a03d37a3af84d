"""Log of recent events, with a live feed for each reader."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter

from controlplane.clock import Clock
from controlplane.events.event_messages import Event, is_warning
from controlplane.model.nodes import EMPTY_MAP

log = structlog.get_logger("tidevoy.engine")

_MAX_KEPT_EVENTS = 1000
# The feed of a reader with more unread events ends, so that its queue cannot grow for ever.
_MAX_READER_BACKLOG = 1000
_MAX_EVENTS_TO_FORWARD = 1000  # if more wait, the oldest are dropped
# Kinds whose counters are exported as 0 from the start, so that an alert on an increase sees the first event.
_COUNTED_FROM_START = (
    "envoy.denied",
    "xds.push_failed",
    *(f"{part}.certificates_rejected" for part in ("api", "balance", "health", "xds")),
)


class EventLog:
    """Stores the most recent events and gives each reader an iterator over later events."""

    def __init__(self, clock: Clock, registry: CollectorRegistry | None = None) -> None:
        self._clock = clock
        self._recent_events: deque[Event] = deque(maxlen=_MAX_KEPT_EVENTS)
        # Weak references, so that an abandoned reader is removed automatically.
        self._readers: weakref.WeakSet[asyncio.Queue[Event | None]] = weakref.WeakSet()
        self._events_to_forward: asyncio.Queue[Event] | None = None
        self._dropped_count = 0  # events to forward that were dropped since the last warning about drops
        self._is_closed = False
        # Ids also increase across restarts, so a reader that resumes with an old id gets all new events.
        self._next_id = int(clock() * 1000)
        self._counter = Counter("tidevoy_events_total", "Events by kind.", ["kind"], registry=registry)
        for kind in _COUNTED_FROM_START:
            self._counter.labels(kind)

    def emit(self, kind: str, subject: str, message: str, data: Mapping[str, Any] = EMPTY_MAP) -> None:
        """Record an event: log it, count it, and send it to all readers and to `events_to_forward`."""
        event = self._append(kind, subject, message, data)
        queue = self._events_to_forward
        if queue is not None:
            if queue.full():
                queue.get_nowait()
                self._dropped_count += 1
            queue.put_nowait(event)

    def record_unforwarded(self, kind: str, subject: str, message: str, data: Mapping[str, Any]) -> None:
        """Record an event, but do not forward it, for example because it came from another replica."""
        self._append(kind, subject, message, data)

    def _append(self, kind: str, subject: str, message: str, data: Mapping[str, Any]) -> Event:
        event = Event(self._next_id, self._clock(), kind, subject, message, data)
        self._next_id += 1
        self._recent_events.append(event)
        self._counter.labels(kind).inc()
        write = log.warning if is_warning(kind) else log.info
        write(message, kind=kind, subject=subject)
        for queue in list(self._readers):
            if queue.qsize() >= _MAX_READER_BACKLOG:
                self._readers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)
        return event

    def subscribe(self, after_id: int | None = None) -> AsyncGenerator[Event, None]:
        """Return an iterator over all events after this call.

        If `after_id` is given, the stored events with a higher id come first.
        """
        backlog = [] if after_id is None else [event for event in self._recent_events if event.id > after_id]
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        if self._is_closed:
            queue.put_nowait(None)
        else:
            self._readers.add(queue)
        return _iterate(backlog, queue)

    def events_to_forward(self) -> AsyncGenerator[Event, None]:
        """Return an iterator over the events that `emit` records after this call. A slow reader misses some.

        Only one such reader may exist at a time.
        """
        self._events_to_forward = asyncio.Queue(_MAX_EVENTS_TO_FORWARD)
        return self._iterate_forwarded(self._events_to_forward)

    async def _iterate_forwarded(self, queue: asyncio.Queue[Event]) -> AsyncGenerator[Event, None]:
        try:
            while True:
                event = await queue.get()
                if self._dropped_count:
                    log.warning("events were not sent to other replicas: too many", count=self._dropped_count)
                    self._dropped_count = 0
                yield event
        finally:
            self._events_to_forward = None

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
