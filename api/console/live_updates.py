"""`/console/changes`: tells pages that something has changed, so that they ask for it again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress

import anyio
from fastapi import APIRouter

from api.console.context import TheConsole
from api.console.feed import Feed
from api.dependencies import Stopping
from api.routes.events import EventStream
from controlplane.model.events import Event

router = APIRouter(include_in_schema=False)

_TICK = 2.0  # seconds after which counts are looked at again although nothing has happened
_REST = 1.0  # seconds between two words at least: pages have to be made, too
_MOST_TOLD = 3  # sentences at a time; nobody listens to more

# What each kind of event may have changed on a page, by the first word of the kind.
_TOPICS = {"envoy": "envoys", "rollout": "rollouts"}
_COUNTED = ("nodes", "envoys", "rollouts")
# What is said to those who cannot see it.
_TOLD = ("node.state", "rollout.", "envoy.nack", "envoy.problem", "source.outage", "balance.floor")


@router.get("/console/changes")
async def stream_changes(console: TheConsole, stopping: Stopping) -> EventStream:
    text = chunks(console.feed, stopping)
    return EventStream(text, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def chunks(
    feed: Feed, stopping: asyncio.Event, *, tick: float = _TICK, rest: float = _REST
) -> AsyncGenerator[str, None]:
    """The stream's text, until the client leaves (which cancels us) or the server stops."""
    stop = asyncio.create_task(stopping.wait())
    seen = feed.last
    try:
        yield ": tidevoy\n\n"
        while not stop.done():
            news = asyncio.create_task(feed.news(seen))
            try:
                await asyncio.wait({stop, news}, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            events, seen = feed.events(seen), feed.last
            yield _word(events)
            await asyncio.wait({stop}, timeout=rest)
    finally:
        # Shielded, because the framework cancels again at every await once the client is gone.
        with anyio.CancelScope(shield=True):
            stop.cancel()
            with suppress(asyncio.CancelledError):
                await stop


def _word(events: Sequence[Event]) -> str:
    told = [_sentence(event) for event in events if event.kind.startswith(_TOLD)]
    if len(told) > _MOST_TOLD:
        told = [*told[:_MOST_TOLD], f"and {len(told) - _MOST_TOLD} more events"]
    return f"event: changed\ndata: {json.dumps({'topics': topics(events), 'told': told})}\n\n"


def _sentence(event: Event) -> str:
    return event.message if event.subject in event.message else f"{event.subject}: {event.message}"


def topics(events: Iterable[Event]) -> list[str]:
    """What these events may have changed; counts may have changed without any."""
    found = dict.fromkeys(_COUNTED)
    for event in events:
        found |= {_TOPICS.get(event.kind.partition(".")[0], "nodes"): None, "events": None}
    return list(found)
