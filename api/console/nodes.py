"""The pages of nodes: the table of all nodes at `/`, and one page per node with its charts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Match
from starlette.types import Scope

from api.console import history, links, pages, table
from api.console.context import ConsoleDep, NodeAddressPath
from api.console.errors import ConsoleRoute
from api.console.sampler import FLEET_KEY
from api.dependencies import EngineDep
from controlplane.engine.engine import Engine
from controlplane.model.nodes import State

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_DRAINING_STATES = (State.DRAINING, State.DRAINED)


class _BrowserOnlyRoute(ConsoleRoute):
    """A route that only matches browsers: at the same path, programs get JSON."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        headers = dict(scope.get("headers", ()))
        is_browser = b"text/html" in headers.get(b"accept", b"") or b"hx-request" in headers
        return super().matches(scope) if is_browser else (Match.NONE, {})


async def show_nodes(request: Request, engine: EngineDep, console: ConsoleDep) -> Response:
    """Show the table of all nodes."""
    query = table.TableQuery.from_params(request.query_params)
    plan, facts = engine.plan_and_facts()
    all_rows = table.build_rows(plan, facts, console.history, engine.now())
    page = table.paginate(all_rows, query)
    fleet = console.history.points(FLEET_KEY)
    values: dict[str, Any] = {
        "page": page,
        "query": page.query,
        "states": {state: sum(row.state is state for row in all_rows) for state in State},
        "total": len(all_rows),
        "sessions": _sum_known(row.sessions for row in all_rows),
        "fleet": fleet[-1] if fleet else None,
        "trends": history.to_columns(fleet),
        "slots": history.MAX_POINTS,
        "notices": _notices(engine),
        "draining": {
            row.address: engine.node(row.address) for row in page.rows if row.state in _DRAINING_STATES
        },
    }
    return pages.live_page(request, "nodes.html", "nodes", page.query.link, values, query=page.query)


router.routes.append(_BrowserOnlyRoute("/", show_nodes, methods=["GET"], include_in_schema=False))


@router.get("/console/nodes/{address}")
async def show_node(
    request: Request, engine: EngineDep, console: ConsoleDep, address: NodeAddressPath
) -> Response:
    """Show one node."""
    view = engine.node(address)
    values = {
        "view": view,
        "node": view.plan.node,
        "explanation": engine.explain([address]).get(address),
        "latest": console.history.latest(address),
        "progress": view.drain_progress,
    }
    return pages.live_page(request, "node.html", "nodes", links.node(address), values, address=address)


@router.get("/console/history")
async def show_history(
    console: ConsoleDep, node: Annotated[str, Query(max_length=255)] = FLEET_KEY
) -> JSONResponse:
    """Return the traffic history of a node, by default of all nodes together, as columns for charts."""
    return JSONResponse(dict(history.to_columns(console.history.points(node))))


def _sum_known(counts: Any) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _notices(engine: Engine) -> list[str]:
    """Return the problems of the control plane and its sources, a sentence each."""
    plan, facts = engine.plan_and_facts()
    notices = [*engine.readiness_problems(), plan.panic_threshold_reason, facts.node_metrics_outage]
    notices += [topology.outage for topology in facts.topologies.values()]
    notices += [f"{problem.subject}: {problem.reason}" for problem in engine.topology_problems()]
    return list(dict.fromkeys(filter(None, notices)))
