"""`/v1/envoys`: the fleet."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from api.dependencies import TheEngine
from api.problems import Kind, declared
from api.schemas import nodes

router = APIRouter(tags=["envoys"])


@router.get("/v1/envoys", summary="The fleet", responses=declared())
async def list_envoys(engine: TheEngine) -> nodes.EnvoyList:
    return nodes.EnvoyList(envoys=[nodes.envoy(view) for view in engine.envoys()])


@router.delete(
    "/v1/envoys/{envoy:path}",
    summary="Forget an Envoy that has ended for good",
    description="Drains wait no longer for sessions that it may have, which they else do for ten minutes.",
    responses=declared(
        Kind.UNKNOWN_ENVOY,
        Kind.ENVOY_CONNECTED,
        Kind.INVALID_REQUEST,
        Kind.UNAVAILABLE,
        Kind.FOREIGN_ORIGIN,
    ),
)
async def forget_envoy(
    engine: TheEngine, envoy: Annotated[str, Path(description="Its id.", min_length=1)]
) -> nodes.ForgottenEnvoy:
    await engine.forget_envoy(envoy)
    return nodes.ForgottenEnvoy(id=envoy)
