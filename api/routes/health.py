"""Liveness, readiness, and Prometheus metrics, and the overview at `/`."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from api.dependencies import EngineDep
from api.problems import ProblemError, ProblemKind, openapi_responses
from api.schemas import nodes

router = APIRouter(tags=["health"])

_METRICS_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/", summary="Show the version and the main paths", responses=openapi_responses())
async def about() -> nodes.About:
    return nodes.About(
        version=version("tidevoy"), openapi="/openapi.json", nodes="/v1/nodes", envoys="/v1/envoys"
    )


@router.get("/healthz", summary="Check that the process responds", responses=openapi_responses())
async def healthz() -> nodes.Alive:
    return nodes.Alive()


@router.get(
    "/readyz",
    summary="Check that the control plane is ready; lists the reasons if it is not",
    responses=openapi_responses(ProblemKind.NOT_READY),
)
async def readyz(engine: EngineDep) -> nodes.Ready:
    if reasons := engine.readiness_problems():
        raise ProblemError(ProblemKind.NOT_READY, "; ".join(reasons), reasons=reasons)
    return nodes.Ready()


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses=_METRICS_RESPONSE | openapi_responses(),
)
async def metrics(engine: EngineDep) -> Response:
    # Collecting runs in the event loop, because facts must not change meanwhile. Formatting takes most of the
    # time and, with many nodes and Envoys, would block the loop.
    text = await asyncio.to_thread(generate_latest, _CollectedMetrics(list(engine.registry.collect())))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


class _CollectedMetrics(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
