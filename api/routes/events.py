"""`/v1/events`: the event log as server-sent events (https://html.spec.whatwg.org/#server-sent-events)."""

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

from api.dependencies import EngineDep, StoppingDep
from api.problems import ProblemKind, openapi_responses
from api.schemas import nodes
from controlplane.model.events import Event

router = APIRouter(tags=["events"])

HEARTBEAT_SECONDS = 15.0  # below the common idle timeouts of proxies
_BACKLOG_IDLE_SECONDS = 0.1  # after this time without an event, all stored events have been sent


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
                            "contentSchema": {"$ref": "#/components/schemas/EventSchema"},
                        },
                    },
                }
            }
        },
    }
}


class EventsQuery(BaseModel):
    """The query of the event stream."""

    model_config = ConfigDict(extra="forbid")

    follow: bool = Field(True, description="false: end after the stored events.")


_MAX_EVENT_ID = 2**63 - 1
_LastEventId = Annotated[
    int | None,
    Header(ge=0, le=_MAX_EVENT_ID),
    # A header is present or absent; it cannot be null.
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": _MAX_EVENT_ID}),
]


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
        "`event` is the first word of the kind (node, envoy, session, rollout ...), `data` an Event as JSON. "
        "With `Last-Event-ID`, the stored events after it are sent first; 0 sends all stored events."
    ),
    response_class=EventStream,
    responses=_EVENT_STREAM_RESPONSE | openapi_responses(ProblemKind.INVALID_REQUEST),
)
async def stream_events(
    engine: EngineDep,
    stopping: StoppingDep,
    query: Annotated[EventsQuery, Query()],
    last_event_id: _LastEventId = None,
) -> EventStream:
    text = iter_sse_events(engine.events(last_event_id), stopping, follow=query.follow)
    return EventStream(text, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def iter_sse_events(
    events: AsyncIterator[Event],
    stopping: asyncio.Event,
    *,
    follow: bool,
    heartbeat: float = HEARTBEAT_SECONDS,
) -> AsyncGenerator[str, None]:
    """Yield the stream's text until the client disconnects (which cancels the task) or the server stops."""
    stop = asyncio.create_task(stopping.wait())
    next_event = asyncio.create_task(_next_event(events))
    try:
        yield ": tidevoy\n\n"  # makes proxies forward the headers and a first byte at once
        while not stop.done():
            await asyncio.wait(
                {stop, next_event},
                timeout=heartbeat if follow else _BACKLOG_IDLE_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if next_event.done():
                if (event := next_event.result()) is None:
                    return
                next_event = asyncio.create_task(_next_event(events))
                yield format_sse(event)
            elif not follow:
                return
            elif not stop.done():
                yield ": alive\n\n"
    finally:
        # Shielded, because after a disconnect the framework cancels again at every await.
        with anyio.CancelScope(shield=True):
            await _cancel_tasks(stop, next_event)
            if isinstance(events, AsyncGenerator):
                await events.aclose()


async def _next_event(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def _cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def format_sse(event: Event) -> str:
    """Return one event in the wire format of server-sent events."""
    topic = event.kind.partition(".")[0]
    return f"id: {event.id}\nevent: {topic}\ndata: {nodes.to_event_schema(event).model_dump_json()}\n\n"
