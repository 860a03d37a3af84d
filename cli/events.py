"""The `events` command."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from cli.client import ControlPlaneClient, ControlPlaneUnreachable
from cli.options import DEFAULT_URL, Url
from cli.output import format_time, print_note, print_result, sanitize

app = typer.Typer()

_RETRY_SECONDS = 1.0


@app.command("events")
def show_events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show new events as they happen, until Ctrl-C.")
    ] = False,
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Show recent events."""
    with ControlPlaneClient(url) as client:
        if not follow:
            for event in client.events(after=0, follow=False):
                _print_event(event, as_json)
            return
        try:
            _follow(client, as_json)
        except KeyboardInterrupt:
            return


def _follow(client: ControlPlaneClient, as_json: bool) -> None:
    last_id, has_connected, is_disconnected = 0, False, False
    while True:
        try:
            for event in client.events(after=last_id, follow=True):
                last_id, has_connected, is_disconnected = event["id"], True, False
                _print_event(event, as_json)
            has_connected = True
        except ControlPlaneUnreachable as error:
            if not has_connected:
                raise
            if not is_disconnected:
                print_note(f"{error}; retrying")
            is_disconnected = True
        time.sleep(_RETRY_SECONDS)


def _print_event(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_result(json.dumps(event, ensure_ascii=False))
    else:
        line = f"{format_time(event['at'])}  {event['kind']:<18}  {event['subject']}  {event['message']}"
        print_result(sanitize(line))
