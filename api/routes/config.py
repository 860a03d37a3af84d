"""`/v1/config`: the settings in force."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from api.dependencies import EngineDep
from api.problems import ProblemKind, openapi_responses
from api.schemas import nodes
from controlplane.config.loader import dump_masked

router = APIRouter(tags=["config"])


@router.get("/v1/config", summary="The settings in force, secrets masked", responses=openapi_responses())
async def show_config(engine: EngineDep) -> dict[str, Any]:
    return dump_masked(engine.settings)


@router.post(
    "/v1/config/reload",
    summary="Read the configuration again",
    description="Validated as a whole first; when it cannot be used, the old one stays in force.",
    responses=openapi_responses(
        ProblemKind.BAD_CONFIGURATION, ProblemKind.UNAVAILABLE, ProblemKind.FOREIGN_ORIGIN
    ),
)
async def reload_config(engine: EngineDep) -> nodes.ReloadResultSchema:
    return nodes.to_reload_result_schema(await engine.reload())
