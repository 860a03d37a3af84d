"""The Envoys page: state, versions and rejected configurations of the fleet; forms that change one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from api.console import pages, table
from api.console.errors import ConsoleRoute
from api.console.forms import Form, submit
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
        "limits": engine.cluster.limits(),
        "envoys": matching[:_MAX_ENVOYS],
        "match_count": len(matching),
        "total": len(all_envoys),
        "connected": sum(view.status.connected_since is not None for view in all_envoys),
        "text": text,
    }
    link = table.search_link("/console/envoys", text=text, problems="true" if only_problems else "")
    return pages.live_page(request, "envoys.html", "envoys", link, values, only_problems=only_problems)


_ReadinessForm = Literal["ready", "not-ready", "drain"]

# For each form: the switches that it sets, and what the page says then.
_READINESS_CHANGES: Mapping[_ReadinessForm, tuple[Mapping[str, bool | None], str]] = {
    "ready": ({"ready": None, "drain": None}, "is ready for new clients again"),
    "not-ready": ({"ready": False}, "is not ready for new clients"),
    "drain": ({"drain": True}, "drains"),
}


@router.get("/console/envoys/{envoy:path}/{readiness}")
async def show_readiness_form(
    request: Request, engine: EngineDep, envoy: str, readiness: _ReadinessForm
) -> Response:
    return _readiness_form(request, engine, envoy, readiness, Form())


@router.post("/console/envoys/{envoy:path}/{readiness}")
async def set_readiness(
    request: Request, engine: EngineDep, envoy: str, readiness: _ReadinessForm
) -> Response:
    async def set_ready(form: Form) -> Response:
        switches, result = _READINESS_CHANGES[readiness]
        await engine.operations.set_envoy_switches(envoy, switches)
        return pages.success(request, f"{envoy} {result}", "/console/envoys")

    form = partial(_readiness_form, request, engine, envoy, readiness)
    return await submit(request, set_ready, form)


def _readiness_form(
    request: Request, engine: EngineDep, envoy: str, readiness: _ReadinessForm, form: Form
) -> Response:
    view = engine.cluster.envoy(envoy)
    return pages.form_page(request, "_readiness.html", form.status, view=view, readiness=readiness, form=form)


def _has_problem(view: EnvoyView) -> bool:
    """Whether the Envoy is disconnected, outdated, not ready, drained, has a problem, or shares its id."""
    status = view.status
    return (
        status.connected_since is None
        or bool(status.problem or status.stale_resources)
        or not view.overrides.is_ready
        or view.overrides.is_drain_requested
        or status.streams > 1
        or status.acked_version != status.published_version
    )


def _matches(view: EnvoyView, text: str) -> bool:
    status = view.status
    return table.contains_text(
        text, (status.id, status.address, status.version, status.filter, status.group, status.zone)
    )
