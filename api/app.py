"""The REST API as one ASGI app over a running control plane."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems, schemas
from api.routes import config, envoys, events, health, nodes
from controlplane.engine import Engine

# Bytes; 64 labels whose 512 characters each are written as escapes of 12 bytes are a bit less.
_LARGEST_BODY = 524_288
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


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
    for noun in (nodes, envoys, events, config, health):
        app.include_router(noun.router)
    problems.install(app)
    app.add_middleware(_LimitedBodies)
    app.add_middleware(_ForeignPagesMayOnlyRead)
    _declare_models(app)
    return app


class _ForeignPagesMayOnlyRead:
    """No web page but our own may change anything through the browser of somebody who can reach us.

    Browsers name the page's origin in every request that is not a plain read; other clients name none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _SAFE_METHODS:
            request = Request(scope)
            origin = request.headers.get("origin")
            if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
                detail = f"pages of {origin} may only read; open the control plane's own page"
                refusal = problems.answer(request, problems.Kind.FOREIGN_ORIGIN, detail)
                return await refusal(scope, receive, send)
        return await self._app(scope, receive, send)


class _LimitedBodies:
    """Request bodies are read whole, up to a limit, before anything else looks at them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > _LARGEST_BODY:
            return await _too_large(request)(scope, receive, send)
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None  # the client is gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > _LARGEST_BODY:
                return await _too_large(request)(scope, receive, send)
        whole = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def replay() -> Message:
            return next(whole, None) or await receive()

        return await self._app(scope, replay, send)


def _too_large(request: Request) -> Response:
    detail = f"the request body is larger than {_LARGEST_BODY} bytes"
    return problems.answer(request, problems.Kind.TOO_LARGE, detail)


def _declare_models(app: FastAPI) -> None:
    """Add the models that routes only refer to: FastAPI collects only those of plain JSON."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        for model in (problems.Problem, schemas.Event):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            parts = schema.pop("$defs", {})
            document["components"]["schemas"] |= {model.__name__: schema, **parts}
        return document

    app.openapi = openapi  # type: ignore[method-assign]
