"""`/v1/envoys`: list the Envoys of the fleet, and forget stopped ones."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from api.dependencies import EngineDep
from api.problems import ProblemKind, openapi_responses
from api.schemas import nodes

router = APIRouter(tags=["envoys"])


@router.get("/v1/envoys", summary="List all Envoys", responses=openapi_responses())
async def list_envoys(engine: EngineDep) -> nodes.EnvoyList:
    return nodes.EnvoyList(envoys=[nodes.to_envoy_schema(view) for view in engine.envoys()])


@router.delete(
    "/v1/envoys/{envoy:path}",
    summary="Forget an Envoy that has stopped for good",
    description="Drains no longer wait for its possible sessions, which they otherwise do for ten minutes.",
    responses=openapi_responses(
        ProblemKind.UNKNOWN_ENVOY,
        ProblemKind.ENVOY_CONNECTED,
        ProblemKind.INVALID_REQUEST,
        ProblemKind.UNAVAILABLE,
        ProblemKind.FOREIGN_ORIGIN,
    ),
)
async def forget_envoy(
    engine: EngineDep, envoy: Annotated[str, Path(description="Its id.", min_length=1)]
) -> nodes.ForgottenEnvoy:
    await engine.forget_envoy(envoy)
    return nodes.ForgottenEnvoy(id=envoy)
