"""Install the console into the app."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response

from api.console import assets, envoys, events, live_updates, login, node_forms, nodes, rollouts
from api.console.console import ConsoleState
from api.console.errors import ConsoleRoute
from api.problems import ProblemError, ProblemKind
from controlplane.engine.engine import Engine

_fallback_router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)


@_fallback_router.get("/console/{rest:path}")
async def not_found(request: Request, rest: str) -> Response:
    """Show an error page for an unknown path of the console."""
    raise ProblemError(ProblemKind.NOT_FOUND, f"{request.url.path} does not exist")


def install(app: FastAPI, engine: Engine) -> None:
    """Add the pages. Call it before adding the REST routes, because `/` must first match the console."""
    app.state.console = ConsoleState(engine)
    for page in (nodes, node_forms, envoys, rollouts, events, login, live_updates, assets):
        app.include_router(page.router)
    app.include_router(_fallback_router)
