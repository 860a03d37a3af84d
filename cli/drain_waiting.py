"""Wait for a drain, and show its progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from cli.client import ControlPlaneClient, NotFound, node_path
from cli.errors import CliError
from cli.output import format_count, format_duration, print_result
from cli.progress_display import ProgressDisplay

_CLOSE_GRACE_SECONDS = 60.0  # how long to wait after the deadline while sessions are closed


def wait_until_drained(client: ControlPlaneClient, node: dict[str, Any], *, as_json: bool = False) -> None:
    """Wait until no session is left.

    Raises CliError at the deadline, on Ctrl-C, or if the drain is cancelled.
    With `as_json`, each change is printed as a line of JSON on standard output.
    """
    address, start, most_sessions = node["address"], time.monotonic(), 0
    try:
        with ProgressDisplay(as_json=as_json) as display:
            while True:
                summary, sessions = progress_summary(node), node["sessions"]
                display.print_json(summary, change=summary | {"seconds_left": None})
                if (result := drain_result(node, client.server_time)) is not None:
                    break
                most_sessions = max(most_sessions, sessions or 0)
                text = f"{address} {node['state']}, {_format_counts(summary)}"
                if sessions == 0:
                    text += f" ({node['reason']})"  # it names the Envoys for which the drain waits
                display.show_state(
                    text + _format_time_left(summary),
                    change=text,
                    completed=0 if sessions is None else most_sessions - sessions,
                    total=most_sessions or None,
                )
                node = _poll_node(client, node)
    except KeyboardInterrupt:
        raise CliError(
            f"stopped waiting; the drain of {address} continues, `tidevoy undrain {address}` cancels it"
        ) from None
    if result:
        raise CliError(result)
    if not as_json:
        duration = format_duration(time.monotonic() - start)
        print_result(f"{address} is drained after {duration}: no session is left{_migrations_suffix(node)}")


def drain_result(node: dict[str, Any], now: datetime) -> str | None:
    """Return None to keep waiting, "" if the node is drained, else why the wait failed.

    `now`: the time of the control plane, which has set the deadline.
    """
    address, drain = node["address"], node["drain"]
    if _is_drained(node):
        return ""
    if drain is None:
        return None if node["state"] == "gone" else f"the drain of {address} was cancelled: {node['reason']}"
    closes = drain.get("on_deadline") == "close"
    deadline = datetime.fromisoformat(drain["deadline"])
    if now < deadline + timedelta(seconds=_CLOSE_GRACE_SECONDS if closes else 0):
        return None
    advice = "wait again with a longer --deadline, or stop the server"
    if node["sessions"] is None:
        return f"the deadline has passed and no Envoy has reported whether {address} has sessions; {advice}"
    if node["sessions"] == 0:
        return f"the deadline has passed, but {address} may still have sessions: {node['reason']}; {advice}"
    problem = (
        f"the deadline has passed and {address} still has sessions"
        f" ({node['sessions']}{_not_movable_suffix(node)})"
    )
    if closes:
        return (
            f"{problem}, although they should be closed: `tidevoy envoys` shows which Envoy is disconnected"
            " or has no module"
        )
    return f"{problem}; they stay open, and no new ones start: {advice}, or drain with --on-deadline close"


def _is_drained(node: dict[str, Any]) -> bool:
    """Return whether the node certainly has no session left.

    While a `gone` node is published to Envoys (`eds_health` is set), a reported count of 0 is not certain.
    """
    is_confirmed = node["state"] == "drained" or (node["state"] == "gone" and node["eds_health"] is None)
    # A node without an endpoint never had sessions.
    return is_confirmed and (node["sessions"] == 0 or node["endpoint"] is None)


def progress_summary(node: dict[str, Any]) -> dict[str, Any]:
    """Return a drain's progress: session counts, and the seconds left at the current rate."""
    drain_progress = node.get("drain_progress") or {}
    return {
        "address": node["address"],
        "state": node["state"],
        "left": node["sessions"],
        "migrated": drain_progress.get("migrated"),
        "failed": sum(drain_progress["failed"].values()) if drain_progress else None,
        "not_movable": drain_progress.get("not_movable"),
        "seconds_left": drain_progress.get("seconds_left"),
    }


def _poll_node(client: ControlPlaneClient, node: dict[str, Any]) -> dict[str, Any]:
    """Return the node's next state; a node that no longer exists has no session left."""
    try:
        answer: dict[str, Any] = client.poll(node_path(node["address"]))
    except NotFound:
        return {**node, "state": "gone", "sessions": 0, "eds_health": None}
    return answer


def _format_counts(summary: Mapping[str, Any]) -> str:
    """Format as `sessions left: 3, migrated: 97, failed: 2, not movable: 3 (cursor 1, transaction 2)`."""
    parts = [f"sessions left: {format_count(summary['left'])}"]
    if summary["migrated"] or summary["failed"]:
        parts += [f"migrated: {summary['migrated']}", f"failed: {summary['failed']}"]
    if summary["not_movable"]:
        parts.append(f"not movable: {_format_by_reason(summary['not_movable'])}")
    return ", ".join(parts)


def _format_time_left(summary: Mapping[str, Any]) -> str:
    seconds_left = summary["seconds_left"]
    return f", about {format_duration(seconds_left)} left" if summary["left"] and seconds_left else ""


def _format_by_reason(counts: Mapping[str, int]) -> str:
    return f"{sum(counts.values())} ({', '.join(f'{reason} {counts[reason]}' for reason in sorted(counts))})"


def _not_movable_suffix(node: dict[str, Any]) -> str:
    not_movable = progress_summary(node)["not_movable"]
    return f", not movable: {_format_by_reason(not_movable)}" if not_movable else ""


def _migrations_suffix(node: dict[str, Any]) -> str:
    summary = progress_summary(node)
    if not (summary["migrated"] or summary["failed"]):
        return ""
    return f"; migrated: {summary['migrated']}, failed: {summary['failed']}"
