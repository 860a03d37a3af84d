"""The `replicas` command: the control planes that share one state."""

from __future__ import annotations

from typing import Any

import typer

from cli.client import ControlPlaneClient
from cli.options import DEFAULT_URL, AsJson, Url
from cli.output import format_time, print_note, show_json, show_table


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("replicas")(replicas)


def replicas(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the control planes that share one state, and which of them leads."""
    with ControlPlaneClient(url) as client:
        answer = client.get("/v1/replicas")
    if as_json:
        show_json(answer)
        return
    show_table(
        ("NAME", "ADDRESS", "VERSION", "STARTED", "ROLE"),
        [_replica_row(replica) for replica in answer["replicas"]],
    )
    if not answer["replicas"]:
        print_note("replicas.enabled is false on that control plane, so it shares no state with others")
    for replica in answer["replicas"]:
        if replica["unheard"] and not replica["is_us"]:
            print_note(f"{replica['name']} {replica['unheard']}")


def _replica_row(replica: dict[str, Any]) -> tuple[str, ...]:
    role = f"leader since {format_time(replica['led_since'])}" if replica["leads"] else "follower"
    name = f"{replica['name']} (this one)" if replica["is_us"] else replica["name"]
    return (name, replica["address"], replica["version"], format_time(replica["since"]), role)
