"""`/v1/envoys`: list, change and forget the Envoys of the fleet; `/v1/replicas`: the control planes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from api.dependencies import EngineDep, RequireJsonBody
from api.problems import BODY_PROBLEMS, WRITE_PROBLEMS, ProblemKind, openapi_responses
from api.schemas.envoys import ChangeEnvoyRequest, EnvoyDetails, EnvoyList, ForgottenEnvoy, ReplicaList

router = APIRouter()

_EnvoyPath = Annotated[str, Path(description="Id of the Envoy.", min_length=1)]


@router.get("/v1/envoys", tags=["envoys"], summary="List all Envoys", responses=openapi_responses())
async def list_envoys(engine: EngineDep) -> EnvoyList:
    return EnvoyList.model_validate({"envoys": engine.cluster.envoys()})


@router.patch(
    "/v1/envoys/{envoy:path}",
    tags=["envoys"],
    summary="Switch parts of an Envoy's module off or on, set its readiness, or drain it",
    description="For an operator who suspects a part of the module, or wants no new clients at this Envoy. It"
    " takes effect without a restart, and stays until it is changed again.",
    dependencies=[RequireJsonBody],
    responses=openapi_responses(ProblemKind.UNKNOWN_ENVOY, *BODY_PROBLEMS),
)
async def change_envoy(engine: EngineDep, envoy: _EnvoyPath, body: ChangeEnvoyRequest) -> EnvoyDetails:
    view = await engine.operations.set_envoy_switches(envoy, body.switches)
    return EnvoyDetails.model_validate(view)


@router.delete(
    "/v1/envoys/{envoy:path}",
    tags=["envoys"],
    summary="Forget an Envoy that has stopped permanently",
    description="Otherwise, drains wait ten minutes for sessions that this Envoy may still have.",
    responses=openapi_responses(ProblemKind.UNKNOWN_ENVOY, ProblemKind.ENVOY_CONNECTED, *WRITE_PROBLEMS),
)
async def forget_envoy(engine: EngineDep, envoy: _EnvoyPath) -> ForgottenEnvoy:
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
