"""The events page: recent events, newest first."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.console import pages, table
from api.console.errors import ConsoleRoute
from api.dependencies import EngineDep
from api.routes.events import event_topic, read_stored_events

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_MAX_EVENTS = 100  # on the page


@router.get("/console/events")
async def show_events(request: Request, engine: EngineDep) -> Response:
    """Show the events, filtered by `text` and `topic` (the first word of the event kind)."""
    text = table.read_search_text(request.query_params)
    topic = request.query_params.get("topic", "")
    stored_events = await read_stored_events(engine.events.subscribe(0))
    topics = sorted({event_topic(event) for event in stored_events})
    matching = [
        event
        for event in reversed(stored_events)
        if topic in ("", event_topic(event))
        and table.contains_text(text, (event.kind, event.subject, event.message))
    ]
    link = table.search_link("/console/events", text=text, topic=topic if topic in topics else "")
    values = {"events": matching[:_MAX_EVENTS], "match_count": len(matching), "total": len(stored_events)}
    return pages.live_page(
        request, "events.html", "events", link, values, text=text, topic=topic, topics=topics
    )
