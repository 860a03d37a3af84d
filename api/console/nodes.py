"""The pages of nodes: all of them at `/`, and one with its charts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Match
from starlette.types import Scope

from api.console import history, links, pages, table
from api.console.context import TheAddress, TheConsole
from api.console.errors import ConsoleRoute
from api.console.sampler import FLEET
from api.dependencies import TheEngine
from controlplane.engine.engine import Engine
from controlplane.model.nodes import State

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_LEAVING = (State.DRAINING, State.DRAINED)


class _ForBrowsers(ConsoleRoute):
    """Is there only for who wants a page: programs get JSON at the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        headers = dict(scope.get("headers", ()))
        is_browser = b"text/html" in headers.get(b"accept", b"") or b"hx-request" in headers
        return super().matches(scope) if is_browser else (Match.NONE, {})


async def show_nodes(request: Request, engine: TheEngine, console: TheConsole) -> Response:
    """All nodes."""
    query = table.Query.read(request.query_params)
    plan, facts = engine.seen()
    every = table.rows(plan, facts, console.history, engine.now())
    page = table.paged(every, query)
    fleet = console.history.of(FLEET)
    values: dict[str, Any] = {
        "page": page,
        "query": page.query,
        "states": {state: sum(row.state is state for row in every) for state in State},
        "total": len(every),
        "sessions": _sum(row.sessions for row in every),
        "fleet": fleet[-1] if fleet else None,
        "trends": history.columns(fleet),
        "slots": history.KEPT,
        "notices": _notices(engine),
        "leaving": {row.address: engine.node(row.address) for row in page.rows if row.state in _LEAVING},
    }
    return pages.live(request, "nodes.html", "nodes", page.query.link, values, query=page.query)


router.routes.append(_ForBrowsers("/", show_nodes, methods=["GET"], include_in_schema=False))


@router.get("/console/nodes/{address}")
async def show_node(
    request: Request, engine: TheEngine, console: TheConsole, address: TheAddress
) -> Response:
    """One node."""
    view = engine.node(address)
    values = {
        "view": view,
        "node": view.plan.node,
        "explanation": engine.explain([address]).get(address),
        "latest": console.history.latest(address),
        "departure": view.departure,
    }
    return pages.live(request, "node.html", "nodes", links.node(address), values, address=address)


@router.get("/console/history")
async def show_history(
    console: TheConsole, node: Annotated[str, Query(max_length=255)] = FLEET
) -> JSONResponse:
    """What a node carried in the last minutes, as columns for charts; of all nodes by default."""
    return JSONResponse(dict(history.columns(console.history.of(node))))


def _sum(counts: Any) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _notices(engine: Engine) -> list[str]:
    """What is wrong with all of it, a sentence each."""
    plan, facts = engine.seen()
    told = [*engine.unready(), plan.floor, facts.vitals_outage]
    told += [topology.outage for topology in facts.topologies.values()]
    told += [f"{problem.subject}: {problem.reason}" for problem in engine.problems()]
    return list(dict.fromkeys(filter(None, told)))
