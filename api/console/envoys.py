"""The Envoys page: connection state, versions, and rejected configurations of the fleet."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from api.console import pages, table
from api.console.errors import ConsoleRoute
from api.dependencies import EngineDep
from controlplane.model.views import EnvoyView

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_MAX_ENVOYS = 200  # on the page; the search finds the others


@router.get("/console/envoys")
async def show_envoys(request: Request, engine: EngineDep) -> Response:
    """Show the fleet. `text` filters by text; `problems=true` shows only Envoys with problems."""
    text = table.read_search_text(request.query_params)
    only_problems = request.query_params.get("problems") == "true"
    all_envoys = engine.cluster.envoys(traffic=False)
    matching = [
        view for view in all_envoys if _matches(view, text) and (_has_problem(view) or not only_problems)
    ]
    values: dict[str, Any] = {
        "replicas": engine.replicas(),
        "envoys": matching[:_MAX_ENVOYS],
        "match_count": len(matching),
        "total": len(all_envoys),
        "connected": sum(view.status.connected_since is not None for view in all_envoys),
        "text": text,
    }
    link = table.search_link("/console/envoys", text=text, problems="true" if only_problems else "")
    return pages.live_page(request, "envoys.html", "envoys", link, values, only_problems=only_problems)


def _has_problem(view: EnvoyView) -> bool:
    """Whether the Envoy is disconnected, outdated, reports a problem, or shares its id with another."""
    status = view.status
    return (
        status.connected_since is None
        or bool(status.problem or status.stale_resources)
        or status.streams > 1
        or status.acked_version != status.published_version
    )


def _matches(view: EnvoyView, text: str) -> bool:
    status = view.status
    return table.contains_text(
        text, (status.id, status.address, status.version, status.filter, status.group, status.zone)
    )
