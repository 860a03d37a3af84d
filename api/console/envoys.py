"""The page of the fleet: who is connected, with which version, and what was refused."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from api.console import pages
from api.console.errors import ConsoleRoute
from api.dependencies import TheEngine
from controlplane.model.views import EnvoyView

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_MOST = 200  # Envoys on the page; the text that is looked for finds the others
_LONGEST_TEXT = 256


@router.get("/console/envoys")
async def show_envoys(request: Request, engine: TheEngine) -> Response:
    """The fleet; `text` finds some of it, `trouble` those that need a look."""
    text = request.query_params.get("text", "").strip()[:_LONGEST_TEXT]
    only_trouble = request.query_params.get("trouble") == "yes"
    every = engine.envoys(traffic=False)
    found = [view for view in every if _fits(view, text) and (in_trouble(view) or not only_trouble)]
    values: dict[str, Any] = {
        "replicas": engine.replicas(),
        "envoys": found[:_MOST],
        "found": len(found),
        "total": len(every),
        "connected": sum(view.status.connected_since is not None for view in every),
        "troubled": {view.status.id for view in found if in_trouble(view)},
        "text": text,
    }
    asked = {"text": text, "trouble": "yes" if only_trouble else ""}
    link = "/console/envoys?" + urlencode({name: value for name, value in asked.items() if value})
    return pages.live(request, "envoys.html", "envoys", link, values, only_trouble=only_trouble)


def in_trouble(view: EnvoyView) -> bool:
    """Whether it is away, serves without what it should have, or does not run what was published last."""
    status = view.status
    return (
        status.connected_since is None
        or bool(status.problem or status.outdated)
        or status.streams > 1
        or status.acked_version != status.published_version
    )


def _fits(view: EnvoyView, text: str) -> bool:
    status = view.status
    told = (status.id, status.address, status.version, status.filter, status.group, status.zone)
    return not text or any(text.casefold() in each.casefold() for each in told)
