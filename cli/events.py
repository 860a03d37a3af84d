"""The command on events: events."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from cli.client import Client, Unreachable
from cli.options import DEFAULT_URL, Url
from cli.output import local_time, printable, remark, say

_RETRY = 1.0  # seconds


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("events")(show_events)


def show_events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as events happen, until Ctrl-C.")
    ] = False,
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Show what happened lately."""
    with Client(url) as client:
        if not follow:
            for event in client.events(after=0, follow=False):
                _show(event, as_json)
            return
        try:
            _follow(client, as_json)
        except KeyboardInterrupt:
            return


def _follow(client: Client, as_json: bool) -> None:
    last, met, away = 0, False, False
    while True:
        try:
            for event in client.events(after=last, follow=True):
                last, met, away = event["id"], True, False
                _show(event, as_json)
            met = True
        except Unreachable as error:
            if not met:
                raise
            if not away:
                remark(f"{error}; still trying")
            away = True
        time.sleep(_RETRY)


def _show(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        say(json.dumps(event, ensure_ascii=False))
    else:
        line = f"{local_time(event['at'])}  {event['kind']:<18}  {event['subject']}  {event['message']}"
        say(printable(line))
