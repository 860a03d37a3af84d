"""The `replicas` command: the control planes that share one state."""

from __future__ import annotations

from typing import Any

import typer

from cli.client import ControlPlaneClient
from cli.options import DEFAULT_URL, AsJson, Url
from cli.output import format_time, print_note, show_json, show_table

app = typer.Typer()


@app.command()
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
        if replica["unreachable"] and not replica["is_self"]:
            print_note(f"{replica['name']} {replica['unreachable']}")


def _replica_row(replica: dict[str, Any]) -> tuple[str, ...]:
    role = f"leader since {format_time(replica['leader_since'])}" if replica["is_leader"] else "follower"
    name = f"{replica['name']} (this one)" if replica["is_self"] else replica["name"]
    return (name, replica["address"], replica["version"], format_time(replica["since"]), role)
