"""The pages of rollouts: all that are known, one with its nodes, and the forms that start and steer them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request, Response

from api.console import forms, links, pages
from api.console.context import TheConsole
from api.console.errors import TELLABLE, ConsoleRoute, told
from api.dependencies import TheCaller, TheEngine
from api.schemas import rollouts as schemas
from controlplane.engine.engine import Engine
from controlplane.model.nodes import NOTHING
from controlplane.model.rollout import MANUAL, Order, Phase, Rollout, Stage
from controlplane.rollouts.preflight import RolloutChecks

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_MINUTE = 60.0
_Id = Annotated[schemas.RolloutId, Path(alias="id")]
_Turn = Literal["pause", "resume", "abort"]
_ENDED = (Stage.DONE, Stage.FAILED, Stage.SKIPPED)


@router.get("/console/rollouts")
async def show_rollouts(request: Request, engine: TheEngine) -> Response:
    every = sorted(engine.rollouts.all(), key=lambda each: (each.created, each.id), reverse=True)
    values = {"rollouts": [_progress(each) for each in every]}
    return pages.live(request, "rollouts.html", "rollouts", "/console/rollouts", values)


@router.get("/console/rollouts/{id}")
async def show_rollout(request: Request, engine: TheEngine, console: TheConsole, name: _Id) -> Response:
    rollout = engine.rollouts.get(name)
    # Steps that are under way show how long they have been so far, to some seconds only: it is no clock.
    now = console.now() // 5 * 5
    values = {**_progress(rollout), "durations": _durations(rollout, now)}
    return pages.live(request, "rollout.html", "rollouts", links.rollout(name), values)


@router.get("/console/start-rollout")
async def show_starting(request: Request, engine: TheEngine) -> Response:
    """The form; with fields in the query, also what would be done (a dry run)."""
    form = {name: text for name, value in request.query_params.items() if (text := value.strip())}
    if "nodes" not in form:
        return _starting(request, engine, form)
    try:
        checks = await engine.rollouts.check(_order(engine, form))
    except TELLABLE as error:
        status, detail = await told(request, error)
        return _starting(request, engine, form, status, detail)
    return _starting(request, engine, form, checks=checks)


@router.post("/console/rollouts")
async def start_rollout(request: Request, engine: TheEngine, caller: TheCaller) -> Response:
    async def start(form: forms.Form) -> Response:
        order = _order(engine, form)
        rollout = await engine.rollouts.start(order, caller.name, force=form.get("force") == "yes")
        request.state.audit_subject = rollout.id
        return pages.done(request, "the rollout has begun", links.rollout(rollout.id), leave=True)

    return await forms.attempt(request, start, lambda *again: _starting(request, engine, *again))


@router.get("/console/rollouts/{id}/{turn}")
async def show_turning(request: Request, engine: TheEngine, name: _Id, turn: _Turn) -> Response:
    return _turning(request, engine, name, turn)


@router.post("/console/rollouts/{id}/pause")
async def pause_rollout(request: Request, engine: TheEngine, caller: TheCaller, name: _Id) -> Response:
    async def pause(form: forms.Form) -> Response:
        await engine.rollouts.pause(name, caller.name)
        return pages.done(request, "the rollout is paused", links.rollout(name))

    return await forms.attempt(request, pause, lambda _, *why: _turning(request, engine, name, "pause", *why))


@router.post("/console/rollouts/{id}/resume")
async def resume_rollout(request: Request, engine: TheEngine, caller: TheCaller, name: _Id) -> Response:
    async def resume(form: forms.Form) -> Response:
        await engine.rollouts.resume(name, caller.name)
        return pages.done(request, "the rollout goes on", links.rollout(name))

    return await forms.attempt(
        request, resume, lambda _, *why: _turning(request, engine, name, "resume", *why)
    )


@router.post("/console/rollouts/{id}/abort")
async def abort_rollout(request: Request, engine: TheEngine, caller: TheCaller, name: _Id) -> Response:
    async def abort(form: forms.Form) -> Response:
        await engine.rollouts.abort(name, caller.name)
        return pages.done(request, "the rollout is being aborted", links.rollout(name))

    return await forms.attempt(request, abort, lambda _, *why: _turning(request, engine, name, "abort", *why))


def _turning(
    request: Request, engine: Engine, name: str, turn: str, status: int = 200, refused: str = ""
) -> Response:
    rollout = engine.rollouts.get(name)
    ours = [step.address for step in rollout.steps.values() if step.drained_by_us]
    return pages.form(request, "_turn.html", status, rollout=rollout, turn=turn, ours=ours, refused=refused)


def _starting(
    request: Request,
    engine: Engine,
    form: forms.Form = NOTHING,
    status: int = 200,
    refused: str = "",
    checks: RolloutChecks | None = None,
) -> Response:
    return pages.form(
        request,
        "_start.html",
        status,
        form=form,
        actions=engine.rollouts.actions(),
        usual=Order(()),
        checks=checks,
        refused=refused,
    )


def _order(engine: Engine, form: forms.Form) -> Order:
    """What was filled in. ProblemError, ValidationError."""
    usual = Order(())
    wanted = schemas.RolloutOrder.model_validate(
        {
            "nodes": form.get("nodes", "all"),
            "action": form.get("action", MANUAL),
            "max_unavailable": forms.whole(form, "max_unavailable", "Nodes at a time", usual.max_unavailable),
            "drain_deadline_seconds": _minutes(form, "drain_minutes", usual.drain_deadline),
            "on_deadline": form.get("on_deadline", usual.on_deadline.value),
            "return_deadline_seconds": _minutes(form, "return_minutes", usual.return_deadline),
            "healthy_for_seconds": forms.number(form, "healthy_for", "Healthy for", usual.healthy_for),
            "version": form.get("version", ""),
            "failure_budget": forms.whole(form, "failure_budget", "May fail", usual.failure_budget),
        }
    )
    return wanted.order(engine.rollouts.select(wanted.nodes))


def _minutes(form: forms.Form, name: str, usual: float) -> float:
    return forms.number(form, name, "Minutes", usual / _MINUTE) * _MINUTE


def _progress(rollout: Rollout) -> Mapping[str, Any]:
    """How far it is."""
    stages = [step.stage for step in rollout.steps.values()]
    return {
        "rollout": rollout,
        "steps": list(rollout.steps.values()),
        "ended": sum(stage in _ENDED for stage in stages),
        "failed": stages.count(Stage.FAILED),
        "turns": [turn for turn, phases in _TURNS.items() if rollout.phase in phases],
        "moved": sum(step.moved for step in rollout.steps.values()),
        "closed": sum(step.closed for step in rollout.steps.values()),
    }


_TURNS = {
    "pause": (Phase.RUNNING,),
    "resume": (Phase.PAUSED,),
    "abort": (Phase.RUNNING, Phase.PAUSED),
}


def _durations(rollout: Rollout, now: float) -> Mapping[str, float | None]:
    return {
        step.address: None if step.begun is None else max(0.0, (step.ended or now) - step.begun)
        for step in rollout.steps.values()
    }
