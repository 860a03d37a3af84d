"""The Envoys page: connection state, versions, and rejected configurations of the fleet."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from api.console import pages
from api.console.errors import ConsoleRoute
from api.dependencies import EngineDep
from controlplane.model.views import EnvoyView

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_MAX_ENVOYS = 200  # on the page; the search finds the others
_MAX_QUERY_LENGTH = 256


@router.get("/console/envoys")
async def show_envoys(request: Request, engine: EngineDep) -> Response:
    """Show the fleet. `text` filters by text; `trouble=yes` shows only Envoys with problems."""
    text = request.query_params.get("text", "").strip()[:_MAX_QUERY_LENGTH]
    only_problems = request.query_params.get("trouble") == "yes"
    all_envoys = engine.envoys(traffic=False)
    matching = [
        view for view in all_envoys if _matches(view, text) and (has_problem(view) or not only_problems)
    ]
    values: dict[str, Any] = {
        "replicas": engine.replicas(),
        "envoys": matching[:_MAX_ENVOYS],
        "match_count": len(matching),
        "total": len(all_envoys),
        "connected": sum(view.status.connected_since is not None for view in all_envoys),
        "problem_ids": {view.status.id for view in matching if has_problem(view)},
        "text": text,
    }
    params = {"text": text, "trouble": "yes" if only_problems else ""}
    link = "/console/envoys?" + urlencode({name: value for name, value in params.items() if value})
    return pages.live_page(request, "envoys.html", "envoys", link, values, only_problems=only_problems)


def has_problem(view: EnvoyView) -> bool:
    """Whether the Envoy is disconnected, reports a problem, or has not applied the latest snapshot."""
    status = view.status
    return (
        status.connected_since is None
        or bool(status.problem or status.stale_resources)
        or status.streams > 1
        or status.acked_version != status.published_version
    )


def _matches(view: EnvoyView, text: str) -> bool:
    status = view.status
    searchable = (status.id, status.address, status.version, status.filter, status.group, status.zone)
    return not text or any(text.casefold() in value.casefold() for value in searchable)
