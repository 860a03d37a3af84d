"""Envoy commands: envoys, envoys replace, envoys forget."""

from __future__ import annotations

import os
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.client import ControlPlaneClient
from cli.options import DEFAULT_URL, AsJson, Url
from cli.output import format_count, format_time, print_note, print_result, sanitize, show_json, show_table
from cli.replace_envoy import replace_envoy


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    envoys = typer.Typer(help="Show the Envoys, or replace one.", invoke_without_command=True)
    envoys.callback()(show_envoys)
    envoys.command("replace")(replace_envoy)
    envoys.command("forget")(forget_envoy)
    app.add_typer(envoys, name="envoys")


def show_envoys(context: typer.Context, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the Envoys, and whether each is up to date."""
    if context.invoked_subcommand is not None:
        os.environ["TIDEVOY_URL"] = url  # the default of the subcommand's --url
        return
    with ControlPlaneClient(url) as client:
        answer = client.get("/v1/envoys")
    if as_json:
        show_json(answer)
        return
    show_table(
        ("ID", "ADDRESS", "VERSION", "FILTER", "SESSIONS", "CONNECTED SINCE", "STATE"),
        [_envoy_row(envoy) for envoy in answer["envoys"]],
    )
    for envoy in answer["envoys"]:
        if nack := envoy["last_nack"]:
            print_note(
                f"{envoy['id']} rejected {nack['type_url']} at {format_time(nack['at'])}: {nack['message']}"
            )
        if rejection := envoy["refusal"]:
            at, extension = format_time(rejection["at"]), rejection["extension"]
            print_note(
                f"{envoy['id']}: its module rejected the configuration of `{extension}` at {at}:"
                f" {rejection['text']}"
            )
        if envoy["problem"]:
            print_note(f"{envoy['id']}: {envoy['problem']}")
        if envoy["outdated"]:
            outdated = ", ".join(envoy["outdated"])
            print_note(
                f"{envoy['id']} uses older settings until that Envoy restarts: {outdated};"
                " `tidevoy envoys replace` on its machine applies them without cutting a session"
            )


def forget_envoy(
    envoy: Annotated[str, typer.Argument(metavar="ID", help="Id of the Envoy.", show_default=False)],
    url: Url = DEFAULT_URL,
) -> None:
    """Remove an Envoy that has stopped for good, so that no drain waits for its sessions."""
    with ControlPlaneClient(url) as client:
        client.delete(f"/v1/envoys/{quote(envoy, safe='')}")
    print_result(sanitize(f"{envoy} is removed"))


def _envoy_row(envoy: dict[str, Any]) -> tuple[str, ...]:
    return (
        envoy["id"],
        envoy["address"],
        envoy["version"],
        envoy["filter"],
        format_count(envoy["sessions"]),
        format_time(envoy["connected_since"]),
        describe_state(envoy),
    )


def describe_state(envoy: dict[str, Any]) -> str:
    """Return whether an Envoy is connected and runs the published version, as text."""
    if envoy["connected_since"] is None:
        return f"disconnected since {format_time(envoy['last_seen'])}"
    if not envoy["published_version"]:
        return "waiting for the first plan"
    if envoy["acked_version"] == envoy["published_version"]:
        return f"up to date ({envoy['acked_version']})"
    return f"at {envoy['acked_version'] or 'nothing'}, published {envoy['published_version']}"
