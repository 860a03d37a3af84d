"""`/v1/rollouts`: rolling operations over nodes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import JSONResponse

from api.dependencies import JsonBody, TheCaller, TheEngine
from api.problems import Kind, declared
from api.schemas import rollouts as schemas

router = APIRouter(tags=["rollouts"])

_Id = Annotated[schemas.RolloutId, Path(alias="id", description="Its id.")]
_STARTED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": schemas.RolloutPlan,
        "description": "With `dry_run`: what would be done. Nothing is started.",
    },
    201: {"headers": {"Location": {"description": "The rollout's path.", "schema": {"type": "string"}}}},
}
_MOVED_ON = declared(
    Kind.UNKNOWN_ROLLOUT,
    Kind.ROLLOUT_REFUSED,
    Kind.INVALID_REQUEST,
    Kind.UNAVAILABLE,
    Kind.FOREIGN_ORIGIN,
)


@router.get("/v1/rollouts", summary="All rollouts that go on, and the last that ended", responses=declared())
async def list_rollouts(engine: TheEngine) -> schemas.RolloutList:
    return schemas.rollouts(engine.rollouts.all())


@router.get(
    "/v1/rollouts/{id}",
    summary="One rollout",
    responses=declared(Kind.UNKNOWN_ROLLOUT, Kind.INVALID_REQUEST),
)
async def get_rollout(engine: TheEngine, name: _Id) -> schemas.Rollout:
    return schemas.rollout(engine.rollouts.get(name))


@router.post(
    "/v1/rollouts",
    summary="Drain nodes in turns, run an action for each, and put it back into service",
    status_code=201,
    dependencies=[JsonBody],
    response_model=schemas.Rollout,
    responses=_STARTED
    | declared(
        Kind.ROLLOUT_REFUSED,
        Kind.NEEDS_MODULE,
        Kind.INVALID_REQUEST,
        Kind.UNAVAILABLE,
        Kind.FOREIGN_ORIGIN,
        Kind.TOO_LARGE,
        Kind.UNSUPPORTED_MEDIA_TYPE,
    ),
)
async def start_rollout(
    engine: TheEngine, caller: TheCaller, wanted: schemas.RolloutOrder, request: Request, response: Response
) -> schemas.Rollout | JSONResponse:
    order = wanted.order(engine.rollouts.select(wanted.nodes))
    if wanted.dry_run:
        request.state.audit_subject = f"{wanted.nodes} (dry run)"
        return JSONResponse(schemas.plan(await engine.rollouts.check(order)).model_dump(mode="json"))
    started = await engine.rollouts.start(order, by=caller.name, force=wanted.force)
    request.state.audit_subject = started.id
    response.headers["Location"] = f"/v1/rollouts/{started.id}"
    return schemas.rollout(started)


@router.post(
    "/v1/rollouts/{id}/pause",
    summary="Begin with no further node",
    description="An action that runs goes on to its end.",
    responses=_MOVED_ON,
)
async def pause_rollout(engine: TheEngine, caller: TheCaller, name: _Id) -> schemas.Rollout:
    return schemas.rollout(await engine.rollouts.pause(name, caller.name))


@router.post(
    "/v1/rollouts/{id}/resume",
    summary="Go on after a pause",
    description="A node that failed is taken first. If it is back and right meanwhile, its action is not run"
    " again.",
    responses=_MOVED_ON,
)
async def resume_rollout(engine: TheEngine, caller: TheCaller, name: _Id) -> schemas.Rollout:
    return schemas.rollout(await engine.rollouts.resume(name, caller.name))


@router.post(
    "/v1/rollouts/{id}/abort",
    summary="End it early, and take back the drains that are its own",
    responses=_MOVED_ON,
)
async def abort_rollout(engine: TheEngine, caller: TheCaller, name: _Id) -> schemas.Rollout:
    return schemas.rollout(await engine.rollouts.abort(name, caller.name))
