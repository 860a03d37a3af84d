"""Wait for a rollout: a progress bar on a terminal, one line per change elsewhere, a report at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from cli.client import ControlPlaneClient
from cli.errors import CliError
from cli.output import print_note, print_result, sanitize, show_table
from cli.progress import retry_until_available
from cli.rollout_tables import (
    STEP_HEADERS,
    active_steps,
    count_finished,
    count_in_stages,
    step_row,
    summary_line,
)

_POLL_SECONDS = 0.5

ShowProgress = Callable[[Mapping[str, Any]], None]


def rollout_path(name: str) -> str:
    """Return the REST path of a rollout."""
    from urllib.parse import quote

    return f"/v1/rollouts/{quote(name, safe='')}"


def wait_until_finished(
    client: ControlPlaneClient, rollout: Mapping[str, Any], *, as_json: bool = False
) -> None:
    """Return when all nodes are done. Raises CliError if the rollout pauses or is aborted, and on Ctrl-C.

    `as_json`: print each change as a line of JSON on standard output.
    """
    name = rollout["id"]
    try:
        with _json_progress() if as_json else _terminal_progress() as show:
            show(rollout)
            while (result := rollout_result(rollout)) is None:
                time.sleep(_POLL_SECONDS)
                rollout = retry_until_available(lambda: client.get(rollout_path(name)))
                show(rollout)
    except KeyboardInterrupt:
        raise CliError(
            f"stopped waiting; the rollout {name} continues: `tidevoy rollout status {name} --follow` shows"
            " it"
            f", `tidevoy rollout pause {name}` or `abort {name}` stops it"
        ) from None
    if not as_json:
        print_report(rollout)
    if result:
        raise CliError(sanitize(result))


def rollout_result(rollout: Mapping[str, Any]) -> str | None:
    """Return None to keep waiting, "" if all nodes are done, else why the rollout stopped."""
    name, phase, reason = rollout["id"], rollout["phase"], rollout["reason"]
    if phase == "paused":
        return (
            f"the rollout {name} is paused: {reason}; `tidevoy rollout resume {name}` continues it,"
            f" `tidevoy rollout abort {name}` ends it"
        )
    if phase == "aborted":
        return f"the rollout {name} was aborted: {reason}"
    return "" if phase == "done" else None


def print_report(rollout: Mapping[str, Any]) -> None:
    """Print the table of all nodes, and the summary line."""
    now = datetime.now(UTC)
    show_table(STEP_HEADERS, [step_row(step, now) for step in rollout["steps"]])
    print_result(sanitize(summary_line(rollout)))


@contextmanager
def _terminal_progress() -> Iterator[ShowProgress]:
    if not sys.stderr.isatty():
        yield _line_progress(print_note)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, now="")
        show_lines = _line_progress(lambda line: console.print(Text(sanitize(line))))

        def show(rollout: Mapping[str, Any]) -> None:
            show_lines(rollout)
            steps = rollout["steps"]
            bar.update(
                task,
                description=f"{rollout['id']} {rollout['phase']}",
                total=len(steps),
                completed=count_finished(steps),
                now=sanitize(_active_nodes(rollout)),
            )

        yield show


def _line_progress(print_line: Callable[[str], None]) -> ShowProgress:
    """Print one line when a node enters another stage, and when the rollout enters another phase."""
    stages: dict[str, str] = {}
    phase = ""

    def show(rollout: Mapping[str, Any]) -> None:
        nonlocal phase
        for step in rollout["steps"]:
            previous_stage = stages.get(step["address"], "pending")
            if step["stage"] != previous_stage:
                print_line(f"{step['address']} {_format_stage(step)}")
            stages[step["address"]] = step["stage"]
        if rollout["phase"] != phase:
            phase = rollout["phase"]
            print_line(summary_line(rollout))

    return show


@contextmanager
def _json_progress() -> Iterator[ShowProgress]:
    previous: dict[str, Any] = {}

    def show(rollout: Mapping[str, Any]) -> None:
        line = changes_since(previous, rollout)
        if line is not None:
            print_result(json.dumps(line, ensure_ascii=False))

    yield show


def changes_since(previous: dict[str, Any], rollout: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what changed since the last call with the same `previous`, and update `previous`.

    Returns None if nothing changed.
    """
    steps = {step["address"]: step for step in rollout["steps"]}
    head = {key: rollout[key] for key in ("id", "phase", "reason")}
    changed = [step for address, step in steps.items() if previous.get("steps", {}).get(address) != step]
    if not changed and previous.get("head") == head:
        return None
    previous.update(head=head, steps=steps)
    return {**head, "done": count_in_stages(rollout["steps"], "done"), "of": len(steps), "changed": changed}


def _active_nodes(rollout: Mapping[str, Any]) -> str:
    """Format the active nodes as `10.0.0.1:4000 draining: 3 sessions are left, ...`."""
    steps = active_steps(rollout)
    more = f" and {len(steps) - 2} more" if len(steps) > 2 else ""
    return ", ".join(f"{step['address']} {_format_stage(step)}" for step in steps[:2]) + more


def _format_stage(step: Mapping[str, Any]) -> str:
    return f"{step['stage']}: {step['reason']}" if step["reason"] else str(step["stage"])
