"""The `top` command: the statements that take the most time."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cli.client import ControlPlaneClient, ControlPlaneUnreachable
from cli.errors import CliError
from cli.options import DEFAULT_URL, AsJson, Url, parse_duration
from cli.output import build_table, print_note, print_result, sanitize, show_json, show_table
from cli.statement_tables import (
    GROUP_HEADERS,
    HEADERS,
    LATENCY_HEADERS,
    MAX_TEXT_CHARS,
    describe_period,
    group_row,
    latency_rows,
    statement_rows,
)
from controlplane.model.statements import SortKey

app = typer.Typer()

_WINDOW_OPTION = typer.Option(
    parser=parse_duration,
    metavar="DURATION",
    help="The period until now: 30, 5m; default 1m, at most 1h.",
    show_default=False,
)

_PATH = "/v1/statements"
_REFRESH_SECONDS = 2.0
_DEFAULT_WINDOW_SECONDS = 60
_OFF = (
    "no statistics of statements are collected; to turn them on, set `statements.digests: on` in the"
    " configuration of all control planes, and run `tidevoy reload`"
)


@app.command()
def top(
    sort: Annotated[SortKey, typer.Option(help="What comes first.")] = "time",
    window: Annotated[float | None, _WINDOW_OPTION] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The highest number of statements.")] = 20,
    user: Annotated[str | None, typer.Option(help="Only executions of this user.")] = None,
    node: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Only executions on this node.")] = None,
    digest: Annotated[
        str | None,
        typer.Option(help="Show one statement, by user, by node and by latency; the first digits suffice."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show the statements once, without refreshing.")
    ] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show the statements that take the most time.

    On a terminal, the table refreshes every two seconds until Ctrl-C.
    """
    seconds = _DEFAULT_WINDOW_SECONDS if window is None else max(1, int(window))
    query = {"window": seconds, "sort": sort, "limit": limit, "user": user, "node": node}
    with ControlPlaneClient(url) as client:
        if digest is not None:
            _show_one(client, query | {"digest": digest.lower()}, as_json=as_json)
        elif as_json:
            show_json(client.get(_PATH, **query))
        elif once or not sys.stdout.isatty():
            _show_list(client.get(_PATH, **query))
        else:
            _follow(client, query)


def _show_list(answer: Mapping[str, Any]) -> None:
    if answer["digests"] == "off":
        print_note(_OFF)
        return
    show_table(HEADERS, statement_rows(answer))
    _print_notes(answer)


def _print_notes(answer: Mapping[str, Any]) -> None:
    print_note(describe_period(answer))
    for problem in answer["incomplete"]:
        print_note(problem)


def _follow(client: ControlPlaneClient, query: Mapping[str, Any]) -> None:
    """Refresh the table on the terminal until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    answer, problem = client.get(_PATH, **query), ""
    console = Console(highlight=False, markup=False, emoji=False)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_screen(answer, problem, console.height), refresh=True)
                time.sleep(_REFRESH_SECONDS)
                try:
                    answer, problem = client.get(_PATH, **query), ""
                except ControlPlaneUnreachable as error:
                    problem = f"{error}; retrying"
    except KeyboardInterrupt:
        return


def _screen(answer: Mapping[str, Any], problem: str, height: int) -> Any:
    """Return what a terminal of this height shows: notes, and as many rows as fit."""
    from rich.console import Group
    from rich.text import Text

    notes = [_OFF] if answer["digests"] == "off" else [describe_period(answer), *answer["incomplete"]]
    if problem:
        notes.insert(0, problem)
    lines = [
        Text(sanitize(note), style="yellow" if index or problem else "") for index, note in enumerate(notes)
    ]
    rows = statement_rows(answer)[: max(1, height - len(lines) - 2)]
    return Group(*lines, build_table(HEADERS, rows, wraps_last=False))


def _show_one(client: ControlPlaneClient, query: Mapping[str, Any], *, as_json: bool) -> None:
    """Show one statement. Raises CliError if no statement or several ones match."""
    answer = client.get(_PATH, **query)
    parts = {by: client.get(_PATH, **query, by=by) for by in ("user", "node")}
    if as_json:
        show_json({**answer, **{f"by_{by}": part["statements"] for by, part in parts.items()}})
        return
    if answer["digests"] == "off":
        print_note(_OFF)
        return
    if not answer["statements"]:
        raise CliError(
            f"in the last {answer['window_seconds']:.0f} s, no statement ran whose digest begins with"
            f" {query['digest']}; choose a longer --window, or see `tidevoy top --once`"
        )
    if answer["total"] > 1:
        raise CliError(f"{answer['total']} digests begin with {query['digest']}; write more digits")
    (statement,) = answer["statements"]
    print_result(f"digest: {statement['digest']}")
    print_result(f"statement: {sanitize(statement['text'] or 'not known')[:MAX_TEXT_CHARS]}\n")
    for by, part in parts.items():
        show_table((by.upper(), *GROUP_HEADERS), [group_row(entry, by) for entry in part["statements"]])
        print_result("")
    show_table(LATENCY_HEADERS, latency_rows(statement["latency"]))
    _print_notes(answer)
