"""Puts the console into the app."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response

from api.console import assets, envoys, events, live_updates, login, node_forms, nodes, rollouts
from api.console.console import Console
from api.console.errors import ConsoleRoute
from api.problems import Kind, ProblemError
from controlplane.engine.engine import Engine

_elsewhere = APIRouter(include_in_schema=False, route_class=ConsoleRoute)


@_elsewhere.get("/console/{rest:path}")
async def not_found(request: Request, rest: str) -> Response:
    """Whoever follows an old link reads a page, too."""
    raise ProblemError(Kind.NOT_FOUND, f"there is no page at {request.url.path}")


def install(app: FastAPI, engine: Engine) -> None:
    """Add the pages; before the routes of the REST API, which has the path `/` too."""
    app.state.console = Console(engine)
    for noun in (nodes, node_forms, envoys, rollouts, events, login, live_updates, assets):
        app.include_router(noun.router)
    app.include_router(_elsewhere)
