"""The pages of nodes: the table at `/`, a page per node with its charts, and the forms that change nodes."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Match
from starlette.types import Scope

from api.console import charts, pages, table
from api.console.charts import HistoryDep
from api.console.errors import ConsoleRoute
from api.console.forms import Form, submit
from api.dependencies import EngineDep
from api.schemas import nodes
from api.schemas.common import Address
from controlplane.engine.engine import Engine
from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import State

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_DRAINING_STATES = (State.DRAINING, State.DRAINED)
_SECONDS_PER_MINUTE = 60.0
_AddressPath = Annotated[Address, Path(alias="address")]
_Operation = Literal["drain", "undrain", "remove", "weight"]


class _BrowserOnlyRoute(ConsoleRoute):
    """A route that matches only requests of browsers. Programs get JSON at the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        headers = dict(scope.get("headers", ()))
        is_browser = b"text/html" in headers.get(b"accept", b"") or b"hx-request" in headers
        return super().matches(scope) if is_browser else (Match.NONE, {})


async def show_nodes(request: Request, engine: EngineDep, history: HistoryDep) -> Response:
    """Show the table of all nodes."""
    query = table.TableQuery.from_params(request.query_params)
    plan, facts = engine.cluster.plan, engine.cluster.facts
    all_rows = table.build_rows(plan, facts, history, engine.cluster.now())
    page = table.paginate(all_rows, query)
    fleet = history.points(charts.FLEET_KEY)
    values: dict[str, Any] = {
        "page": page,
        "query": page.query,
        "states": {state: sum(row.state is state for row in all_rows) for state in State},
        "total": len(all_rows),
        "sessions": charts.sum_known(row.sessions for row in all_rows),
        "fleet": fleet[-1] if fleet else None,
        "trends": charts.to_columns(fleet),
        "slots": charts.MAX_POINTS,
        "notices": _notices(engine),
        "draining": {
            row.address: engine.cluster.node(row.address)
            for row in page.rows
            if row.state in _DRAINING_STATES
        },
    }
    return pages.live_page(request, "nodes.html", "nodes", page.query.link, values, query=page.query)


router.routes.append(_BrowserOnlyRoute("/", show_nodes, methods=["GET"], include_in_schema=False))


@router.get("/console/nodes/{address}")
async def show_node(
    request: Request, engine: EngineDep, history: HistoryDep, address: _AddressPath
) -> Response:
    """Show one node."""
    view = engine.cluster.node(address)
    values = {
        "view": view,
        "node": view.plan.node,
        "explanation": engine.cluster.explain([address]).get(address),
        "latest": history.latest(address),
        "progress": view.drain_progress,
    }
    return pages.live_page(request, "node.html", "nodes", pages.node_link(address), values, address=address)


@router.get("/console/history")
async def show_history(
    history: HistoryDep, node: Annotated[str, Query(max_length=255)] = charts.FLEET_KEY
) -> JSONResponse:
    """Return the traffic history of a node, by default of all nodes together, as columns for charts."""
    return JSONResponse(dict(charts.to_columns(history.points(node))))


def _notices(engine: Engine) -> list[str]:
    """Return the problems of the control plane and its sources, a sentence each."""
    plan, facts = engine.cluster.plan, engine.cluster.facts
    notices = [*engine.readiness_problems(), plan.panic_threshold_reason, facts.node_metrics_outage]
    notices += [topology.outage for topology in facts.topologies.values()]
    notices += [f"{problem.subject}: {problem.reason}" for problem in engine.cluster.topology_problems()]
    return list(dict.fromkeys(filter(None, notices)))


@router.get("/console/add")
async def show_add_form(request: Request) -> Response:
    return _add_form(request, Form())


@router.post("/console/nodes")
async def add_node(request: Request, engine: EngineDep) -> Response:
    async def add(form: Form) -> Response:
        node = nodes.AddNodeRequest(
            address=form.get("address"),
            status_address=form.get("status_address") or None,
            weight=form.integer("weight", "Weight", 0) if "weight" in form else None,
            labels=form.labels("labels") or None,
        )
        request.state.audit_subject = node.address
        await engine.operations.add(**dict(node))
        text = f"{node.address} was added; it gets sessions once it passes its checks"
        return pages.success(request, text, pages.node_link(node.address))

    return await submit(request, add, partial(_add_form, request))


def _add_form(request: Request, form: Form) -> Response:
    return pages.form_page(request, "_node_form.html", form.status, form=form)


@router.get("/console/nodes/{address}/{operation}")
async def show_operation_form(
    request: Request, engine: EngineDep, address: _AddressPath, operation: _Operation
) -> Response:
    return _operation_form(request, engine, address, operation, Form())


@router.post("/console/nodes/{address}/drain")
async def drain_node(request: Request, engine: EngineDep, address: _AddressPath) -> Response:
    async def drain(form: Form) -> Response:
        minutes = form.number("minutes", "Minutes", 10.0)
        on_deadline = form.get("on_deadline", OnDeadline.KEEP.value)
        parameters = nodes.DrainRequest.model_validate(
            {"deadline_seconds": minutes * _SECONDS_PER_MINUTE, "on_deadline": on_deadline}
        )
        await engine.operations.drain(
            address,
            deadline_seconds=parameters.deadline_seconds,
            on_deadline=OnDeadline(parameters.on_deadline),
        )
        return pages.success(request, f"{address} is being drained", pages.node_link(address))

    return await submit(request, drain, partial(_operation_form, request, engine, address, "drain"))


@router.post("/console/nodes/{address}/undrain")
async def undrain_node(request: Request, engine: EngineDep, address: _AddressPath) -> Response:
    async def undrain(form: Form) -> Response:
        await engine.operations.undrain(address)
        return pages.success(request, f"the drain of {address} is cancelled", pages.node_link(address))

    return await submit(request, undrain, partial(_operation_form, request, engine, address, "undrain"))


@router.post("/console/nodes/{address}/remove")
async def remove_node(request: Request, engine: EngineDep, address: _AddressPath) -> Response:
    async def remove(form: Form) -> Response:
        await engine.operations.remove(address, force=form.get("force") == "yes")
        return pages.success(request, f"{address} is being removed", "/", leave_page=True)

    return await submit(request, remove, partial(_operation_form, request, engine, address, "remove"))


@router.post("/console/nodes/{address}/weight")
async def weigh_node(request: Request, engine: EngineDep, address: _AddressPath) -> Response:
    async def set_weight(form: Form) -> Response:
        change = nodes.UpdateNodeRequest(weight=form.integer("weight", "Weight", 0), labels=None)
        await engine.operations.update(address, weight=change.weight)
        text = f"the weight of {address} is now {change.weight}"
        return pages.success(request, text, pages.node_link(address))

    return await submit(request, set_weight, partial(_operation_form, request, engine, address, "weight"))


def _operation_form(
    request: Request, engine: Engine, address: str, operation: _Operation, form: Form
) -> Response:
    other_nodes = sum(
        planned.eds_health is not None and planned.weight > 0 and planned.node.address != address
        for planned in engine.cluster.plan.nodes.values()
    )
    return pages.form_page(
        request,
        f"_{operation}.html",
        form.status,
        view=engine.cluster.node(address),
        address=address,
        action=pages.node_link(address),
        other_nodes=other_nodes,
        form=form,
    )
