"""`/v1/replicas`: list the control-plane replicas that share one state."""

from __future__ import annotations

from fastapi import APIRouter

from api.dependencies import EngineDep
from api.problems import openapi_responses
from api.schemas import replicas as schemas

router = APIRouter(tags=["replicas"])


@router.get("/v1/replicas", summary="List the control planes and their leader", responses=openapi_responses())
async def list_replicas(engine: EngineDep) -> schemas.ReplicaList:
    return schemas.ReplicaList(replicas=[schemas.to_replica_schema(view) for view in engine.replicas()])
