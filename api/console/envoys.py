"""The page of the fleet: who is connected, with which version, and what was refused."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from api.console import pages
from api.console.errors import ConsoleRoute
from api.dependencies import EngineDep
from controlplane.model.views import EnvoyView

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_MAX_ENVOYS = 200  # Envoys on the page; the text that is looked for finds the others
_MAX_QUERY_LENGTH = 256


@router.get("/console/envoys")
async def show_envoys(request: Request, engine: EngineDep) -> Response:
    """The fleet; `text` finds some of it, `trouble` those that need a look."""
    text = request.query_params.get("text", "").strip()[:_MAX_QUERY_LENGTH]
    only_problems = request.query_params.get("trouble") == "yes"
    all_envoys = engine.envoys(traffic=False)
    found = [view for view in all_envoys if _matches(view, text) and (has_problem(view) or not only_problems)]
    values: dict[str, Any] = {
        "replicas": engine.replicas(),
        "envoys": found[:_MAX_ENVOYS],
        "found": len(found),
        "total": len(all_envoys),
        "connected": sum(view.status.connected_since is not None for view in all_envoys),
        "troubled": {view.status.id for view in found if has_problem(view)},
        "text": text,
    }
    params = {"text": text, "trouble": "yes" if only_problems else ""}
    link = "/console/envoys?" + urlencode({name: value for name, value in params.items() if value})
    return pages.live_page(request, "envoys.html", "envoys", link, values, only_trouble=only_problems)


def has_problem(view: EnvoyView) -> bool:
    """Whether it is away, serves without what it should have, or does not run what was published last."""
    status = view.status
    return (
        status.connected_since is None
        or bool(status.problem or status.stale_resources)
        or status.streams > 1
        or status.acked_version != status.published_version
    )


def _matches(view: EnvoyView, text: str) -> bool:
    status = view.status
    texts = (status.id, status.address, status.version, status.filter, status.group, status.zone)
    return not text or any(text.casefold() in each.casefold() for each in texts)
