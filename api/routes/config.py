"""`/v1/config`: show and reload the settings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from api.dependencies import EngineDep
from api.problems import ProblemKind, openapi_responses
from controlplane.config.loader import dump_masked
from controlplane.model.views import ReloadResult

router = APIRouter(tags=["config"])


@router.get("/v1/config", summary="Show the current settings, secrets masked", responses=openapi_responses())
async def show_config(engine: EngineDep) -> dict[str, Any]:
    return dump_masked(engine.settings)


@router.post(
    "/v1/config/reload",
    summary="Reload the configuration",
    description="The new configuration is validated as a whole; if it is invalid, the old one stays active.",
    responses=openapi_responses(
        ProblemKind.BAD_CONFIGURATION, ProblemKind.UNAVAILABLE, ProblemKind.FOREIGN_ORIGIN
    ),
)
async def reload_config(engine: EngineDep) -> ReloadResult:
    return await engine.reload()
