"""FastAPI dependencies of the routes: the engine, the caller, and the event that ends streams."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, Request

from api.auth.caller import Caller
from api.problems import ProblemError, ProblemKind
from controlplane.engine.engine import Engine


async def _get_engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


async def _get_stopping(request: Request) -> asyncio.Event:
    stopping: asyncio.Event = request.app.state.stopping
    return stopping


async def _get_caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


async def _require_json_body(request: Request) -> None:
    """Reject a body whose content type is not JSON.

    This also blocks cross-origin web pages: browsers send JSON from them only after a CORS preflight request.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and await request.body():
        raise ProblemError(
            ProblemKind.UNSUPPORTED_MEDIA_TYPE,
            f"the body has {f'the type {media_type}' if media_type else 'no content type'};"
            " send it with `Content-Type: application/json`",
        )


EngineDep = Annotated[Engine, Depends(_get_engine)]
CallerDep = Annotated[Caller, Depends(_get_caller)]
StoppingDep = Annotated[asyncio.Event, Depends(_get_stopping)]
RequireJsonBody = Depends(_require_json_body)
