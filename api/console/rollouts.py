"""The pages of rollouts: the list, one page per rollout, and the forms that start and control them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request, Response

from api.console import forms, links, pages
from api.console.context import ConsoleDep
from api.console.errors import USER_ERRORS, ConsoleRoute, describe
from api.dependencies import CallerDep, EngineDep
from api.schemas import rollouts as schemas
from controlplane.engine.engine import Engine
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rollout import MANUAL, Rollout, RolloutPhase, RolloutSpec, Stage
from controlplane.rollouts.preflight import PreflightResult

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_SECONDS_PER_MINUTE = 60.0
_RolloutIdPath = Annotated[schemas.RolloutId, Path(alias="id")]
_Command = Literal["pause", "resume", "abort"]
_FINAL_STAGES = (Stage.DONE, Stage.FAILED, Stage.SKIPPED)


@router.get("/console/rollouts")
async def show_rollouts(request: Request, engine: EngineDep) -> Response:
    rollouts = sorted(engine.rollouts.all(), key=lambda rollout: (rollout.created, rollout.id), reverse=True)
    values = {"rollouts": [_progress_values(rollout) for rollout in rollouts]}
    return pages.live_page(request, "rollouts.html", "rollouts", "/console/rollouts", values)


@router.get("/console/rollouts/{id}")
async def show_rollout(
    request: Request, engine: EngineDep, console: ConsoleDep, rollout_id: _RolloutIdPath
) -> Response:
    rollout = engine.rollouts.get(rollout_id)
    # Running steps show their duration, rounded to 5 s so that the content does not change every second.
    now = console.now() // 5 * 5
    values = {**_progress_values(rollout), "durations": _durations(rollout, now)}
    return pages.live_page(request, "rollout.html", "rollouts", links.rollout(rollout_id), values)


@router.get("/console/start-rollout")
async def show_start_form(request: Request, engine: EngineDep) -> Response:
    """Show the form; with fields in the query, also the result of a dry run."""
    form = {name: text for name, value in request.query_params.items() if (text := value.strip())}
    if "nodes" not in form:
        return _start_form(request, engine, form)
    try:
        preflight = await engine.rollouts.check(_read_spec(engine, form))
    except USER_ERRORS as error:
        status, detail = await describe(request, error)
        return _start_form(request, engine, form, status, detail)
    return _start_form(request, engine, form, preflight=preflight)


@router.post("/console/rollouts")
async def start_rollout(request: Request, engine: EngineDep, caller: CallerDep) -> Response:
    async def start(form: forms.FormFields) -> Response:
        spec = _read_spec(engine, form)
        rollout = await engine.rollouts.start(spec, caller.name, force=form.get("force") == "yes")
        request.state.audit_subject = rollout.id
        return pages.success(request, "the rollout has started", links.rollout(rollout.id), leave_page=True)

    return await forms.submit(request, start, lambda *args: _start_form(request, engine, *args))


@router.get("/console/rollouts/{id}/{command}")
async def show_command_form(
    request: Request, engine: EngineDep, rollout_id: _RolloutIdPath, command: _Command
) -> Response:
    return _command_form(request, engine, rollout_id, command)


@router.post("/console/rollouts/{id}/pause")
async def pause_rollout(
    request: Request, engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath
) -> Response:
    async def pause(form: forms.FormFields) -> Response:
        await engine.rollouts.pause(rollout_id, caller.name)
        return pages.success(request, "the rollout is paused", links.rollout(rollout_id))

    return await forms.submit(
        request, pause, lambda _, *args: _command_form(request, engine, rollout_id, "pause", *args)
    )


@router.post("/console/rollouts/{id}/resume")
async def resume_rollout(
    request: Request, engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath
) -> Response:
    async def resume(form: forms.FormFields) -> Response:
        await engine.rollouts.resume(rollout_id, caller.name)
        return pages.success(request, "the rollout continues", links.rollout(rollout_id))

    return await forms.submit(
        request, resume, lambda _, *args: _command_form(request, engine, rollout_id, "resume", *args)
    )


@router.post("/console/rollouts/{id}/abort")
async def abort_rollout(
    request: Request, engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath
) -> Response:
    async def abort(form: forms.FormFields) -> Response:
        await engine.rollouts.abort(rollout_id, caller.name)
        return pages.success(request, "the rollout is being aborted", links.rollout(rollout_id))

    return await forms.submit(
        request, abort, lambda _, *args: _command_form(request, engine, rollout_id, "abort", *args)
    )


def _command_form(
    request: Request, engine: Engine, rollout_id: str, command: str, status: int = 200, error: str = ""
) -> Response:
    rollout = engine.rollouts.get(rollout_id)
    drained_nodes = [step.address for step in rollout.steps.values() if step.drained_by_us]
    return pages.form_page(
        request,
        "_turn.html",
        status,
        rollout=rollout,
        command=command,
        drained_nodes=drained_nodes,
        error=error,
    )


def _start_form(
    request: Request,
    engine: Engine,
    form: forms.FormFields = EMPTY_MAP,
    status: int = 200,
    error: str = "",
    preflight: PreflightResult | None = None,
) -> Response:
    return pages.form_page(
        request,
        "_start.html",
        status,
        form=form,
        actions=engine.rollouts.action_names(),
        defaults=RolloutSpec(()),
        preflight=preflight,
        error=error,
    )


def _read_spec(engine: Engine, form: forms.FormFields) -> RolloutSpec:
    """Read the spec from the form. Raises ProblemError or ValidationError if a field is invalid."""
    defaults = RolloutSpec(())
    request = schemas.StartRolloutRequest.model_validate(
        {
            "nodes": form.get("nodes", "all"),
            "action": form.get("action", MANUAL),
            "max_unavailable": forms.integer(
                form, "max_unavailable", "Nodes at a time", defaults.max_unavailable
            ),
            "drain_deadline_seconds": _minutes(form, "drain_minutes", defaults.drain_deadline),
            "on_deadline": form.get("on_deadline", defaults.on_deadline.value),
            "return_deadline_seconds": _minutes(form, "return_minutes", defaults.return_deadline),
            "healthy_for_seconds": forms.number(form, "healthy_for", "Healthy for", defaults.healthy_for),
            "version": form.get("version", ""),
            "failure_budget": forms.integer(form, "failure_budget", "May fail", defaults.failure_budget),
        }
    )
    return request.to_spec(engine.rollouts.select_nodes(request.nodes))


def _minutes(form: forms.FormFields, name: str, default: float) -> float:
    return forms.number(form, name, "Minutes", default / _SECONDS_PER_MINUTE) * _SECONDS_PER_MINUTE


def _progress_values(rollout: Rollout) -> Mapping[str, Any]:
    """Return the rollout's progress as template values."""
    stages = [step.stage for step in rollout.steps.values()]
    return {
        "rollout": rollout,
        "steps": list(rollout.steps.values()),
        "ended": sum(stage in _FINAL_STAGES for stage in stages),
        "failed": stages.count(Stage.FAILED),
        "commands": [command for command, phases in _COMMAND_PHASES.items() if rollout.phase in phases],
        "moved": sum(step.moved for step in rollout.steps.values()),
        "closed": sum(step.closed for step in rollout.steps.values()),
    }


_COMMAND_PHASES = {
    "pause": (RolloutPhase.RUNNING,),
    "resume": (RolloutPhase.PAUSED,),
    "abort": (RolloutPhase.RUNNING, RolloutPhase.PAUSED),
}


def _durations(rollout: Rollout, now: float) -> Mapping[str, float | None]:
    return {
        step.address: None
        if step.drain_requested_at is None
        else max(0.0, (step.ended or now) - step.drain_requested_at)
        for step in rollout.steps.values()
    }
