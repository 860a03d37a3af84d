"""Install the console into the app, with its login page and its page for unknown paths."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response

from api.console import captures, envoys, events, live_updates, nodes, pages, rollouts, rules, statements
from api.console.charts import TrafficSampler
from api.console.errors import ConsoleRoute
from api.problems import ProblemError, ProblemKind
from controlplane.engine.engine import Engine

_login_router = APIRouter(include_in_schema=False)
_fallback_router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)


@_login_router.get("/login")
async def show_login(request: Request) -> Response:
    """Show the form for a token, which api/auth/login.py handles.

    `next` is the path to return to. `denied` marks a failed login, `signed_out` a logout.
    """
    params = request.query_params
    return pages.page(
        request,
        "login.html",
        next_path=params.get("next", "/"),
        login_failed=params.get("denied") == "1",
        signed_out=params.get("signed_out") == "1",
    )


@_fallback_router.get("/console/{rest:path}")
async def not_found(request: Request, rest: str) -> Response:
    """Show an error page for an unknown path of the console."""
    raise ProblemError(ProblemKind.NOT_FOUND, f"{request.url.path} does not exist")


def install(app: FastAPI, engine: Engine) -> None:
    """Add the pages. Call it before adding the REST routes, because `/` must match the console first."""
    app.state.traffic_sampler = TrafficSampler(engine)
    for module in (nodes, envoys, statements, rollouts, rules, captures, events, live_updates, pages):
        app.include_router(module.router)
    app.include_router(_login_router)
    app.include_router(_fallback_router)
