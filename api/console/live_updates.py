"""`/console/changes`: a stream that notifies pages of changes, so that they refresh their content."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress

import anyio
from fastapi import APIRouter

from api.console.context import ConsoleDep
from api.console.feed import RecentEvents
from api.dependencies import StoppingDep
from api.routes.events import EventStream
from controlplane.model.events import Event

router = APIRouter(include_in_schema=False)

_POLL_SECONDS = 2.0  # counters change without events, so pages refresh at least this often
_MIN_INTERVAL_SECONDS = 1.0  # between two messages, because each makes the server render pages
_MAX_ANNOUNCEMENTS = 3  # per message; users do not read more

# The topic that an event changes, by the first word of its kind.
_TOPIC_BY_EVENT = {"envoy": "envoys", "rollout": "rollouts"}
_POLLED_TOPICS = ("nodes", "envoys", "rollouts")
# Events that are announced as text, also to screen readers.
_ANNOUNCED_EVENTS = (
    "node.state",
    "rollout.",
    "envoy.nack",
    "envoy.problem",
    "source.outage",
    "balance.panic_threshold",
)


@router.get("/console/changes")
async def stream_changes(console: ConsoleDep, stopping: StoppingDep) -> EventStream:
    text = iter_sse_changes(console.recent_events, stopping)
    return EventStream(text, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def iter_sse_changes(
    recent_events: RecentEvents,
    stopping: asyncio.Event,
    *,
    poll_seconds: float = _POLL_SECONDS,
    min_interval: float = _MIN_INTERVAL_SECONDS,
) -> AsyncGenerator[str, None]:
    """Yield the stream's text until the client disconnects (which cancels the task) or the server stops."""
    stop_task = asyncio.create_task(stopping.wait())
    last_id = recent_events.last_id
    try:
        yield ": tidevoy\n\n"
        while not stop_task.done():
            event_task = asyncio.create_task(recent_events.wait_after(last_id))
            try:
                await asyncio.wait(
                    {stop_task, event_task}, timeout=poll_seconds, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                event_task.cancel()
            events, last_id = recent_events.since(last_id), recent_events.last_id
            yield _change_message(events)
            await asyncio.wait({stop_task}, timeout=min_interval)
    finally:
        # Shielded, because after a disconnect the framework cancels again at every await.
        with anyio.CancelScope(shield=True):
            stop_task.cancel()
            with suppress(asyncio.CancelledError):
                await stop_task


def _change_message(events: Sequence[Event]) -> str:
    announcements = [_announcement(event) for event in events if event.kind.startswith(_ANNOUNCED_EVENTS)]
    if len(announcements) > _MAX_ANNOUNCEMENTS:
        announcements = [
            *announcements[:_MAX_ANNOUNCEMENTS],
            f"and {len(announcements) - _MAX_ANNOUNCEMENTS} more events",
        ]
    data = json.dumps({"topics": changed_topics(events), "announcements": announcements})
    return f"event: changed\ndata: {data}\n\n"


def _announcement(event: Event) -> str:
    return event.message if event.subject in event.message else f"{event.subject}: {event.message}"


def changed_topics(events: Iterable[Event]) -> list[str]:
    """Return the topics that may have changed; the polled ones always may, because counters need no event."""
    topics = dict.fromkeys(_POLLED_TOPICS)
    for event in events:
        topics |= {_TOPIC_BY_EVENT.get(event.kind.partition(".")[0], "nodes"): None, "events": None}
    return list(topics)
