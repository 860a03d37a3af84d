"""Format rollouts as table rows and lines of text. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from cli.output import format_count, format_duration, format_time

_FINISHED_STAGES = frozenset({"done", "failed", "skipped"})

ROLLOUT_HEADERS = ("ID", "PHASE", "NODES", "FAILED", "ACTION", "BY", "CREATED", "REASON")
STEP_HEADERS = ("ADDRESS", "STAGE", "DURATION", "SESSIONS", "MOVED", "FAILED", "CLOSED", "VERSION", "REASON")


def rollout_row(rollout: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the table row of a rollout."""
    steps = rollout["steps"]
    return (
        rollout["id"],
        rollout["phase"],
        f"{count_in_stages(steps, 'done')}/{len(steps)}",
        str(count_in_stages(steps, "failed")),
        rollout["order"]["action"],
        rollout["by"],
        format_time(rollout["created"]),
        rollout["reason"],
    )


def step_row(step: Mapping[str, Any], now: datetime) -> tuple[str, ...]:
    """Return the table row of one node's step; `now` ends the duration of a step that still runs."""
    return (
        step["address"],
        step["stage"],
        _format_step_duration(step, now),
        format_count(step["sessions"]),
        *(str(step[name]) if step["begun"] else "-" for name in ("moved", "failed", "closed")),
        _format_versions(step),
        step["reason"],
    )


def summary_line(rollout: Mapping[str, Any]) -> str:
    """Return one sentence with the rollout's action, selector, author, phase and reason."""
    spec = rollout["order"]
    reason = f": {rollout['reason']}" if rollout["reason"] else ""
    target = f" to {spec['version']}" if spec["version"] else ""
    return (
        f"rollout {rollout['id']} ({spec['action']}{target}, {spec['selector']}, by {rollout['by']})"
        f" is {rollout['phase']}{reason}"
    )


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return what a rollout would do, one line per step."""
    spec = plan["order"]
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
        "4. undrain it, and let it warm up",
        "pause at the first node that fails"
        if not budget
        else f"pause when more than {budget} nodes have failed, or at the end if fewer have",
    ]


def count_in_stages(steps: Iterable[Mapping[str, Any]], *stages: str) -> int:
    """Return how many steps are in one of these stages."""
    return sum(step["stage"] in stages for step in steps)


def count_finished(steps: Iterable[Mapping[str, Any]]) -> int:
    """Return how many steps are finished, successfully or not."""
    return count_in_stages(steps, *_FINISHED_STAGES)


def active_steps(rollout: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the steps that have started and are not finished."""
    return [step for step in rollout["steps"] if step["stage"] not in {*_FINISHED_STAGES, "pending"}]


def _format_step_duration(step: Mapping[str, Any], now: datetime) -> str:
    if step["begun"] is None:
        return "-"
    end = now if step["ended"] is None else datetime.fromisoformat(step["ended"])
    return format_duration(max(0.0, (end - datetime.fromisoformat(step["begun"])).total_seconds()))


def _format_versions(step: Mapping[str, Any]) -> str:
    before, after = step["version_before"], step["version_after"]
    return f"{before} -> {after}" if before and after and before != after else after or before or "-"
