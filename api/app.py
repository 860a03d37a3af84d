"""The REST API as one ASGI app over a running control plane."""

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
from api.routes import config, envoys, events, health, nodes, replicas, rollouts
from api.schemas import nodes as schemas
from controlplane.config.api import ApiSettings
from controlplane.engine.engine import Engine


def create_app(engine: Engine) -> FastAPI:
    """The app. Set `app.state.stopping` (an asyncio.Event) to end the event streams before a shutdown."""
    app = FastAPI(
        title="Tidevoy",
        version=version("tidevoy"),
        description="Operate the TiDB servers behind Tidevoy. Failures are `application/problem+json`.",
        docs_url=None,  # that page loads its scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.engine = engine
    app.state.stopping = asyncio.Event()
    console.install(app, engine)
    for routes in (nodes, rollouts, envoys, replicas, events, config, health, login):
        app.include_router(routes.router)
    problems.install(app)
    app.state.access = AccessController(engine)
    app.state.auditor = Auditor(engine.record_event, lambda: app.routes)
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(AuthMiddleware, access=app.state.access, auditor=app.state.auditor)
    _declare_models(app)
    return app


def _declare_models(app: FastAPI) -> None:
    """Add the models that routes only refer to: FastAPI collects only those of plain JSON."""
    generate = app.openapi

    made: tuple[ApiSettings, dict[str, Any]] | None = None

    def openapi() -> dict[str, Any]:
        nonlocal made
        api: ApiSettings = app.state.access.api
        if made is not None and made[0] is api:
            return made[1]
        document = generate()
        for model in (problems.ProblemDetails, schemas.EventSchema):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            parts = schema.pop("$defs", {})
            document["components"]["schemas"] |= {model.__name__: schema, **parts}
        made = api, add_security(document, api)
        return made[1]

    app.openapi = openapi  # type: ignore[method-assign]
