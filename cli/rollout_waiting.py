"""Watching a rollout: progress on a terminal, a line a change elsewhere, a report at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from cli.client import Client
from cli.errors import Failure
from cli.output import printable, remark, say, show_table
from cli.progress import patiently
from cli.rollout_tables import STEP_HEADS, at_work, count_of, ended, step_row, title

_POLL = 0.5  # seconds

Show = Callable[[Mapping[str, Any]], None]


def rollout_path(name: str) -> str:
    """The path of a rollout."""
    from urllib.parse import quote

    return f"/v1/rollouts/{quote(name, safe='')}"


def until_over(client: Client, rollout: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Return when all its nodes are done. Failure when it pauses, is aborted or a node failed, and on Ctrl-C.

    `as_json`: each change as a line of JSON on standard output.
    """
    name = rollout["id"]
    try:
        with _json_lines() if as_json else _progress() as show:
            show(rollout)
            while (ending := outcome(rollout)) is None:
                time.sleep(_POLL)
                rollout = patiently(lambda: client.get(rollout_path(name)))
                show(rollout)
    except KeyboardInterrupt:
        raise Failure(
            f"stopped watching; the rollout {name} goes on: `tidevoy rollout status {name} --follow` shows it"
            f", `tidevoy rollout pause {name}` or `abort {name}` stops it"
        ) from None
    if not as_json:
        report(rollout)
    if ending:
        raise Failure(printable(ending))


def outcome(rollout: Mapping[str, Any]) -> str | None:
    """None: wait on. Empty: all nodes are done. Else why not."""
    name, phase, why = rollout["id"], rollout["phase"], rollout["reason"]
    if phase == "paused":
        return (
            f"the rollout {name} is paused: {why}; `tidevoy rollout resume {name}` goes on, `tidevoy rollout"
            f" abort {name}` ends it"
        )
    if phase == "aborted":
        return f"the rollout {name} was aborted: {why}"
    return "" if phase == "done" else None


def report(rollout: Mapping[str, Any]) -> None:
    """What became of each node, and of it all."""
    now = datetime.now(UTC)
    show_table(STEP_HEADS, [step_row(step, now) for step in rollout["steps"]])
    say(printable(title(rollout)))


@contextmanager
def _progress() -> Iterator[Show]:
    if not sys.stderr.isatty():
        yield _lines(remark)
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
        tell = _lines(lambda line: console.print(Text(printable(line))))

        def show(rollout: Mapping[str, Any]) -> None:
            tell(rollout)
            steps = rollout["steps"]
            bar.update(
                task,
                description=f"{rollout['id']} {rollout['phase']}",
                total=len(steps),
                completed=ended(steps),
                now=printable(_now(rollout)),
            )

        yield show


def _lines(tell: Callable[[str], None]) -> Show:
    """A line for each node that comes into another stage, and for the rollout's phases."""
    stages: dict[str, str] = {}
    phase = ""

    def show(rollout: Mapping[str, Any]) -> None:
        nonlocal phase
        for step in rollout["steps"]:
            before = stages.get(step["address"], "pending")
            if step["stage"] != before:
                tell(f"{step['address']} {_stage(step)}")
            stages[step["address"]] = step["stage"]
        if rollout["phase"] != phase:
            phase = rollout["phase"]
            tell(title(rollout))

    return show


@contextmanager
def _json_lines() -> Iterator[Show]:
    said: dict[str, Any] = {}

    def show(rollout: Mapping[str, Any]) -> None:
        line = changes(said, rollout)
        if line is not None:
            say(json.dumps(line, ensure_ascii=False))

    yield show


def changes(said: dict[str, Any], rollout: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is new since the last call with the same `said`, which is brought up to date; None: nothing."""
    steps = {step["address"]: step for step in rollout["steps"]}
    head = {key: rollout[key] for key in ("id", "phase", "reason")}
    changed = [step for address, step in steps.items() if said.get("steps", {}).get(address) != step]
    if not changed and said.get("head") == head:
        return None
    said.update(head=head, steps=steps)
    return {**head, "done": count_of(rollout["steps"], "done"), "of": len(steps), "changed": changed}


def _now(rollout: Mapping[str, Any]) -> str:
    """`10.0.0.1:4000 draining: 3 sessions are left`, of the nodes whose turn it is."""
    working = at_work(rollout)
    more = f" and {len(working) - 2} more" if len(working) > 2 else ""
    return ", ".join(f"{step['address']} {_stage(step)}" for step in working[:2]) + more


def _stage(step: Mapping[str, Any]) -> str:
    return f"{step['stage']}: {step['reason']}" if step["reason"] else str(step["stage"])
