"""Rollout commands: rollout start, status, pause, resume, abort."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer

from cli import options
from cli.client import ControlPlaneClient
from cli.errors import EXIT_USAGE, CliError
from cli.options import DEFAULT_URL, AsJson, Url
from cli.output import print_note, print_result, sanitize, show_json, show_table
from cli.rollout_tables import ROLLOUT_HEADERS, plan_lines, rollout_row, summary_line
from cli.rollout_waiting import print_report, rollout_path, wait_until_finished

RolloutId = Annotated[str, typer.Argument(metavar="ID", help="Id of the rollout.", show_default=False)]


def _duration_option(text: str) -> Any:
    return typer.Option(parser=options.parse_duration, metavar="DURATION", help=text)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    rollout = typer.Typer(
        help="Restart or upgrade nodes one after another without disconnecting clients.", no_args_is_help=True
    )
    rollout.command("start")(start)
    rollout.command("status")(status)
    rollout.command("pause")(pause)
    rollout.command("resume")(resume)
    rollout.command("abort")(abort)
    app.add_typer(rollout, name="rollout")


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
            " the"
            " nodes yourself.",
        ),
    ] = "manual",
    max_unavailable: Annotated[
        int, typer.Option(min=1, help="Nodes that may be out of service at the same time.")
    ] = 1,
    drain_deadline: Annotated[float, _duration_option("Time for sessions to leave a node.")] = "10m",  # type: ignore[assignment]
    on_deadline: Annotated[
        Literal["keep", "close"],
        typer.Option(
            help="What happens to sessions that are left at the deadline: keep them until the action ends"
            " them,"
            " or close them (every Envoy must have Tidevoy's module)."
        ),
    ] = "keep",
    return_deadline: Annotated[
        float, _duration_option("Time for a node to be back and stable after its action.")
    ] = "10m",  # type: ignore[assignment]
    healthy_for: Annotated[
        float, _duration_option("How long a returned node must pass its checks before it gets sessions.")
    ] = "10s",  # type: ignore[assignment]
    version: Annotated[
        str, typer.Option(help="Version that each node must have afterwards, e.g. v8.5.4; default: any.")
    ] = "",
    failure_budget: Annotated[
        int, typer.Option(min=0, help="Nodes that may fail before the rollout pauses.")
    ] = 0,
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
    """Take nodes out of service one after another, run an action for each, and put it back.

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
    }
    with ControlPlaneClient(url) as client:
        plan = client.post("/v1/rollouts", {**spec, "dry_run": True})
        if dry_run:
            _print_plan(plan, as_json)
            return
        for warning in plan["cautions"]:
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
        for warning in plan["cautions"]:
            print_note(warning)
    if plan["problems"]:
        problems = (f"the rollout would be rejected: {problem}" for problem in plan["problems"])
        raise CliError("\n".join(sanitize(problem) for problem in problems))


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
                raise CliError("--follow shows one rollout; name its id", EXIT_USAGE)
            _print_rollouts(client.get("/v1/rollouts"), as_json)
            return
        rollout = client.get(rollout_path(name))
        if follow:
            wait_until_finished(client, rollout, as_json=as_json)
        elif as_json:
            show_json(rollout)
        else:
            print_report(rollout)


def _print_rollouts(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(answer)
    else:
        show_table(ROLLOUT_HEADERS, [rollout_row(rollout) for rollout in answer["rollouts"]])


def pause(name: RolloutId, url: Url = DEFAULT_URL) -> None:
    """Pause a rollout: start no further node. A running action continues to its end."""
    _post_command(url, name, "pause")


def resume(name: RolloutId, url: Url = DEFAULT_URL) -> None:
    """Resume a paused rollout. It retries failed nodes first."""
    _post_command(url, name, "resume")


def abort(name: RolloutId, url: Url = DEFAULT_URL) -> None:
    """Abort a rollout, and cancel the drains that it started."""
    _post_command(url, name, "abort")


def _post_command(url: str, name: str, command: str) -> None:
    with ControlPlaneClient(url) as client:
        _print_rollout(client.post(f"{rollout_path(name)}/{command}"), as_json=False)


def _print_rollout(rollout: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(rollout)
    else:
        print_result(sanitize(summary_line(rollout)))
