"""The `limits` command: the limits of client connections, and what is used of them."""

from __future__ import annotations

from typing import Any

import typer

from cli.client import ControlPlaneClient
from cli.options import DEFAULT_URL, AsJson, Url
from cli.output import format_count, print_note, show_json, show_table

app = typer.Typer()


@app.command()
def limits(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the limits of client connections, and what each Envoy uses of them."""
    with ControlPlaneClient(url) as client:
        answer = client.get("/v1/limits")
    if as_json:
        show_json(answer)
        return
    show_table(
        ("RULE", "USER", "NETWORK", "CONNECTIONS", "LIMIT", "NEW PER SECOND", "REFUSED", "ENVOYS"),
        [_limit_row(limit) for limit in answer["limits"]],
    )
    if not answer["limits"]:
        print_note("the section `limits` of the configuration sets no limit")


def _limit_row(limit: dict[str, Any]) -> tuple[str, ...]:
    rate = limit["max_new_connections_per_second"]
    return (
        limit["name"],
        limit["user"] or "all",
        limit["network"] or "all",
        format_count(limit["connections"]),
        format_count(limit["max_connections"] or None),
        f"{rate:g}" if rate else "-",
        format_count(limit["refused"]),
        ", ".join(_describe_envoy(envoy) for envoy in limit["envoys"]),
    )


def _describe_envoy(envoy: dict[str, Any]) -> str:
    quota = "" if envoy["quota"] is None else f"/{format_count(envoy['quota'])}"
    return f"{envoy['envoy']} {format_count(envoy['connections'])}{quota}"
