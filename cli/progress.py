"""Wait for a drain: a progress bar on a terminal, one line per change elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from cli.client import ControlPlaneClient, ControlPlaneUnreachable, NotFound, node_path
from cli.errors import CliError
from cli.output import format_count, format_duration, print_note, print_result

_POLL_SECONDS = 0.5
_OUTAGE_TIMEOUT_SECONDS = 60.0  # how long the control plane may be unreachable, e.g. during its restart
_CLOSE_GRACE_SECONDS = 60.0  # time after the deadline within which all sessions to close are closed

ShowProgress = Callable[[dict[str, Any]], None]


def wait_until_drained(client: ControlPlaneClient, node: dict[str, Any], *, as_json: bool = False) -> None:
    """Return when no session is left.

    Raises CliError at the deadline, on Ctrl-C, or if the drain is cancelled.
    `as_json`: print each change as a line of JSON on standard output.
    """
    address, start = node["address"], time.monotonic()
    try:
        with _json_progress() if as_json else _terminal_progress() as show:
            while (result := drain_result(node)) is None:
                show(node)
                time.sleep(_POLL_SECONDS)
                node = _fetch_node(client, node)
            if as_json:
                show(node)
    except KeyboardInterrupt:
        raise CliError(
            f"stopped waiting; the drain of {address} continues, `tidevoy undrain {address}` cancels it"
        ) from None
    if result:
        raise CliError(result)
    if not as_json:
        print_result(
            f"{address} is drained after {format_duration(time.monotonic() - start)}: no session is"
            f" left{_migrations_suffix(node)}"
        )


def drain_result(node: dict[str, Any]) -> str | None:
    """Return None to keep waiting, "" if the node is drained, else why the wait failed."""
    address, drain = node["address"], node["drain"]
    if _is_drained(node):
        return ""
    if drain is None:
        return None if node["state"] == "gone" else f"the drain of {address} was cancelled: {node['reason']}"
    closes = drain.get("on_deadline") == "close"
    deadline = datetime.fromisoformat(drain["deadline"])
    if datetime.now(UTC) < deadline + timedelta(seconds=_CLOSE_GRACE_SECONDS if closes else 0):
        return None
    advice = "wait again with a longer --deadline, or stop the server"
    if node["sessions"] is None:
        return f"the deadline has passed and no Envoy has reported whether {address} has sessions; {advice}"
    problem = (
        f"the deadline has passed and {address} still has sessions"
        f" ({node['sessions']}{_not_movable_suffix(node)})"
    )
    if closes:
        return (
            f"{problem}, although they should be closed: `tidevoy envoys` shows which Envoy is disconnected"
            " or"
            " has no module"
        )
    return f"{problem}; they stay open, and no new ones start: {advice}, or drain with --on-deadline close"


def _is_drained(node: dict[str, Any]) -> bool:
    """Return whether the node certainly has no session.

    A `gone` node stays published to Envoys until that is certain, whatever the reported count is.
    """
    is_confirmed = node["state"] == "drained" or (node["state"] == "gone" and node["advice"] is None)
    # A node without an endpoint never had sessions.
    return is_confirmed and (node["sessions"] == 0 or node["endpoint"] is None)


def progress_summary(node: dict[str, Any]) -> dict[str, Any]:
    """Return a drain's progress: session counts, and the seconds left at the current rate."""
    drain_progress = node.get("departure") or {}
    return {
        "address": node["address"],
        "state": node["state"],
        "left": node["sessions"],
        "moved": drain_progress.get("moved"),
        "failed": sum(drain_progress["failed"].values()) if drain_progress else None,
        "not_movable": drain_progress.get("not_movable"),
        "seconds_left": drain_progress.get("seconds_left"),
    }


def _fetch_node(client: ControlPlaneClient, node: dict[str, Any]) -> dict[str, Any]:
    """Return the node's current state; a node that no longer exists has no session left."""
    try:
        answer: dict[str, Any] = retry_until_available(lambda: client.get(node_path(node["address"])))
    except NotFound:
        return {**node, "state": "gone", "sessions": 0, "advice": None}
    return answer


def retry_until_available(request: Callable[[], Any]) -> Any:
    """Return what `request` returns; retry while the control plane is unreachable, as during a restart."""
    deadline = time.monotonic() + _OUTAGE_TIMEOUT_SECONDS
    was_reported = False
    while True:
        try:
            return request()
        except ControlPlaneUnreachable as error:
            if time.monotonic() > deadline:
                raise
            if not was_reported:
                print_note(f"{error}; retrying")
                was_reported = True
            time.sleep(_POLL_SECONDS)


@contextmanager
def _terminal_progress() -> Iterator[ShowProgress]:
    if not sys.stderr.isatty():
        yield _line_progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, counts="-")
        most_sessions = 0

        def show(node: dict[str, Any]) -> None:
            nonlocal most_sessions
            sessions, summary = node["sessions"], progress_summary(node)
            most_sessions = max(most_sessions, sessions or 0)
            bar.update(
                task,
                description=f"{node['address']} {node['state']}",
                total=most_sessions or None,
                completed=0 if sessions is None else most_sessions - sessions,
                counts=_format_counts(summary) + _format_time_left(summary),
            )

        yield show


def _line_progress() -> ShowProgress:
    last_line = ""

    def show(node: dict[str, Any]) -> None:
        nonlocal last_line
        summary = progress_summary(node)
        line = f"{node['address']} {node['state']}, {_format_counts(summary)}"
        if line != last_line:
            print_note(line + _format_time_left(summary))
            last_line = line

    return show


@contextmanager
def _json_progress() -> Iterator[ShowProgress]:
    last_line: dict[str, Any] = {}

    def show(node: dict[str, Any]) -> None:
        nonlocal last_line
        line = progress_summary(node)
        if line | {"seconds_left": None} != last_line:
            print_result(json.dumps(line))
            last_line = line | {"seconds_left": None}

    yield show


def _format_counts(summary: Mapping[str, Any]) -> str:
    """Format as `sessions left: 3, migrated: 97, failed: 2, not movable: 3 (cursor 1, transaction 2)`."""
    parts = [f"sessions left: {format_count(summary['left'])}"]
    if summary["moved"] or summary["failed"]:
        parts += [f"migrated: {summary['moved']}", f"failed: {summary['failed']}"]
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
    if not (summary["moved"] or summary["failed"]):
        return ""
    return f"; migrated: {summary['moved']}, failed: {summary['failed']}"
