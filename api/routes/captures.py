"""`/v1/traffic/capture`: captures of the traffic of clients."""

from __future__ import annotations

from fastapi import APIRouter, Request

from api.dependencies import EngineDep, RequireJsonBody
from api.problems import BODY_PROBLEMS, WRITE_PROBLEMS, ProblemKind, openapi_responses
from api.schemas.captures import CaptureStatus, StartCaptureRequest
from controlplane.engine.engine import Engine

router = APIRouter(tags=["traffic"])


def _status(engine: Engine) -> CaptureStatus:
    return CaptureStatus.model_validate(engine.cluster.capture())


def _audited_status(engine: Engine, request: Request) -> CaptureStatus:
    """Return the status of the capture that the request has changed, which the audit log names."""
    status = _status(engine)
    request.state.audit_subject = status.capture and status.capture.name
    return status


@router.get(
    "/v1/traffic/capture",
    summary="Show the running or last capture of the traffic of clients",
    description="Counts are those of the Envoys' last reports.",
    responses=openapi_responses(),
)
async def get_capture(engine: EngineDep) -> CaptureStatus:
    return _status(engine)


@router.post(
    "/v1/traffic/capture",
    summary="Start a capture of the traffic of clients",
    description="The Envoys write the statements of clients, with their values, to files on their machines.",
    status_code=201,
    dependencies=[RequireJsonBody],
    responses=openapi_responses(
        ProblemKind.CAPTURE_RUNNING,
        ProblemKind.CAPTURES_OFF,
        ProblemKind.UNKNOWN_ENVOY,
        ProblemKind.UNKNOWN_GROUP,
        ProblemKind.NEEDS_MODULE,
        *BODY_PROBLEMS,
    ),
)
async def start_capture(engine: EngineDep, body: StartCaptureRequest, request: Request) -> CaptureStatus:
    await engine.captures.start(
        body.name,
        duration=body.duration_seconds,
        envoys=body.envoys,
        users=body.users,
        groups=body.groups,
    )
    return _audited_status(engine, request)


@router.delete(
    "/v1/traffic/capture",
    summary="Stop the running capture of the traffic of clients",
    description="Envoys write what they have captured so far. If no capture is running, nothing changes.",
    status_code=202,
    responses=openapi_responses(*WRITE_PROBLEMS),
)
async def stop_capture(engine: EngineDep, request: Request) -> CaptureStatus:
    await engine.captures.stop()
    return _audited_status(engine, request)
