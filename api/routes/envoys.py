"""`/v1/envoys`: the fleet."""

from __future__ import annotations

from fastapi import APIRouter

from api import schemas
from api.context import TheEngine
from api.problems import declared

router = APIRouter(tags=["envoys"])


@router.get("/v1/envoys", summary="The fleet", responses=declared())
async def list_envoys(engine: TheEngine) -> schemas.EnvoyList:
    return schemas.EnvoyList(envoys=[schemas.envoy(view) for view in engine.envoys()])
