"""Liveness, readiness, and Prometheus metrics, and the overview at `/`."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from api.dependencies import EngineDep
from api.problems import ProblemError, ProblemKind, openapi_responses
from api.schemas.common import ResponseModel


class About(ResponseModel):
    """The version and the main paths of this server."""

    name: Literal["tidevoy"] = "tidevoy"
    version: str
    openapi: str = "/openapi.json"
    nodes: str = "/v1/nodes"
    envoys: str = "/v1/envoys"


class Alive(ResponseModel):
    """The process responds."""

    status: Literal["ok"] = "ok"


class Ready(ResponseModel):
    """The control plane is ready."""

    ready: Literal[True] = True


router = APIRouter(tags=["health"])

_METRICS_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/", summary="Show the version and the main paths", responses=openapi_responses())
async def about() -> About:
    return About(version=version("tidevoy"))


@router.get("/healthz", summary="Check that the process responds", responses=openapi_responses())
async def healthz() -> Alive:
    return Alive()


@router.get(
    "/readyz",
    summary="Check that the control plane is ready; lists the reasons if it is not",
    responses=openapi_responses(ProblemKind.NOT_READY),
)
async def readyz(engine: EngineDep) -> Ready:
    if reasons := engine.readiness_problems():
        raise ProblemError(ProblemKind.NOT_READY, "; ".join(reasons), reasons=reasons)
    return Ready()


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses=_METRICS_RESPONSE | openapi_responses(),
)
async def metrics(engine: EngineDep) -> Response:
    # Collecting runs in the event loop, because facts must not change meanwhile. Formatting takes most of the
    # time and runs in a thread, because with many nodes and Envoys it would block the loop.
    text = await asyncio.to_thread(generate_latest, _CollectedMetrics(list(engine.registry.collect())))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


class _CollectedMetrics(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
