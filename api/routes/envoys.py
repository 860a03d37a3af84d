"""`/v1/envoys`: list the Envoys of the fleet, and forget stopped ones; `/v1/replicas`: the control planes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from api.dependencies import EngineDep
from api.problems import WRITE_PROBLEMS, ProblemKind, openapi_responses
from api.schemas.envoys import EnvoyList, ForgottenEnvoy, ReplicaList

router = APIRouter()


@router.get("/v1/envoys", tags=["envoys"], summary="List all Envoys", responses=openapi_responses())
async def list_envoys(engine: EngineDep) -> EnvoyList:
    return EnvoyList.model_validate({"envoys": engine.cluster.envoys()})


@router.delete(
    "/v1/envoys/{envoy:path}",
    tags=["envoys"],
    summary="Forget an Envoy that has stopped permanently",
    description="Otherwise, drains wait ten minutes for sessions that this Envoy may still have.",
    responses=openapi_responses(ProblemKind.UNKNOWN_ENVOY, ProblemKind.ENVOY_CONNECTED, *WRITE_PROBLEMS),
)
async def forget_envoy(
    engine: EngineDep, envoy: Annotated[str, Path(description="Id of the Envoy.", min_length=1)]
) -> ForgottenEnvoy:
    await engine.operations.forget_envoy(envoy)
    return ForgottenEnvoy(id=envoy)


@router.get(
    "/v1/replicas",
    tags=["replicas"],
    summary="List the control planes and their leader",
    responses=openapi_responses(),
)
async def list_replicas(engine: EngineDep) -> ReplicaList:
    return ReplicaList.model_validate({"replicas": engine.replicas()})
