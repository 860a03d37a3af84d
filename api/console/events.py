"""The page of events: what happened lately, the newest first."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from api.console import pages
from api.console.context import TheConsole
from api.console.errors import ConsoleRoute
from controlplane.model.events import Event

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_MOST = 100  # on the page
_LONGEST_TEXT = 256


@router.get("/console/events")
async def show_events(request: Request, console: TheConsole) -> Response:
    """Events; `text` and `topic` (the first word of their kind) find some of them."""
    text = request.query_params.get("text", "").strip()[:_LONGEST_TEXT]
    topic = request.query_params.get("topic", "")
    kept = console.feed.events()
    topics = sorted({_topic(event) for event in kept})
    found = [event for event in reversed(kept) if _fits(event, text, topic)]
    asked = {"text": text, "topic": topic if topic in topics else ""}
    link = "/console/events?" + urlencode({name: value for name, value in asked.items() if value})
    values = {"events": found[:_MOST], "found": len(found), "kept": len(kept)}
    return pages.live(request, "events.html", "events", link, values, text=text, topic=topic, topics=topics)


def _topic(event: Event) -> str:
    return event.kind.partition(".")[0]


def _fits(event: Event, text: str, topic: str) -> bool:
    if topic and _topic(event) != topic:
        return False
    wanted = text.casefold()
    return not text or any(wanted in each.casefold() for each in (event.kind, event.subject, event.message))
