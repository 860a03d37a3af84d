"""Waiting for a drain: progress on a terminal, a line a change elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from cli.client import Client, Missing, Unreachable, node_path
from cli.errors import Failure
from cli.output import count, elapsed, remark, say

_POLL = 0.5  # seconds
_PATIENCE = 60.0  # seconds that the control plane may be away, as while it is restarted
_ENDING = 60.0  # seconds within which sessions that are to be ended at the deadline surely are

Show = Callable[[dict[str, Any]], None]


def until_drained(client: Client, node: dict[str, Any], *, as_json: bool = False) -> None:
    """Return when no session is left. Failure at the deadline, on Ctrl-C, or when the drain is taken back.

    `as_json`: each change as a line of JSON on standard output.
    """
    address, start = node["address"], time.monotonic()
    try:
        with _json_lines() if as_json else _progress() as show:
            while (ending := outcome(node)) is None:
                show(node)
                time.sleep(_POLL)
                node = _ask(client, node)
            if as_json:
                show(node)
    except KeyboardInterrupt:
        raise Failure(
            f"stopped waiting; the drain of {address} goes on, `tidevoy undrain {address}` takes it back"
        ) from None
    if ending:
        raise Failure(ending)
    if not as_json:
        say(f"{address} is drained after {elapsed(time.monotonic() - start)}: no session is left{_sum(node)}")


def outcome(node: dict[str, Any]) -> str | None:
    """None: wait on. Empty: drained. Else why waiting is over."""
    address, drain = node["address"], node["drain"]
    if _is_drained(node):
        return ""
    if drain is None:
        return None if node["state"] == "gone" else f"the drain of {address} was taken back: {node['reason']}"
    closes = drain.get("on_deadline") == "close"
    deadline = datetime.fromisoformat(drain["deadline"])
    if datetime.now(UTC) < deadline + timedelta(seconds=_ENDING if closes else 0):
        return None
    again = "wait again with a longer --deadline, or stop the server"
    if node["sessions"] is None:
        return f"the deadline came and no Envoy has reported whether {address} has sessions; {again}"
    still = f"the deadline came and {address} still has sessions ({node['sessions']}{_why(node)})"
    if closes:
        return (
            f"{still}, although they are to be ended: `tidevoy envoys` shows which Envoy is away, or has no"
            " module"
        )
    return f"{still}; they go on, and no new one comes: {again}, or drain with --on-deadline close"


def _is_drained(node: dict[str, Any]) -> bool:
    """Whether it is known to have no session.

    Of one that is gone Envoys are told until that is sure, whatever the count of those that have reported is.
    """
    is_sure = node["state"] == "drained" or (node["state"] == "gone" and node["advice"] is None)
    return is_sure and (node["sessions"] == 0 or node["endpoint"] is None)  # without one, it never had any


def progress(node: dict[str, Any]) -> dict[str, Any]:
    """What is known of how far a drain has come: counts, and seconds that are left at the pace so far."""
    departure = node.get("departure") or {}
    return {
        "address": node["address"],
        "state": node["state"],
        "left": node["sessions"],
        "moved": departure.get("moved"),
        "failed": sum(departure["failed"].values()) if departure else None,
        "not_movable": departure.get("not_movable"),
        "seconds_left": departure.get("seconds_left"),
    }


def _ask(client: Client, node: dict[str, Any]) -> dict[str, Any]:
    """The node as it is now; one that is forgotten by now has no session left."""
    try:
        answer: dict[str, Any] = patiently(lambda: client.get(node_path(node["address"])))
    except Missing:
        return {**node, "state": "gone", "sessions": 0, "advice": None}
    return answer


def patiently(ask: Callable[[], Any]) -> Any:
    """What `ask` answers; while the control plane is away, as when it is restarted, it is asked again."""
    until = time.monotonic() + _PATIENCE
    told = False
    while True:
        try:
            return ask()
        except Unreachable as error:
            if time.monotonic() > until:
                raise
            if not told:
                remark(f"{error}; still trying")
                told = True
            time.sleep(_POLL)


@contextmanager
def _progress() -> Iterator[Show]:
    if not sys.stderr.isatty():
        yield _lines()
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
        most = 0

        def show(now: dict[str, Any]) -> None:
            nonlocal most
            left = now["sessions"]
            most = max(most, left or 0)
            bar.update(
                task,
                description=f"{now['address']} {now['state']}",
                total=most or None,
                completed=0 if left is None else most - left,
                counts=_counts(progress(now)) + _time(progress(now)),
            )

        yield show


def _lines() -> Show:
    said = ""

    def show(now: dict[str, Any]) -> None:
        nonlocal said
        line = f"{now['address']} {now['state']}, {_counts(progress(now))}"
        if line != said:
            remark(line + _time(progress(now)))
            said = line

    return show


@contextmanager
def _json_lines() -> Iterator[Show]:
    said: dict[str, Any] = {}

    def show(now: dict[str, Any]) -> None:
        nonlocal said
        line = progress(now)
        if line | {"seconds_left": None} != said:
            say(json.dumps(line))
            said = line | {"seconds_left": None}

    yield show


def _counts(now: Mapping[str, Any]) -> str:
    """`sessions left: 3, moved: 97, failed: 2, not movable: 3 (cursor 1, transaction 2)`."""
    parts = [f"sessions left: {count(now['left'])}"]
    if now["moved"] or now["failed"]:
        parts += [f"moved: {now['moved']}", f"failed: {now['failed']}"]
    if now["not_movable"]:
        parts.append(f"not movable: {_by_reason(now['not_movable'])}")
    return ", ".join(parts)


def _time(now: Mapping[str, Any]) -> str:
    return f", about {elapsed(now['seconds_left'])} left" if now["left"] and now["seconds_left"] else ""


def _by_reason(counts: Mapping[str, int]) -> str:
    return f"{sum(counts.values())} ({', '.join(f'{why} {counts[why]}' for why in sorted(counts))})"


def _why(node: dict[str, Any]) -> str:
    pinned = progress(node)["not_movable"]
    return f", not movable: {_by_reason(pinned)}" if pinned else ""


def _sum(node: dict[str, Any]) -> str:
    now = progress(node)
    return f"; moved: {now['moved']}, failed: {now['failed']}" if now["moved"] or now["failed"] else ""
