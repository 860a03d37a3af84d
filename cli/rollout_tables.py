"""How rollouts read in a terminal and in a log. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from cli.output import format_count, format_duration, format_time

_FINISHED_STAGES = frozenset({"done", "failed", "skipped"})

ROLLOUT_HEADERS = ("ID", "PHASE", "NODES", "FAILED", "ACTION", "BY", "CREATED", "REASON")
STEP_HEADERS = ("ADDRESS", "STAGE", "DURATION", "SESSIONS", "MOVED", "FAILED", "CLOSED", "VERSION", "REASON")


def rollout_row(rollout: Mapping[str, Any]) -> tuple[str, ...]:
    """A rollout in one line."""
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
    """A node of a rollout in one line."""
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
    """What it is, and where it is, in one sentence."""
    order = rollout["order"]
    why = f": {rollout['reason']}" if rollout["reason"] else ""
    to = f" to {order['version']}" if order["version"] else ""
    return (
        f"rollout {rollout['id']} ({order['action']}{to}, {order['selector']}, by {rollout['by']})"
        f" is {rollout['phase']}{why}"
    )


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """What a rollout would do, a line each."""
    order = plan["order"]
    total, at_once, budget = len(order["nodes"]), order["max_unavailable"], order["failure_budget"]
    leftover_sessions = "stay until the action ends them" if order["on_deadline"] == "keep" else "are ended"
    back = f"back with version {order['version']}" if order["version"] else "back"
    drained, returned, healthy = (
        format_duration(order[f"{name}_seconds"])
        for name in ("drain_deadline", "return_deadline", "healthy_for")
    )
    many = f"{total} node" if total == 1 else f"{total} nodes"
    return [
        f"{many}, {at_once} at a time: {', '.join(order['nodes']) or 'none'}",
        f"1. drain it, {drained} at most; sessions that are left then {leftover_sessions}",
        f"2. run the action {order['action']}",
        f"3. wait until it is {back}, {returned} at most, and has passed its checks for {healthy}",
        "4. undrain it, and let it warm up",
        "pause at the first node that fails"
        if not budget
        else f"pause when more than {budget} nodes have failed, or at the end when fewer have",
    ]


def count_in_stages(steps: Iterable[Mapping[str, Any]], *stages: str) -> int:
    """How many nodes are in one of these stages."""
    return sum(step["stage"] in stages for step in steps)


def count_finished(steps: Iterable[Mapping[str, Any]]) -> int:
    """How many nodes have had their turn."""
    return count_in_stages(steps, *_FINISHED_STAGES)


def active_steps(rollout: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The nodes whose turn it is."""
    return [step for step in rollout["steps"] if step["stage"] not in {*_FINISHED_STAGES, "pending"}]


def _format_step_duration(step: Mapping[str, Any], now: datetime) -> str:
    if step["begun"] is None:
        return "-"
    end = now if step["ended"] is None else datetime.fromisoformat(step["ended"])
    return format_duration(max(0.0, (end - datetime.fromisoformat(step["begun"])).total_seconds()))


def _format_versions(step: Mapping[str, Any]) -> str:
    before, after = step["version_before"], step["version_after"]
    return f"{before} -> {after}" if before and after and before != after else after or before or "-"
