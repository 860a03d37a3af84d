"""`/v1/rollouts`: start and control rolling operations over nodes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from api.dependencies import CallerDep, EngineDep, RequireJsonBody
from api.problems import BODY_PROBLEMS, WRITE_PROBLEMS, ProblemKind, openapi_responses
from api.schemas import rollouts as schemas
from api.schemas.common import Address
from api.schemas.rollouts import RolloutDetails
from api.schemas.verifications import VerificationDetails

router = APIRouter(tags=["rollouts"])

_RolloutIdPath = Annotated[schemas.RolloutId, Path(alias="id", description="Id of the rollout.")]
_AddressPath = Annotated[Address, Path(description="`host:port`, percent-encoded where needed.")]
_START_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": schemas.PreflightDetails,
        "description": "With `dry_run`: the nodes and the preflight checks. No rollout is started.",
    },
    201: {"headers": {"Location": {"description": "The rollout's path.", "schema": {"type": "string"}}}},
}
_COMMAND_RESPONSES = openapi_responses(
    ProblemKind.UNKNOWN_ROLLOUT, ProblemKind.ROLLOUT_PRECONDITION_FAILED, *WRITE_PROBLEMS
)


@router.get(
    "/v1/rollouts",
    summary="List active and recently finished rollouts",
    responses=openapi_responses(),
)
async def list_rollouts(engine: EngineDep) -> schemas.RolloutList:
    return schemas.RolloutList.model_validate({"rollouts": schemas.newest_first(engine.rollouts.all())})


@router.get(
    "/v1/rollouts/{id}",
    summary="Show one rollout",
    responses=openapi_responses(ProblemKind.UNKNOWN_ROLLOUT, ProblemKind.INVALID_REQUEST),
)
async def get_rollout(engine: EngineDep, rollout_id: _RolloutIdPath) -> RolloutDetails:
    return RolloutDetails.model_validate(engine.rollouts.get(rollout_id))


@router.get(
    "/v1/rollouts/{id}/verifications/{address}",
    summary="Show the latest comparison of a node with an old one",
    responses=openapi_responses(
        ProblemKind.UNKNOWN_ROLLOUT, ProblemKind.UNKNOWN_VERIFICATION, ProblemKind.INVALID_REQUEST
    ),
)
async def get_verification(
    engine: EngineDep, rollout_id: _RolloutIdPath, address: _AddressPath
) -> VerificationDetails:
    return VerificationDetails.model_validate(engine.rollouts.verification(rollout_id, address))


@router.post(
    "/v1/rollouts",
    summary="Start a rollout: for each node, drain it, run an action, and return it to service",
    status_code=201,
    dependencies=[RequireJsonBody],
    response_model=RolloutDetails,
    responses=_START_RESPONSES
    | openapi_responses(ProblemKind.ROLLOUT_PRECONDITION_FAILED, ProblemKind.NEEDS_MODULE, *BODY_PROBLEMS),
)
async def start_rollout(
    engine: EngineDep,
    caller: CallerDep,
    body: schemas.StartRolloutRequest,
    request: Request,
    response: Response,
) -> RolloutDetails | JSONResponse:
    spec = body.to_spec(engine.rollouts.select_nodes(body.nodes))
    if body.dry_run:
        request.state.audit_subject = f"{body.nodes} (dry run)"
        return JSONResponse(
            schemas.PreflightDetails.model_validate(engine.rollouts.check(spec)).model_dump(mode="json")
        )
    rollout = await engine.rollouts.start(spec, by=caller.name, force=body.force)
    request.state.audit_subject = rollout.id
    response.headers["Location"] = f"/v1/rollouts/{rollout.id}"
    return RolloutDetails.model_validate(rollout)


@router.post(
    "/v1/rollouts/{id}/pause",
    summary="Pause a rollout: start no further node",
    description="A running action continues to its end.",
    responses=_COMMAND_RESPONSES,
)
async def pause_rollout(engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath) -> RolloutDetails:
    return RolloutDetails.model_validate(await engine.rollouts.pause(rollout_id, caller.name))


@router.post(
    "/v1/rollouts/{id}/resume",
    summary="Resume a paused rollout",
    description="Failed nodes are retried first. If such a node has recovered, its action is not run again;"
    " if its verification failed, it is verified again.",
    responses=_COMMAND_RESPONSES,
)
async def resume_rollout(
    engine: EngineDep,
    caller: CallerDep,
    rollout_id: _RolloutIdPath,
    query: Annotated[schemas.ResumeQuery, Query()],
) -> RolloutDetails:
    rollout = await engine.rollouts.resume(rollout_id, caller.name, skip_verification=query.skip_verification)
    return RolloutDetails.model_validate(rollout)


@router.post(
    "/v1/rollouts/{id}/abort",
    summary="Abort a rollout, and cancel the drains that it requested",
    responses=_COMMAND_RESPONSES,
)
async def abort_rollout(engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath) -> RolloutDetails:
    return RolloutDetails.model_validate(await engine.rollouts.abort(rollout_id, caller.name))
