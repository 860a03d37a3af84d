"""`/v1/config`: the settings in force."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from api.dependencies import TheEngine
from api.problems import Kind, declared
from api.schemas import nodes
from controlplane.config.loader import masked

router = APIRouter(tags=["config"])


@router.get("/v1/config", summary="The settings in force, secrets masked", responses=declared())
async def show_config(engine: TheEngine) -> dict[str, Any]:
    return masked(engine.settings)


@router.post(
    "/v1/config/reload",
    summary="Read the configuration again",
    description="Validated as a whole first; when it cannot be used, the old one stays in force.",
    responses=declared(Kind.BAD_CONFIGURATION, Kind.UNAVAILABLE, Kind.FOREIGN_ORIGIN),
)
async def reload_config(engine: TheEngine) -> nodes.Reloaded:
    return nodes.reloaded(await engine.reload())
