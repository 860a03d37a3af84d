"""`/v1/events`: what happens, as server-sent events (https://html.spec.whatwg.org/#server-sent-events)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.types import Send

from api.dependencies import Stopping, TheEngine
from api.problems import Kind, declared
from api.schemas import nodes
from controlplane.model.events import Event

router = APIRouter(tags=["events"])

HEARTBEAT = 15.0  # seconds; below the idle limits that proxies commonly have
_BACKLOG_PAUSE = 0.1  # seconds without an event after which the kept ones have all been sent


_ENDLESS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A stream that ends with the server.",
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
                            "contentSchema": {"$ref": "#/components/schemas/Event"},
                        },
                    },
                }
            }
        },
    }
}


class EventsQuery(BaseModel):
    """How long to listen."""

    model_config = ConfigDict(extra="forbid")

    follow: bool = Field(True, description="false: end after the events that are kept.")


_LARGEST_ID = 2**63 - 1
_LastEventId = Annotated[
    int | None,
    Header(ge=0, le=_LARGEST_ID),
    # A header is there or it is not; it cannot be null.
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": _LARGEST_ID}),
]


class EventStream(StreamingResponse):
    """Server-sent events."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        """Also lets go of the events when the client leaves while a chunk is on its way."""
        assert isinstance(self.body_iterator, AsyncGenerator)
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


@router.get(
    "/v1/events",
    summary="Events as they happen",
    description=(
        "`event` is the first word of the kind (node, envoy, session, rollout ...), `data` an Event as JSON. "
        "With `Last-Event-ID` the kept events after it come first; 0 gives all kept ones."
    ),
    response_class=EventStream,
    responses=_ENDLESS | declared(Kind.INVALID_REQUEST),
)
async def stream_events(
    engine: TheEngine,
    stopping: Stopping,
    query: Annotated[EventsQuery, Query()],
    last_event_id: _LastEventId = None,
) -> EventStream:
    text = chunks(engine.events(last_event_id), stopping, follow=query.follow)
    return EventStream(text, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def chunks(
    events: AsyncIterator[Event], stopping: asyncio.Event, *, follow: bool, heartbeat: float = HEARTBEAT
) -> AsyncGenerator[str, None]:
    """The stream's text, until the client leaves (which cancels us) or the server stops."""
    stop = asyncio.create_task(stopping.wait())
    upcoming = asyncio.create_task(_next(events))
    try:
        yield ": tidevoy\n\n"  # headers and a first byte leave at once, whatever stands in between
        while not stop.done():
            await asyncio.wait(
                {stop, upcoming},
                timeout=heartbeat if follow else _BACKLOG_PAUSE,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if upcoming.done():
                if (event := upcoming.result()) is None:
                    return
                upcoming = asyncio.create_task(_next(events))
                yield sse(event)
            elif not follow:
                return
            elif not stop.done():
                yield ": alive\n\n"
    finally:
        # Shielded, because the framework cancels again at every await once the client is gone.
        with anyio.CancelScope(shield=True):
            await _end(stop, upcoming)
            if isinstance(events, AsyncGenerator):
                await events.aclose()


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def sse(event: Event) -> str:
    """One event in the wire format."""
    topic = event.kind.partition(".")[0]
    return f"id: {event.id}\nevent: {topic}\ndata: {nodes.event(event).model_dump_json()}\n\n"
