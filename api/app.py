"""The ASGI app of the REST API and web console over a running control plane."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from api import problems
from api.auth import login
from api.auth.access_control import AccessController
from api.auth.audit import Auditor
from api.auth.middleware import AuthMiddleware, BodyLimitMiddleware
from api.auth.openapi_security import add_security
from api.console import install as console
from api.routes import (
    captures,
    config,
    envoys,
    events,
    health,
    limits,
    nodes,
    rollouts,
    rules,
    sessions,
    statements,
)
from api.schemas.events import EventDetails
from controlplane.config.api import ApiSettings
from controlplane.engine.engine import Engine


def create_app(engine: Engine) -> FastAPI:
    """Create the app. Set the event `app.state.stopping` to end the event streams before a shutdown."""
    app = FastAPI(
        title="Tidevoy",
        version=version("tidevoy"),
        description="Operate the TiDB servers behind Tidevoy. Errors are `application/problem+json`.",
        docs_url=None,  # FastAPI's documentation page loads scripts from third-party servers
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.engine = engine
    app.state.stopping = asyncio.Event()
    console.install(app, engine)
    for routes in (
        *(nodes, rollouts, envoys, limits, statements, rules, sessions, captures),
        *(events, config, health, login),
    ):
        app.include_router(routes.router)
    problems.install(app)
    app.state.access = AccessController(engine)
    app.state.auditor = Auditor(engine.events.emit, lambda: app.routes)
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(AuthMiddleware, access=app.state.access, auditor=app.state.auditor)
    _extend_openapi(app)
    return app


def _extend_openapi(app: FastAPI) -> None:
    """Add security to the OpenAPI document, and schemas to which only hand-written responses refer."""
    generate = app.openapi

    cached: tuple[ApiSettings, dict[str, Any]] | None = None

    def openapi() -> dict[str, Any]:
        nonlocal cached
        api: ApiSettings = app.state.access.api
        if cached is not None and cached[0] is api:
            return cached[1]
        document = generate()
        for model in (problems.ProblemDetails, EventDetails):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            definitions = schema.pop("$defs", {})
            document["components"]["schemas"] |= {model.__name__: schema, **definitions}
        cached = api, add_security(document, api)
        return cached[1]

    app.openapi = openapi  # type: ignore[method-assign]
