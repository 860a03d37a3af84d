"""Configuration commands: config check, config show, reload."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.client import ControlPlaneClient
from cli.errors import EXIT_USAGE
from cli.options import DEFAULT_URL, AsJson, Url
from cli.output import print_note, print_result, show_json
from controlplane.errors import ConfigError, ConfigErrors

app = typer.Typer(help="Check a configuration, or show the active one.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Configuration file (YAML).", show_default=False)
    ],
    as_json: AsJson = False,
    diff: Annotated[
        bool,
        typer.Option(
            "--diff",
            help="Also list the settings that a reload of the running control plane (--url) would change,"
            " grouped by when they take effect.",
        ),
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Check a configuration file together with the environment. Starts nothing."""
    from controlplane.config.loader import preview_reload, read_settings, startup_warnings

    try:
        settings = read_settings(file, os.environ)
    except ConfigError as error:
        if not as_json:
            raise
        errors = error.errors if isinstance(error, ConfigErrors) else (error,)
        show_json([_error_as_json(setting_error) for setting_error in errors])
        raise typer.Exit(EXIT_USAGE) from None
    if diff:
        with ControlPlaneClient(url) as client:
            changes = asdict(preview_reload(client.get("/v1/config"), settings))
    if as_json:
        show_json(changes if diff else [])
        return
    print_result(f"{file} is valid")
    for warning in startup_warnings(settings):
        print_note(warning)
    if diff:
        print_result(
            "\n".join(["a reload would change:", *(f"  {line}" for line in describe_reload(changes))])
        )


def _error_as_json(error: ConfigError) -> dict[str, str]:
    return {"where": error.where, "key": error.key, "problem": error.problem, "remedy": error.remedy}


@app.command()
def show(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the active settings, with secrets masked."""
    with ControlPlaneClient(url) as client:
        settings = client.get("/v1/config")
    if as_json:
        show_json(settings)
        return
    import yaml

    print_result(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip())


def reload(url: Url = DEFAULT_URL) -> None:
    """Reload the control plane's configuration."""
    with ControlPlaneClient(url) as client:
        answer = client.post("/v1/config/reload")
    for line in describe_reload(answer):
        print_result(line)


def describe_reload(answer: dict[str, Any]) -> list[str]:
    """Return what a reload changed, one line for each kind of change."""
    categories = (
        ("applied", "applied now"),
        (
            "applied_by_module",
            "applied now; an Envoy without the module applies it after that Envoy restarts",
        ),
        ("needs_new_envoys", "applies to each Envoy after that Envoy restarts"),
        ("needs_restart", "needs a restart of the control plane"),
    )
    lines = [f"{meaning}: {', '.join(answer[key])}" for key, meaning in categories if answer[key]]
    return lines or ["nothing has changed"]
