"""The commands `tidevoy traffic capture ...`: start, stop and show captures of the traffic of clients."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.client import ControlPlaneClient
from cli.options import DEFAULT_URL, AsJson, Url, duration_option
from cli.output import format_count, format_time, print_note, print_result, sanitize, show_json, show_table

app = typer.Typer(no_args_is_help=True)

_PATH = "/v1/traffic/capture"
_COUNTS = ("records", "dropped", "filtered", "bytes", "write_errors")


@app.callback()
def _capture_group() -> None:
    """Start, stop and show captures of the traffic of clients."""


@app.command()
def start(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Name of its directory; default: the time.", show_default=False
        ),
    ] = None,
    duration: Annotated[float, duration_option("It ends after this time.", 1, name="--for")] = "1h",  # type: ignore[assignment]
    envoys: Annotated[
        list[str] | None, typer.Option("--envoy", metavar="ID", help="Only this Envoy; may be repeated.")
    ] = None,
    users: Annotated[
        list[str] | None,
        typer.Option("--user", metavar="NAME", help="Only sessions of this user; may be repeated."),
    ] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="NAME", help="Only sessions of this group; may be repeated."),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Start a capture. Envoys write the statements of clients, with their values, to files."""
    names = {"envoys": envoys, "users": users, "groups": groups}
    body = {
        **({"name": name} if name is not None else {}),
        "duration_seconds": duration,
        **{field: values for field, values in names.items() if values},
    }
    with ControlPlaneClient(url) as client:
        _show_capture(client.post(_PATH, body), as_json=as_json)


@app.command()
def stop(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Stop the running capture. Its files stay."""
    with ControlPlaneClient(url) as client:
        _show_capture(client.delete(_PATH), as_json=as_json)


@app.command()
def status(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the running or last capture, and what each Envoy has written."""
    with ControlPlaneClient(url) as client:
        _show_capture(client.get(_PATH), as_json=as_json)


def _show_capture(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json(answer)
        return
    capture = answer["capture"]
    if capture is None:
        print_note("there was no capture; `tidevoy traffic capture start` starts one")
        return
    is_running = answer["state"] == "running"
    end = f"until {format_time(capture['until'] if is_running else answer['ended_at'])}"
    print_result(f"{capture['name']} {answer['state']}: from {format_time(capture['started_at'])} {end}")
    for field in ("users", "groups"):
        print_result(sanitize(f"{field:9}  {', '.join(capture[field]) or 'all'}"))
    if answer["directory"] is not None:
        print_result(sanitize(f"directory  {answer['directory']}"))
    show_table(
        ("ENVOY", "STATE", *(field.replace("_", " ").upper() for field in _COUNTS)),
        [
            (row["envoy"], _state(row), *(format_count(row[field]) for field in _COUNTS))
            for row in answer["envoys"]
        ],
    )
    for row in answer["envoys"]:
        if row["problem"] is not None:
            print_note(f"{row['envoy']} does not capture: {row['problem']}")
        if row["dropped"]:
            print_note(f"{row['envoy']}: {row['dropped']} records are missing in its files")


def _state(row: dict[str, Any]) -> str:
    if row["active"]:
        return "active"
    return "not reported" if row["records"] is None else "ended"
