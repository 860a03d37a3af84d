"""`/console/updates`: a stream that notifies pages of changes, so that they refresh their content."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress

from fastapi import APIRouter

from api.dependencies import EngineDep, StoppingDep
from api.routes.events import STREAM_HEADERS, EventStream, iter_batches
from controlplane.events.event_messages import Event

router = APIRouter(include_in_schema=False)

_POLL_SECONDS = 2.0  # counters change without events, so pages refresh at least this often
_MIN_INTERVAL_SECONDS = 1.0  # between two messages, because after each one the server renders pages
_MAX_ANNOUNCEMENTS = 3  # per message; users do not read more

# In each message: counters change without events.
_POLLED_TOPICS = ("nodes", "envoys", "statements", "rules", "capture", "rollouts")
# Events that are announced as text, also to screen readers.
_ANNOUNCED_EVENTS = (
    "node.state",
    "rollout.",
    "envoy.nack",
    "envoy.problem",
    "source.outage",
    "balance.panic_threshold",
)


@router.get("/console/updates")
async def stream_updates(engine: EngineDep, stopping: StoppingDep) -> EventStream:
    return EventStream(iter_sse_updates(engine.events.subscribe(), stopping), headers=STREAM_HEADERS)


async def iter_sse_updates(
    events: AsyncIterator[Event],
    stopping: asyncio.Event,
    *,
    poll_seconds: float = _POLL_SECONDS,
    min_interval: float = _MIN_INTERVAL_SECONDS,
) -> AsyncGenerator[str, None]:
    """Yield the stream's text until the client disconnects (which cancels the task) or the server stops."""
    yield ": tidevoy\n\n"
    async with aclosing(iter_batches(events, stopping, poll_seconds)) as batches:
        async for batch in batches:
            yield _update_message(batch)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), min_interval)


def _update_message(events: Sequence[Event]) -> str:
    announcements = [_announcement(event) for event in events if event.kind.startswith(_ANNOUNCED_EVENTS)]
    if len(announcements) > _MAX_ANNOUNCEMENTS:
        announcements = [
            *announcements[:_MAX_ANNOUNCEMENTS],
            f"and {len(announcements) - _MAX_ANNOUNCEMENTS} more events",
        ]
    topics = (*_POLLED_TOPICS, "events") if events else _POLLED_TOPICS
    data = json.dumps({"topics": topics, "announcements": announcements})
    return f"event: changed\ndata: {data}\n\n"


def _announcement(event: Event) -> str:
    return event.message if event.subject in event.message else f"{event.subject}: {event.message}"
