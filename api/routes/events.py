"""`/v1/events`: the event log as server-sent events (https://html.spec.whatwg.org/#server-sent-events)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from starlette.types import Send

from api.dependencies import EngineDep, StoppingDep
from api.problems import ProblemKind, openapi_responses
from api.schemas.events import EventDetails, EventsQuery, LastEventId
from controlplane.events.event_messages import Event

router = APIRouter(tags=["events"])

HEARTBEAT_SECONDS = 15.0  # below the common idle timeouts of proxies
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

_EVENT_STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A stream that ends when the server stops.",
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "required": ["id", "event", "data"],
                    "properties": {
                        "id": {"type": "string"},
                        "event": {"type": "string"},
                        "data": {
                            "type": "string",
                            "contentMediaType": "application/json",
                            "contentSchema": {"$ref": "#/components/schemas/EventDetails"},
                        },
                    },
                }
            }
        },
    }
}


class EventStream(StreamingResponse):
    """A response of server-sent events."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        """Send the stream, and close the event iterator even if the client disconnects during a chunk."""
        assert isinstance(self.body_iterator, AsyncGenerator)
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


@router.get(
    "/v1/events",
    summary="Stream events as they happen",
    description=(
        "`event` is the first word of the kind (node, envoy, rollout ...), and `data` is the event as JSON. "
        "With `Last-Event-ID`, the stored events after it are sent first; 0 sends all stored events."
    ),
    response_class=EventStream,
    responses=_EVENT_STREAM_RESPONSE | openapi_responses(ProblemKind.INVALID_REQUEST),
)
async def stream_events(
    engine: EngineDep,
    stopping: StoppingDep,
    query: Annotated[EventsQuery, Query()],
    last_event_id: LastEventId = None,
) -> Response:
    events = engine.events.subscribe(last_event_id)
    if query.follow:
        return EventStream(iter_sse_events(events, stopping), headers=STREAM_HEADERS)
    text = "".join(format_sse(event) for event in await read_stored_events(events))
    return Response(text, media_type=EventStream.media_type, headers=STREAM_HEADERS)


async def iter_sse_events(
    events: AsyncIterator[Event], stopping: asyncio.Event, heartbeat: float = HEARTBEAT_SECONDS
) -> AsyncGenerator[str, None]:
    """Yield the stream's text until the client disconnects (which cancels the task) or the server stops."""
    yield ": tidevoy\n\n"  # a comment line, so that proxies forward the headers at once
    async with aclosing(iter_batches(events, stopping, heartbeat)) as batches:
        async for batch in batches:
            yield "".join(map(format_sse, batch)) or ": alive\n\n"


async def iter_batches(
    events: AsyncIterator[Event], stopping: asyncio.Event, timeout: float
) -> AsyncGenerator[list[Event], None]:
    """Yield lists of new events, or an empty list after `timeout` seconds without an event.

    The iterator ends when the server stops or the subscription ends.
    """
    stop = asyncio.create_task(stopping.wait())
    next_event = asyncio.create_task(_next_event(events))
    try:
        while not stop.done():
            await asyncio.wait({stop, next_event}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            batch: list[Event] = []
            while next_event.done() and (event := next_event.result()) is not None:
                batch.append(event)
                next_event = asyncio.create_task(_next_event(events))
                await asyncio.sleep(0)  # so that the task can take an event that has already arrived
            if batch or not (stop.done() or next_event.done()):
                yield batch
            if next_event.done() and next_event.result() is None:
                return
    finally:
        # Shielded, because after a disconnect the framework cancels again at every await.
        with anyio.CancelScope(shield=True):
            for task in (stop, next_event):
                task.cancel()
            await asyncio.wait({stop, next_event})
            if isinstance(events, AsyncGenerator):
                await events.aclose()


async def _next_event(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def read_stored_events(events: AsyncIterator[Event]) -> list[Event]:
    """Return the events that the subscription can deliver at once, without waiting for new ones."""
    stored: list[Event] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(0):  # takes effect at the first wait
            async for event in events:
                stored.append(event)
    return stored


def event_topic(event: Event) -> str:
    """Return the first word of the event's kind."""
    return event.kind.partition(".")[0]


def format_sse(event: Event) -> str:
    """Return one event in the wire format of server-sent events."""
    data = EventDetails.model_validate(event).model_dump_json()
    return f"id: {event.id}\nevent: {event_topic(event)}\ndata: {data}\n\n"
