"""The events page: recent events, newest first."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from api.console import pages
from api.console.context import ConsoleDep
from api.console.errors import ConsoleRoute
from controlplane.model.events import Event

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_MAX_EVENTS = 100  # on the page
_MAX_QUERY_LENGTH = 256


@router.get("/console/events")
async def show_events(request: Request, console: ConsoleDep) -> Response:
    """Show the events, filtered by `text` and `topic` (the first word of the event kind)."""
    text = request.query_params.get("text", "").strip()[:_MAX_QUERY_LENGTH]
    topic = request.query_params.get("topic", "")
    recent_events = console.recent_events.since()
    topics = sorted({_topic(event) for event in recent_events})
    matching = [event for event in reversed(recent_events) if _matches(event, text, topic)]
    params = {"text": text, "topic": topic if topic in topics else ""}
    link = "/console/events?" + urlencode({name: value for name, value in params.items() if value})
    values = {
        "events": matching[:_MAX_EVENTS],
        "match_count": len(matching),
        "total": len(recent_events),
    }
    return pages.live_page(
        request, "events.html", "events", link, values, text=text, topic=topic, topics=topics
    )


def _topic(event: Event) -> str:
    return event.kind.partition(".")[0]


def _matches(event: Event, text: str, topic: str) -> bool:
    if topic and _topic(event) != topic:
        return False
    needle = text.casefold()
    searchable = (event.kind, event.subject, event.message)
    return not text or any(needle in value.casefold() for value in searchable)
