"""`/v1/limits`: the limits of client connections, and what is used of them."""

from __future__ import annotations

from fastapi import APIRouter

from api.dependencies import EngineDep
from api.problems import openapi_responses
from api.schemas.limits import LimitList

router = APIRouter(tags=["limits"])


@router.get(
    "/v1/limits",
    summary="List the limits of client connections",
    description="Counts and quotas are those of the Envoys' last reports.",
    responses=openapi_responses(),
)
async def list_limits(engine: EngineDep) -> LimitList:
    return LimitList.model_validate({"limits": engine.cluster.limits()})
