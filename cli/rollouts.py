"""Rollout commands: rollout start, status, pause, resume, abort, and how they show rollouts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from cli.client import ControlPlaneClient
from cli.errors import CliError, UsageError
from cli.options import DEFAULT_URL, Address, AsJson, Url, duration_option, require_finite
from cli.output import (
    format_count,
    format_duration,
    format_time,
    print_note,
    print_result,
    sanitize,
    show_json,
    show_table,
)
from cli.progress_display import ProgressDisplay
from cli.traffic_comparison import show_verification
from controlplane.model.comparison import DEFAULT_MAX_RATIO
from controlplane.model.rollout import REPLAY_PREFIX

app = typer.Typer(
    help="Restart or upgrade nodes one after another without disconnecting clients.", no_args_is_help=True
)

_FINISHED_STAGES = frozenset({"done", "failed", "skipped"})
_ROLLOUT_HEADERS = ("ID", "PHASE", "NODES", "FAILED", "ACTION", "BY", "CREATED", "REASON")
_STEP_HEADERS = (
    "ADDRESS",
    "STAGE",
    "DURATION",
    "SESSIONS",
    "MIGRATED",
    "FAILED",
    "CLOSED",
    "VERSION",
    "REASON",
)
_COUNT_FIELDS = ("migrated_sessions", "failed_migrations", "terminated_sessions")

RolloutId = Annotated[str, typer.Argument(metavar="ID", help="Id of the rollout.", show_default=False)]


@app.command()
def start(
    nodes: Annotated[
        str,
        typer.Option(
            metavar="all|NAME=VALUE,...|ADDRESS,...",
            help="All nodes, the nodes with all these labels, or these nodes in this order.",
            show_default=False,
        ),
    ],
    action: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Action in `rollouts.actions` of the control plane's configuration; `manual`: you restart"
            " the nodes yourself.",
        ),
    ] = "manual",
    max_unavailable: Annotated[
        int, typer.Option(min=1, help="Nodes that may be out of service at the same time.")
    ] = 1,
    drain_deadline: Annotated[float, duration_option("Time for sessions to leave a node.")] = "10m",  # type: ignore[assignment]
    on_deadline: Annotated[
        Literal["keep", "close"],
        typer.Option(
            help="What happens to sessions that are left at the deadline: keep them until the action ends"
            " them, or close them (every Envoy must have Tidevoy's module)."
        ),
    ] = "keep",
    return_deadline: Annotated[
        float, duration_option("Time for a node to be back and stable after its action.")
    ] = "10m",  # type: ignore[assignment]
    healthy_for: Annotated[
        float, duration_option("How long a returned node must pass its checks before it gets sessions.")
    ] = "10s",  # type: ignore[assignment]
    version: Annotated[
        str, typer.Option(help="Version that each node must have afterwards, e.g. v8.5.4; default: any.")
    ] = "",
    failure_budget: Annotated[
        int, typer.Option(min=0, help="Nodes that may fail before the rollout pauses.")
    ] = 0,
    verify: Annotated[
        str,
        typer.Option(
            metavar="replay:CAPTURE",
            help="Before a node returns to service, replay reads of a capture on it and on an old node, and"
            " pause if it has new errors or slower statements.",
        ),
    ] = "",
    verify_ratio: Annotated[
        float,
        typer.Option(
            min=1.0,
            callback=require_finite,
            help="A statement is slower if it takes at least this many times as long.",
        ),
    ] = DEFAULT_MAX_RATIO,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and what prevents it.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start in spite of failed checks, if that is possible.")
    ] = False,
    wait: Annotated[
        bool | None,
        typer.Option(
            "--wait/--no-wait",
            help="Show progress until the rollout ends or pauses. Default: only on a terminal.",
            show_default=False,
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Take nodes out of service one after another, run an action on each node, and put the node back.

    Exit code 0: done (without waiting: started); 1: paused, aborted, rejected, or a node failed.
    """
    spec = {
        "nodes": nodes,
        "action": action,
        "max_unavailable": max_unavailable,
        "drain_deadline_seconds": drain_deadline,
        "on_deadline": on_deadline,
        "return_deadline_seconds": return_deadline,
        "healthy_for_seconds": healthy_for,
        "version": version,
        "failure_budget": failure_budget,
        # Control planes of older releases do not know these fields.
        **({"verify": verify, "verify_ratio": verify_ratio} if verify else {}),
    }
    with ControlPlaneClient(url) as client:
        plan = client.post("/v1/rollouts", {**spec, "dry_run": True})
        if dry_run:
            _print_plan(plan, as_json)
            return
        for warning in plan["warnings"]:
            print_note(warning)
        rollout = client.post("/v1/rollouts", {**spec, "force": force})
        if sys.stderr.isatty() if wait is None else wait:
            wait_until_finished(client, rollout, as_json=as_json)
        else:
            _print_rollout(rollout, as_json)


def _print_plan(plan: dict[str, Any], as_json: bool) -> None:
    """Print what a rollout would do. Raises CliError if it would be rejected."""
    if as_json:
        show_json(plan)
    else:
        for line in plan_lines(plan):
            print_result(sanitize(line))
        for warning in plan["warnings"]:
            print_note(warning)
    if plan["problems"]:
        problems = (f"the rollout would be rejected: {problem}" for problem in plan["problems"])
        raise CliError("\n".join(sanitize(problem) for problem in problems))


@app.command()
def status(
    name: Annotated[
        str | None, typer.Argument(metavar="ID", help="Only this rollout.", show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show progress until the rollout ends or pauses.")
    ] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show active and recently finished rollouts, or one rollout with its nodes."""
    with ControlPlaneClient(url) as client:
        if name is None:
            if follow:
                raise UsageError("--follow shows one rollout; name its id")
            _print_rollouts(client.get("/v1/rollouts"), as_json)
            return
        rollout = client.get(_rollout_path(name))
        if follow:
            wait_until_finished(client, rollout, as_json=as_json)
        elif as_json:
            show_json(rollout)
        else:
            _print_report(rollout)


def _print_rollouts(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(answer)
    else:
        show_table(_ROLLOUT_HEADERS, [rollout_row(rollout) for rollout in answer["rollouts"]])


@app.command()
def pause(name: RolloutId, url: Url = DEFAULT_URL) -> None:
    """Pause a rollout: start no further node. A running action continues to its end."""
    _post_command(url, name, "pause")


@app.command()
def resume(
    name: RolloutId,
    skip_verification: Annotated[
        bool,
        typer.Option(
            "--skip-verification",
            help="Return nodes whose verification failed to service, without another verification.",
        ),
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Resume a paused rollout. It retries failed nodes first, and verifies them again."""
    _post_command(url, name, "resume?skip_verification=true" if skip_verification else "resume")


@app.command()
def abort(name: RolloutId, url: Url = DEFAULT_URL) -> None:
    """Abort a rollout, and cancel the drains that it started."""
    _post_command(url, name, "abort")


@app.command()
def verification(
    name: RolloutId,
    address: Address,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with charts, too.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show how a node of a rollout compares with an old node. Exit code 1: it is worse."""
    with ControlPlaneClient(url) as client:
        answer = client.get(f"{_rollout_path(name)}/verifications/{quote(address, safe='')}")
    if not show_verification(answer, html, as_json=as_json):
        raise typer.Exit(1)


def _rollout_path(name: str) -> str:
    return f"/v1/rollouts/{quote(name, safe='')}"


def _post_command(url: str, name: str, command: str) -> None:
    with ControlPlaneClient(url) as client:
        _print_rollout(client.post(f"{_rollout_path(name)}/{command}"), as_json=False)


def _print_rollout(rollout: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(rollout)
    else:
        print_result(sanitize(summary_line(rollout)))


def wait_until_finished(
    client: ControlPlaneClient, rollout: dict[str, Any], *, as_json: bool = False
) -> None:
    """Wait until the rollout is done. Raises CliError if it pauses or is aborted, and on Ctrl-C.

    With `as_json`, each change is printed as a line of JSON on standard output.
    """
    name, previous = rollout["id"], None
    try:
        with ProgressDisplay(as_json=as_json) as display:
            while True:
                _show_progress(display, previous, rollout)
                if (result := rollout_result(rollout)) is not None:
                    break
                previous, rollout = rollout, client.poll(_rollout_path(name))
    except KeyboardInterrupt:
        raise CliError(
            f"stopped waiting; the rollout {name} continues: `tidevoy rollout status {name} --follow` shows"
            f" it, `tidevoy rollout pause {name}` or `abort {name}` stops it"
        ) from None
    if not as_json:
        _print_report(rollout)
    if result:
        raise CliError(sanitize(result))


def rollout_result(rollout: Mapping[str, Any]) -> str | None:
    """Return None to keep waiting, "" if the rollout is done, else why it stopped."""
    name, phase, reason = rollout["id"], rollout["phase"], rollout["reason"]
    if phase == "paused":
        return (
            f"the rollout {name} is paused: {reason}; `tidevoy rollout resume {name}` continues it,"
            f" `tidevoy rollout abort {name}` ends it"
        )
    if phase == "aborted":
        return f"the rollout {name} was aborted: {reason}"
    return "" if phase == "done" else None


def _show_progress(
    display: ProgressDisplay, previous: Mapping[str, Any] | None, rollout: Mapping[str, Any]
) -> None:
    """Print one line when a node enters another stage, and when the rollout enters another phase."""
    changes, steps = changes_since(previous, rollout), rollout["steps"]
    if changes is not None:
        display.print_json(changes, change=changes)
    previous_steps = _steps_by_address(previous)
    for step in steps:
        if step["stage"] != previous_steps.get(step["address"], {"stage": "pending"})["stage"]:
            display.show_event(f"{step['address']} {_format_stage(step)}")
    if previous is None or rollout["phase"] != previous["phase"]:
        display.show_event(summary_line(rollout))
    finished = sum(step["stage"] in _FINISHED_STAGES for step in steps)
    display.show_state(
        f"{rollout['id']} {rollout['phase']}, {finished}/{len(steps)} {_active_nodes(rollout)}",
        completed=finished,
        total=len(steps),
    )


def changes_since(previous: Mapping[str, Any] | None, rollout: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what changed since the `previous` state of the rollout, or None if nothing did."""
    steps, previous_steps = rollout["steps"], _steps_by_address(previous)
    head = {key: rollout[key] for key in ("id", "phase", "reason")}
    changed = [step for step in steps if step != previous_steps.get(step["address"])]
    if previous is not None and not changed and head == {key: previous[key] for key in head}:
        return None
    return {**head, "done": _count_in_stage(steps, "done"), "of": len(steps), "changed": changed}


def _steps_by_address(rollout: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    return {} if rollout is None else {step["address"]: step for step in rollout["steps"]}


def _active_nodes(rollout: Mapping[str, Any]) -> str:
    """Format the active nodes as `10.0.0.1:4000 draining: 3 sessions are left, ...`."""
    steps = [step for step in rollout["steps"] if step["stage"] not in {*_FINISHED_STAGES, "pending"}]
    more = f" and {len(steps) - 2} more" if len(steps) > 2 else ""
    return ", ".join(f"{step['address']} {_format_stage(step)}" for step in steps[:2]) + more


def _format_stage(step: Mapping[str, Any]) -> str:
    return f"{step['stage']}: {step['reason']}" if step["reason"] else str(step["stage"])


def _print_report(rollout: Mapping[str, Any]) -> None:
    now = datetime.now(UTC)
    show_table(_STEP_HEADERS, [step_row(step, now) for step in rollout["steps"]])
    print_result(sanitize(summary_line(rollout)))


def rollout_row(rollout: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the table row of a rollout."""
    steps = rollout["steps"]
    return (
        rollout["id"],
        rollout["phase"],
        f"{_count_in_stage(steps, 'done')}/{len(steps)}",
        str(_count_in_stage(steps, "failed")),
        rollout["spec"]["action"],
        rollout["created_by"],
        format_time(rollout["created_at"]),
        rollout["reason"],
    )


def step_row(step: Mapping[str, Any], now: datetime) -> tuple[str, ...]:
    """Return the table row of one node's step; `now` ends the duration of a step that still runs."""
    return (
        step["address"],
        step["stage"],
        _format_step_duration(step, now),
        format_count(step["sessions"]),
        *(str(step[name]) if step["drain_requested_at"] else "-" for name in _COUNT_FIELDS),
        _format_versions(step),
        step["reason"],
    )


def summary_line(rollout: Mapping[str, Any]) -> str:
    """Return one sentence with the rollout's action, selector, author, phase and reason."""
    spec = rollout["spec"]
    reason = f": {rollout['reason']}" if rollout["reason"] else ""
    target = f" to {spec['version']}" if spec["version"] else ""
    return (
        f"rollout {rollout['id']} ({spec['action']}{target}, {spec['selector']}, by {rollout['created_by']})"
        f" is {rollout['phase']}{reason}"
    )


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return what a rollout would do, one line per step."""
    spec = plan["spec"]
    total, at_once, budget = len(spec["nodes"]), spec["max_unavailable"], spec["failure_budget"]
    leftover_sessions = "stay until the action ends them" if spec["on_deadline"] == "keep" else "are closed"
    back = f"back with version {spec['version']}" if spec["version"] else "back"
    drain_time, return_time, healthy_time = (
        format_duration(spec[f"{name}_seconds"])
        for name in ("drain_deadline", "return_deadline", "healthy_for")
    )
    node_count = f"{total} node" if total == 1 else f"{total} nodes"
    return [
        f"{node_count}, {at_once} at a time: {', '.join(spec['nodes']) or 'none'}",
        f"1. drain it, for at most {drain_time}; sessions that are left then {leftover_sessions}",
        f"2. run the action {spec['action']}",
        f"3. wait until it is {back}, for at most {return_time}, and has passed its checks for"
        f" {healthy_time}",
        *(f"{number}. {text}" for number, text in enumerate(_last_steps(spec), 4)),
        "pause at the first node that fails"
        if not budget
        else f"pause when more than {budget} nodes have failed, or at the end if fewer have",
    ]


def _last_steps(spec: Mapping[str, Any]) -> list[str]:
    """Return what a rollout does with a node that is back."""
    undrain = "undrain it, and let it warm up"
    if not (verify := spec.get("verify")):  # answers of older releases lack it
        return [undrain]
    return [
        f"compare it with an old node, on reads of {verify.removeprefix(REPLAY_PREFIX)}; pause if a statement"
        f" takes {spec['verify_ratio']:g} times as long or has a new error",
        undrain,
    ]


def _count_in_stage(steps: Iterable[Mapping[str, Any]], stage: str) -> int:
    return sum(step["stage"] == stage for step in steps)


def _format_step_duration(step: Mapping[str, Any], now: datetime) -> str:
    if step["drain_requested_at"] is None:
        return "-"
    end = now if step["ended_at"] is None else datetime.fromisoformat(step["ended_at"])
    return format_duration(
        max(0.0, (end - datetime.fromisoformat(step["drain_requested_at"])).total_seconds())
    )


def _format_versions(step: Mapping[str, Any]) -> str:
    before, after = step["version_before"], step["version_after"]
    return f"{before} -> {after}" if before and after and before != after else after or before or "-"
