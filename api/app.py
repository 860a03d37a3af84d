"""The REST API as one ASGI app over a running control plane."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from api import problems
from api.auth import login
from api.auth.access_control import Doorkeeper
from api.auth.audit import Auditor
from api.auth.middleware import Doors, LimitedBodies
from api.auth.openapi_security import describe
from api.console import install as console
from api.routes import config, envoys, events, health, nodes, replicas, rollouts
from api.schemas import nodes as schemas
from controlplane.config.api import Api
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
    for noun in (nodes, rollouts, envoys, replicas, events, config, health, login):
        app.include_router(noun.router)
    problems.install(app)
    app.state.doors = Doorkeeper(engine)
    app.state.auditor = Auditor(engine.note, lambda: app.routes)
    app.add_middleware(LimitedBodies)
    app.add_middleware(Doors, keeper=app.state.doors, auditor=app.state.auditor)
    _declare_models(app)
    return app


def _declare_models(app: FastAPI) -> None:
    """Add the models that routes only refer to: FastAPI collects only those of plain JSON."""
    generate = app.openapi

    made: tuple[Api, dict[str, Any]] | None = None

    def openapi() -> dict[str, Any]:
        nonlocal made
        api: Api = app.state.doors.api
        if made is not None and made[0] is api:
            return made[1]
        document = generate()
        for model in (problems.Problem, schemas.Event):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            parts = schema.pop("$defs", {})
            document["components"]["schemas"] |= {model.__name__: schema, **parts}
        made = api, describe(document, api)
        return made[1]

    app.openapi = openapi  # type: ignore[method-assign]
