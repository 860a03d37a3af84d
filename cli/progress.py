"""Waiting for a drain: progress on a terminal, a line a change elsewhere."""

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

_POLL_SECONDS = 0.5  # seconds
_OUTAGE_TIMEOUT_SECONDS = 60.0  # seconds that the control plane may be away, as while it is restarted
_CLOSE_GRACE_SECONDS = 60.0  # seconds within which sessions that are to be ended at the deadline surely are

ShowProgress = Callable[[dict[str, Any]], None]


def wait_until_drained(client: ControlPlaneClient, node: dict[str, Any], *, as_json: bool = False) -> None:
    """Return when no session is left. Failure at the deadline, on Ctrl-C, or when the drain is taken back.

    `as_json`: each change as a line of JSON on standard output.
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
            f"stopped waiting; the drain of {address} goes on, `tidevoy undrain {address}` takes it back"
        ) from None
    if result:
        raise CliError(result)
    if not as_json:
        print_result(
            f"{address} is drained after {format_duration(time.monotonic() - start)}: no session is left{_migrations_suffix(node)}"
        )


def drain_result(node: dict[str, Any]) -> str | None:
    """None: wait on. Empty: drained. Else why waiting is over."""
    address, drain = node["address"], node["drain"]
    if _is_drained(node):
        return ""
    if drain is None:
        return None if node["state"] == "gone" else f"the drain of {address} was taken back: {node['reason']}"
    closes = drain.get("on_deadline") == "close"
    deadline = datetime.fromisoformat(drain["deadline"])
    if datetime.now(UTC) < deadline + timedelta(seconds=_CLOSE_GRACE_SECONDS if closes else 0):
        return None
    advice = "wait again with a longer --deadline, or stop the server"
    if node["sessions"] is None:
        return f"the deadline came and no Envoy has reported whether {address} has sessions; {advice}"
    problem = (
        f"the deadline came and {address} still has sessions ({node['sessions']}{_not_movable_suffix(node)})"
    )
    if closes:
        return (
            f"{problem}, although they are to be ended: `tidevoy envoys` shows which Envoy is away, or has no"
            " module"
        )
    return f"{problem}; they go on, and no new one comes: {advice}, or drain with --on-deadline close"


def _is_drained(node: dict[str, Any]) -> bool:
    """Whether it is known to have no session.

    Of one that is gone Envoys are told until that is sure, whatever the count of those that have reported is.
    """
    is_sure = node["state"] == "drained" or (node["state"] == "gone" and node["advice"] is None)
    return is_sure and (node["sessions"] == 0 or node["endpoint"] is None)  # without one, it never had any


def progress_summary(node: dict[str, Any]) -> dict[str, Any]:
    """What is known of how far a drain has come: counts, and seconds that are left at the pace so far."""
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
    """The node as it is now; one that is forgotten by now has no session left."""
    try:
        answer: dict[str, Any] = retry_until_available(lambda: client.get(node_path(node["address"])))
    except NotFound:
        return {**node, "state": "gone", "sessions": 0, "advice": None}
    return answer


def retry_until_available(request: Callable[[], Any]) -> Any:
    """What `ask` answers; while the control plane is away, as when it is restarted, it is asked again."""
    deadline = time.monotonic() + _OUTAGE_TIMEOUT_SECONDS
    was_reported = False
    while True:
        try:
            return request()
        except ControlPlaneUnreachable as error:
            if time.monotonic() > deadline:
                raise
            if not was_reported:
                print_note(f"{error}; still trying")
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

        def show(now: dict[str, Any]) -> None:
            nonlocal most_sessions
            left = now["sessions"]
            most_sessions = max(most_sessions, left or 0)
            bar.update(
                task,
                description=f"{now['address']} {now['state']}",
                total=most_sessions or None,
                completed=0 if left is None else most_sessions - left,
                counts=_format_counts(progress_summary(now)) + _format_time_left(progress_summary(now)),
            )

        yield show


def _line_progress() -> ShowProgress:
    last_line = ""

    def show(now: dict[str, Any]) -> None:
        nonlocal last_line
        line = f"{now['address']} {now['state']}, {_format_counts(progress_summary(now))}"
        if line != last_line:
            print_note(line + _format_time_left(progress_summary(now)))
            last_line = line

    return show


@contextmanager
def _json_progress() -> Iterator[ShowProgress]:
    last_line: dict[str, Any] = {}

    def show(now: dict[str, Any]) -> None:
        nonlocal last_line
        line = progress_summary(now)
        if line | {"seconds_left": None} != last_line:
            print_result(json.dumps(line))
            last_line = line | {"seconds_left": None}

    yield show


def _format_counts(now: Mapping[str, Any]) -> str:
    """`sessions left: 3, moved: 97, failed: 2, not movable: 3 (cursor 1, transaction 2)`."""
    parts = [f"sessions left: {format_count(now['left'])}"]
    if now["moved"] or now["failed"]:
        parts += [f"moved: {now['moved']}", f"failed: {now['failed']}"]
    if now["not_movable"]:
        parts.append(f"not movable: {_format_by_reason(now['not_movable'])}")
    return ", ".join(parts)


def _format_time_left(now: Mapping[str, Any]) -> str:
    return (
        f", about {format_duration(now['seconds_left'])} left" if now["left"] and now["seconds_left"] else ""
    )


def _format_by_reason(counts: Mapping[str, int]) -> str:
    return f"{sum(counts.values())} ({', '.join(f'{why} {counts[why]}' for why in sorted(counts))})"


def _not_movable_suffix(node: dict[str, Any]) -> str:
    pinned = progress_summary(node)["not_movable"]
    return f", not movable: {_format_by_reason(pinned)}" if pinned else ""


def _migrations_suffix(node: dict[str, Any]) -> str:
    now = progress_summary(node)
    return f"; moved: {now['moved']}, failed: {now['failed']}" if now["moved"] or now["failed"] else ""
