"""The pages of rollouts: the list, one page per rollout, and the forms that start and control them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request, Response

from api.auth.caller import Caller
from api.console import pages
from api.console.comparison_charts import comparison_values
from api.console.errors import USER_ERRORS, ConsoleRoute, describe
from api.console.forms import Form, submit
from api.dependencies import CallerDep, EngineDep
from api.schemas import rollouts as schemas
from api.schemas.common import Address
from controlplane.engine.engine import Engine
from controlplane.model.rollout import (
    MANUAL,
    REPLAY_PREFIX,
    Rollout,
    RolloutPhase,
    RolloutSpec,
    Stage,
    Verification,
)
from controlplane.rollouts.preflight import PreflightResult

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_SECONDS_PER_MINUTE = 60.0
_RolloutIdPath = Annotated[schemas.RolloutId, Path(alias="id")]
_AddressPath = Annotated[Address, Path()]
_Command = Literal["pause", "resume", "abort"]
_FINAL_STAGES = (Stage.DONE, Stage.FAILED, Stage.SKIPPED)


@router.get("/console/rollouts")
async def show_rollouts(request: Request, engine: EngineDep) -> Response:
    rollouts = schemas.newest_first(engine.rollouts.all())
    values = {"rollouts": [_progress_values(rollout) for rollout in rollouts]}
    return pages.live_page(request, "rollouts.html", "rollouts", "/console/rollouts", values)


@router.get("/console/rollouts/{id}")
async def show_rollout(request: Request, engine: EngineDep, rollout_id: _RolloutIdPath) -> Response:
    rollout = engine.rollouts.get(rollout_id)
    # Running steps show their duration, rounded to 5 s so that the content does not change every second.
    now = engine.cluster.now() // 5 * 5
    values = {**_progress_values(rollout), "durations": _durations(rollout, now)}
    return pages.live_page(request, "rollout.html", "rollouts", pages.rollout_link(rollout_id), values)


@router.get("/console/rollouts/{id}/verifications/{address}")
async def show_verification(
    request: Request, engine: EngineDep, rollout_id: _RolloutIdPath, address: _AddressPath
) -> Response:
    """Show the comparison of a node with an old one."""
    report = engine.rollouts.verification(rollout_id, address)
    values = comparison_values(report.comparison, report.findings, report.max_ratio, report.digest_count)
    return pages.page(request, "verification.html", rollout_id=rollout_id, report=report, **values)


@router.get("/console/start-rollout")
async def show_start_form(request: Request, engine: EngineDep) -> Response:
    """Show the form; with fields in the query, also the result of a dry run."""
    form = Form.from_pairs(request.query_params.items())
    if "nodes" not in form:
        return _start_form(request, engine, form)
    try:
        preflight = engine.rollouts.check(_read_spec(engine, form))
    except USER_ERRORS as error:
        status, detail = await describe(request, error)
        return _start_form(request, engine, replace(form, status=status, error=detail))
    return _start_form(request, engine, form, preflight)


@router.post("/console/rollouts")
async def start_rollout(request: Request, engine: EngineDep, caller: CallerDep) -> Response:
    async def start(form: Form) -> Response:
        spec = _read_spec(engine, form)
        rollout = await engine.rollouts.start(spec, caller.name, force=form.get("force") == "yes")
        request.state.audit_subject = rollout.id
        return pages.success(
            request, "the rollout has started", pages.rollout_link(rollout.id), leave_page=True
        )

    return await submit(request, start, partial(_start_form, request, engine))


@router.get("/console/rollouts/{id}/{command}")
async def show_command_form(
    request: Request, engine: EngineDep, rollout_id: _RolloutIdPath, command: _Command
) -> Response:
    return _command_form(request, engine, rollout_id, command, Form())


@router.post("/console/rollouts/{id}/pause")
async def pause_rollout(
    request: Request, engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath
) -> Response:
    return await _submit_command(request, engine, rollout_id, "pause", caller, "the rollout is paused")


@router.post("/console/rollouts/{id}/resume")
async def resume_rollout(
    request: Request, engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath
) -> Response:
    return await _submit_command(request, engine, rollout_id, "resume", caller, "the rollout continues")


@router.post("/console/rollouts/{id}/abort")
async def abort_rollout(
    request: Request, engine: EngineDep, caller: CallerDep, rollout_id: _RolloutIdPath
) -> Response:
    return await _submit_command(request, engine, rollout_id, "abort", caller, "the rollout is being aborted")


async def _submit_command(
    request: Request, engine: Engine, rollout_id: str, command: _Command, caller: Caller, text: str
) -> Response:
    rollouts = engine.rollouts
    actions = {"pause": rollouts.pause, "abort": rollouts.abort}

    async def run(form: Form) -> Response:
        if command == "resume":
            skips = form.get("skip_verification") == "yes"
            await rollouts.resume(rollout_id, caller.name, skip_verification=skips)
        else:
            await actions[command](rollout_id, caller.name)
        return pages.success(request, text, pages.rollout_link(rollout_id))

    return await submit(request, run, partial(_command_form, request, engine, rollout_id, command))


def _command_form(
    request: Request, engine: Engine, rollout_id: str, command: _Command, form: Form
) -> Response:
    rollout = engine.rollouts.get(rollout_id)
    drained = [step.address for step in rollout.steps.values() if step.owns_drain]
    unverified = [step.address for step in rollout.steps.values() if step.verification is Verification.FAILED]
    values = {
        "rollout": rollout,
        "command": command,
        "drained_nodes": drained,
        "unverified_nodes": unverified,
        "form": form,
    }
    return pages.form_page(request, "_rollout_command.html", form.status, **values)


def _start_form(
    request: Request, engine: Engine, form: Form, preflight: PreflightResult | None = None
) -> Response:
    return pages.form_page(
        request,
        "_rollout_form.html",
        form.status,
        form=form,
        actions=engine.rollouts.action_names(),
        defaults=RolloutSpec(()),
        preflight=preflight,
    )


def _read_spec(engine: Engine, form: Form) -> RolloutSpec:
    """Read the spec from the form. Raises ProblemError or ValidationError if a field is invalid."""
    defaults = RolloutSpec(())

    def seconds(name: str, default: float) -> float:
        return form.number(name, "Minutes", default / _SECONDS_PER_MINUTE) * _SECONDS_PER_MINUTE

    request = schemas.StartRolloutRequest.model_validate(
        {
            "nodes": form.get("nodes", "all"),
            "action": form.get("action", MANUAL),
            "max_unavailable": form.integer("max_unavailable", "Nodes at a time", defaults.max_unavailable),
            "drain_deadline_seconds": seconds("drain_minutes", defaults.drain_deadline),
            "on_deadline": form.get("on_deadline", defaults.on_deadline.value),
            "return_deadline_seconds": seconds("return_minutes", defaults.return_deadline),
            "healthy_for_seconds": form.number("healthy_for", "Healthy for", defaults.healthy_for),
            "version": form.get("version"),
            "failure_budget": form.integer("failure_budget", "May fail", defaults.failure_budget),
            "verify": f"{REPLAY_PREFIX}{capture}" if (capture := form.get("capture")) else "",
            "verify_ratio": form.number("verify_ratio", "Slower at", defaults.verify_ratio),
        }
    )
    return request.to_spec(engine.rollouts.select_nodes(request.nodes))


def _progress_values(rollout: Rollout) -> Mapping[str, Any]:
    stages = [step.stage for step in rollout.steps.values()]
    return {
        "rollout": rollout,
        "steps": list(rollout.steps.values()),
        "ended": sum(stage in _FINAL_STAGES for stage in stages),
        "failed": stages.count(Stage.FAILED),
        "commands": [command for command, phases in _COMMAND_PHASES.items() if rollout.phase in phases],
        "migrated": sum(step.migrated_sessions for step in rollout.steps.values()),
        "closed": sum(step.terminated_sessions for step in rollout.steps.values()),
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
        else max(0.0, (step.ended_at or now) - step.drain_requested_at)
        for step in rollout.steps.values()
    }
