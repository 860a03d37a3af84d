"""Session commands: sessions, kill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cli.client import ControlPlaneClient
from cli.options import DEFAULT_URL, AsJson, Url
from cli.output import format_time, print_note, print_result, sanitize, show_json, show_table
from cli.statement_tables import DIGEST_DIGITS, format_seconds

app = typer.Typer()

_HEADERS = (
    *("ID", "NODE ID", "USER", "CLIENT", "ENVOY", "NODE", "DATABASE", "STATE", "TIME", "MOVES", "SINCE"),
    "STATEMENT",
)
EnvoyOption = Annotated[str | None, typer.Option(metavar="ID", help="Only sessions through this Envoy.")]


@app.command()
def sessions(
    user: Annotated[str | None, typer.Option(help="Only sessions of this user.")] = None,
    node: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Only sessions on this node.")] = None,
    envoy: EnvoyOption = None,
    client: Annotated[
        str | None, typer.Option(metavar="IP[:PORT]", help="Only sessions from this address.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The highest number of sessions.")] = 100,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show the live sessions of all Envoys, those first that have been busy longest."""
    with ControlPlaneClient(url) as control_plane:
        answer = control_plane.get(
            "/v1/sessions", user=user, node=node, envoy=envoy, client=client, limit=limit
        )
    if as_json:
        show_json(answer)
        return
    show_table(_HEADERS, [_row(session) for session in answer["sessions"]])
    if (shown := len(answer["sessions"])) < answer["total"]:
        print_note(f"{shown} of {answer['total']} sessions are shown; see --limit")
    for problem in answer["incomplete"]:
        print_note(f"sessions may be missing: {problem}")


@app.command()
def kill(
    id: Annotated[int, typer.Argument(metavar="ID", min=1, max=2**64 - 1, help="Id of the session.")],
    envoy: EnvoyOption = None,
    url: Url = DEFAULT_URL,
) -> None:
    """End the session with this id, from its client's handshake or from its node's process list."""
    with ControlPlaneClient(url) as control_plane:
        session = control_plane.delete(f"/v1/sessions/{id}", envoy=envoy or None)
    print_result(
        sanitize(
            f"ended session {session['id']} of {session['user'] or 'a client that logs in'} from"
            f" {session['client']} through {session['envoy']} on {session['node'] or 'no node'}"
        )
    )


def _row(session: Mapping[str, Any]) -> tuple[str, ...]:
    digest = (session["digest"] or "")[:DIGEST_DIGITS]
    return (
        *(
            str(session[key] or "-")
            for key in ("id", "node_id", "user", "client", "envoy", "node", "database")
        ),
        session["state"],
        format_seconds(session["seconds"]),
        str(session["moves"]),
        format_time(session["since"]) if session["since"] else "-",
        " ".join(f"{digest} {session['text'] or ''}".split()) or "-",
    )
