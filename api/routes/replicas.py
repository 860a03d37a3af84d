"""`/v1/replicas`: the control planes that share one state."""

from __future__ import annotations

from fastapi import APIRouter

from api.dependencies import TheEngine
from api.problems import declared
from api.schemas import replicas as schemas

router = APIRouter(tags=["replicas"])


@router.get("/v1/replicas", summary="The control planes, and which of them leads", responses=declared())
async def list_replicas(engine: TheEngine) -> schemas.ReplicaList:
    return schemas.ReplicaList(replicas=[schemas.replica(view) for view in engine.replicas()])
