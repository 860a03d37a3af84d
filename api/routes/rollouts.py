"""`/v1/rollouts`: rolling operations over nodes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse

from api.dependencies import CallerDep, EngineDep, RequireJsonBody
from api.problems import ProblemKind, openapi_responses
from api.schemas import rollouts as schemas

router = APIRouter(tags=["rollouts"])

_RolloutIdPath = Annotated[schemas.RolloutId, Path(alias="id", description="Its id.")]
_START_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": schemas.PreflightResultSchema,
        "description": "With `dry_run`: what would be done. Nothing is started.",
    },
    201: {"headers": {"Location": {"description": "The rollout's path.", "schema": {"type": "string"}}}},
}
_COMMAND_RESPONSES = openapi_responses(
    ProblemKind.UNKNOWN_ROLLOUT,
    ProblemKind.ROLLOUT_REFUSED,
    ProblemKind.INVALID_REQUEST,
    ProblemKind.UNAVAILABLE,
    ProblemKind.FOREIGN_ORIGIN,
)


@router.get(
    "/v1/rollouts", summary="All rollouts that go on, and the last that ended", responses=openapi_responses()
)
async def list_rollouts(engine: EngineDep) -> schemas.RolloutList:
    return schemas.to_rollout_list(engine.rollouts.all())


@router.get(
    "/v1/rollouts/{id}",
    summary="One rollout",
    responses=openapi_responses(ProblemKind.UNKNOWN_ROLLOUT, ProblemKind.INVALID_REQUEST),
)
async def get_rollout(engine: EngineDep, rollout_id: _RolloutIdPath) -> schemas.RolloutSchema:
    return schemas.to_rollout_schema(engine.rollouts.get(rollout_id))


@router.post(
    "/v1/rollouts",
    summary="Drain nodes in turns, run an action for each, and put it back into service",
    status_code=201,
    dependencies=[RequireJsonBody],
    response_model=schemas.RolloutSchema,
    responses=_START_RESPONSES
    | openapi_responses(
        ProblemKind.ROLLOUT_REFUSED,
        ProblemKind.NEEDS_MODULE,
        ProblemKind.INVALID_REQUEST,
        ProblemKind.UNAVAILABLE,
        ProblemKind.FOREIGN_ORIGIN,
        ProblemKind.TOO_LARGE,
        ProblemKind.UNSUPPORTED_MEDIA_TYPE,
    ),
)
async def start_rollout(
    engine: EngineDep,
    caller: CallerDep,
    body: schemas.StartRolloutRequest,
    request: Request,
    response: Response,
) -> schemas.RolloutSchema | JSONResponse:
    spec = body.to_spec(engine.rollouts.select_nodes(body.nodes))
    if body.dry_run:
        request.state.audit_subject = f"{body.nodes} (dry run)"
        return JSONResponse(
            schemas.to_preflight_schema(await engine.rollouts.check(spec)).model_dump(mode="json")
        )
    started = await engine.rollouts.start(spec, by=caller.name, force=body.force)
    request.state.audit_subject = started.id
    response.headers["Location"] = f"/v1/rollouts/{started.id}"
    return schemas.to_rollout_schema(started)


@router.post(
    "/v1/rollouts/{id}/pause",
    summary="Begin with no further node",
    description="An action that runs goes on to its end.",
    responses=_COMMAND_RESPONSES,
)
async def pause_rollout(
    engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath
) -> schemas.RolloutSchema:
    return schemas.to_rollout_schema(await engine.rollouts.pause(rollout_id, caller.name))


@router.post(
    "/v1/rollouts/{id}/resume",
    summary="Go on after a pause",
    description="A node that failed is taken first. If it is back and right meanwhile, its action is not run"
    " again.",
    responses=_COMMAND_RESPONSES,
)
async def resume_rollout(
    engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath
) -> schemas.RolloutSchema:
    return schemas.to_rollout_schema(await engine.rollouts.resume(rollout_id, caller.name))


@router.post(
    "/v1/rollouts/{id}/abort",
    summary="End it early, and take back the drains that are its own",
    responses=_COMMAND_RESPONSES,
)
async def abort_rollout(
    engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath
) -> schemas.RolloutSchema:
    return schemas.to_rollout_schema(await engine.rollouts.abort(rollout_id, caller.name))
