"""The command `tidevoy traffic replay`: runs captured statements on a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.options import AsJson
from cli.output import format_time, print_result, show_table
from cli.replay_program import run_replay_program
from controlplane.verification.texts import format_microseconds

_DIRECTORIES = typer.Argument(
    metavar="DIR...",
    help="Captures of Tidevoy or TiProxy, or directories with captures.",
    show_default=False,
)
_Text = str | None
_File = Path | None


def replay(
    directories: Annotated[list[Path] | None, _DIRECTORIES] = None,
    target: Annotated[_Text, typer.Option(metavar="HOST:PORT", help="The server.")] = None,
    output: Annotated[_File, typer.Option(metavar="DIR", help="Directory for the results.")] = None,
    user: Annotated[_Text, typer.Option(help="User of all sessions on the server.")] = None,
    password_file: Annotated[
        _File, typer.Option(metavar="FILE", help="File with the user's password; default: no password.")
    ] = None,
    ca_file: Annotated[
        _File, typer.Option(metavar="FILE", help="Use TLS; these CAs (PEM) verify the server.")
    ] = None,
    tls_insecure: Annotated[
        bool, typer.Option("--tls-insecure", help="Use TLS, and accept any certificate.")
    ] = False,
    speed: Annotated[
        float | None, typer.Option(help="How many times as fast as captured; default: 1.")
    ] = None,
    unbounded: Annotated[
        bool, typer.Option("--unbounded", help="As fast as possible; only sessions keep their order.")
    ] = False,
    reads_only: Annotated[
        bool, typer.Option("--reads-only", help="Leave out all statements that may write.")
    ] = False,
    users: Annotated[_Text, typer.Option(metavar="NAME,...", help="Only sessions of these users.")] = None,
    databases: Annotated[
        _Text, typer.Option(metavar="NAME,...", help="Only statements in these databases.")
    ] = None,
    from_time: Annotated[
        _Text, typer.Option("--from", metavar="TIME", help="Only from this time on: 2026-11-27T22:00:00Z.")
    ] = None,
    to_time: Annotated[_Text, typer.Option("--to", metavar="TIME", help="Only before this time.")] = None,
    warm_up: Annotated[
        _Text,
        typer.Option(
            metavar="N|SECONDSs",
            help="Do not record the results of the first N records, or of the first seconds (10s).",
        ),
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(help="Highest number of connections at the same time; default: 5000.")
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(help="With --reads-only: highest number of statements that run at the same time."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a statement's connection is closed; default: 300."),
    ] = None,
    slow_log: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A slow log of TiDB instead of a capture; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be replayed, without connecting.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the replay of the same --output that has ended early.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay captured statements on a server. Exit code 0: all were replayed, whatever their results."""
    values: Mapping[str, object] = {
        "--target": target,
        "--output": output,
        "--user": user,
        "--password-file": password_file,
        "--ca-file": ca_file,
        "--speed": speed,
        "--users": users,
        "--databases": databases,
        "--from": from_time,
        "--to": to_time,
        "--warm-up": warm_up,
        "--max-connections": max_connections,
        "--max-running": max_running,
        "--timeout": timeout,
    }
    flags = {
        "--tls-insecure": tls_insecure,
        "--unbounded": unbounded,
        "--reads-only": reads_only,
        "--dry-run": dry_run,
        "--resume": resume,
    }
    arguments = ["run", "--json"]
    # With `=`, a value may begin with a hyphen.
    arguments += [f"{name}={value}" for name, value in values.items() if value is not None]
    arguments += [f"--slow-log={file}" for file in slow_log or ()]
    arguments += [name for name, is_set in flags.items() if is_set]
    code, summary = run_replay_program([*arguments, "--", *map(str, directories or ())])
    if summary and as_json:
        print_result(summary.rstrip("\n"))
    elif summary:
        show_table(("TOTAL", "VALUE"), summary_rows(json.loads(summary)))
    if code:
        raise typer.Exit(code)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the numbers of a replay, or of a dry run, as rows."""
    rows: list[tuple[str, str]] = []
    for name, value in summary.get("totals", summary).items():
        if isinstance(value, Mapping):
            rows += [(_label(f"{name} {key}"), str(count)) for key, count in value.items()]
        elif value is not None:
            rows.append(_summary_row(name, value))
    return rows


def _summary_row(name: str, value: float) -> tuple[str, str]:
    if name.endswith("_ns"):
        time = datetime.fromtimestamp(value / 1e9, UTC)
        return _label(name.removesuffix("_ns")), format_time(time.isoformat())
    if name.endswith("_us"):
        return _label(name.removesuffix("_us")), format_microseconds(value)
    return _label(name), f"{value:.1f}" if isinstance(value, float) else str(value)


def _label(name: str) -> str:
    return name.replace("_", " ")
