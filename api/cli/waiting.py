"""Waiting for a drain: progress on a terminal, a line a change elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from api.cli.client import Client, Missing, Unreachable, node_path
from api.cli.failure import Failure
from api.cli.output import count, elapsed, remark, say

_POLL = 0.5  # seconds
_PATIENCE = 60.0  # seconds that the control plane may be away, as while it is restarted

Show = Callable[[dict[str, Any]], None]


def until_drained(client: Client, node: dict[str, Any]) -> None:
    """Return when no session is left. Failure at the deadline, on Ctrl-C, or when the drain is taken back."""
    address, start = node["address"], time.monotonic()
    try:
        with _progress() as show:
            while (ending := outcome(node)) is None:
                show(node)
                time.sleep(_POLL)
                node = _ask(client, node)
    except KeyboardInterrupt:
        raise Failure(
            f"stopped waiting; the drain of {address} goes on, `tidevoy undrain {address}` takes it back"
        ) from None
    if ending:
        raise Failure(ending)
    say(f"{address} is drained after {elapsed(time.monotonic() - start)}: no session is left")


def outcome(node: dict[str, Any]) -> str | None:
    """None: wait on. Empty: drained. Else why waiting is over."""
    address, drain = node["address"], node["drain"]
    if node["state"] in ("drained", "gone") and _empty(node):
        return ""
    if drain is None:
        return None if node["state"] == "gone" else f"the drain of {address} was taken back: {node['reason']}"
    if datetime.now(UTC) < datetime.fromisoformat(drain["deadline"]):
        return None
    again = "wait again with a longer --deadline, or stop the server"
    if node["sessions"] is None:
        return f"the deadline came and no Envoy has reported whether {address} has sessions; {again}"
    return (
        f"the deadline came and {address} still has sessions ({node['sessions']}); "
        f"they go on, and no new one comes: {again}"
    )


def _empty(node: dict[str, Any]) -> bool:
    """Whether it is known to have no session; a node that Envoys had no endpoint for never had one."""
    return node["sessions"] == 0 or node["endpoint"] is None


def _ask(client: Client, node: dict[str, Any]) -> dict[str, Any]:
    """The node as it is now; one that is forgotten by now has no session left."""
    until = time.monotonic() + _PATIENCE
    told = False
    while True:
        try:
            answer: dict[str, Any] = client.get(node_path(node["address"]))
        except Missing:
            return {**node, "state": "gone", "sessions": 0}
        except Unreachable as error:
            if time.monotonic() > until:
                raise
            if not told:
                remark(f"{error}; still trying")
                told = True
            time.sleep(_POLL)
        else:
            return answer


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
        TextColumn("sessions left: {task.fields[left]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, left="-")
        most = 0

        def show(now: dict[str, Any]) -> None:
            nonlocal most
            left = now["sessions"]
            most = max(most, left or 0)
            progress.update(
                task,
                description=f"{now['address']} {now['state']}",
                total=most or None,
                completed=0 if left is None else most - left,
                left=count(left),
            )

        yield show


def _lines() -> Show:
    said = ""

    def show(now: dict[str, Any]) -> None:
        nonlocal said
        line = f"{now['address']} {now['state']}, sessions left: {count(now['sessions'])}"
        if line != said:
            remark(line)
            said = line

    return show
