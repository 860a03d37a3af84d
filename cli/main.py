"""The `tidevoy` command: one file per subject, plus commands that other packages add by entry point."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cli import (
    certificates,
    config,
    envoys,
    events,
    imports,
    limits,
    nodes,
    replicas,
    rollouts,
    rules,
    serve,
    sessions,
    tokens,
    top,
    traffic,
)
from cli.client import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from cli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, CliError
from controlplane.errors import ConfigError, TidevoyError

_ENTRY_POINT_GROUP = "tidevoy.commands"


class _CommandGroup(TyperGroup):
    """Adds commands of other packages. Imports a command only if it is called or all are listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [
            *super().list_commands(ctx),
            *(entry.name for entry in entry_points(group=_ENTRY_POINT_GROUP)),
        ]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (command := super().get_command(ctx, cmd_name)) is not None:
            return command
        entries = [entry for entry in entry_points(group=_ENTRY_POINT_GROUP) if entry.name == cmd_name]
        return _load_command(entries[0]) if entries else None


def _load_command(entry: EntryPoint) -> Any:
    """Return a command of another package; if the import fails, a command that reports the failure."""
    extension = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    try:
        entry.load()(extension)
    except ImportError as error:
        missing = error.name or str(error)

        @extension.command(
            entry.name,
            help=f"Not installed: needs {missing}.",
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )
        def missing_command() -> None:
            raise CliError(
                f"`tidevoy {entry.name}` needs {missing}, which is not installed: "
                "install Tidevoy with the extra `sandbox`, or install that package alone"
            )

    return typer.main.get_group(extension).commands[entry.name]


app = typer.Typer(
    cls=_CommandGroup,
    help="A load balancer for TiDB: operate the control plane.",
    no_args_is_help=True,
    rich_markup_mode=None,  # help and usage errors read the same on a terminal and in a log
    pretty_exceptions_enable=False,
)
for commands in (serve, nodes, events, top, sessions, replicas, limits, imports):
    app.add_typer(commands.app)
app.command()(config.reload)
for name, group in (
    ("rollout", rollouts),
    ("envoys", envoys),
    ("rules", rules),
    ("traffic", traffic),
    ("config", config),
    ("token", tokens),
    ("certificates", certificates),
):
    app.add_typer(group.app, name=name)


def main() -> None:
    """Run the console script and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code: 0 done, 1 failed, 2 wrong usage or configuration."""
    try:
        app(list(arguments), prog_name="tidevoy")
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else EXIT_FAILED
    except CliError as error:
        return _print_error(str(error), error.exit_code)
    except ConfigError as error:
        return _print_error(str(error), EXIT_USAGE)
    except TidevoyError as error:
        return _print_error(str(error), EXIT_FAILED)
    except BrokenPipeError:
        # The reader closed the pipe (`tidevoy events | head`). Without the next line, the
        # interpreter fails again at exit, when it flushes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return EXIT_OK


def _print_error(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"tidevoy: {line}", file=sys.stderr)
    return code


def _show_version(requested: bool) -> None:
    if requested:
        print(f"tidevoy {version('tidevoy')}")
        raise typer.Exit


@app.callback()
def _global_options(
    url: Annotated[
        str | None, typer.Option("--url", help="URL of the control plane [env var: TIDEVOY_URL].")
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="File with your API token [env var: TIDEVOY_TOKEN_FILE; TIDEVOY_TOKEN: the token].",
        ),
    ] = None,
    ca: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="CA file for the control plane's TLS [env var: TIDEVOY_CA]."),
    ] = None,
    cert: Annotated[
        str | None, typer.Option(metavar="PATH", help="Your client certificate [env var: TIDEVOY_CERT].")
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="PATH", help="The key of that certificate [env var: TIDEVOY_KEY].")
    ] = None,
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    if url is not None:
        os.environ["TIDEVOY_URL"] = url  # the default of each command's --url
    paths = {TOKEN_FILE_VARIABLE: token_file, CA_VARIABLE: ca, CERT_VARIABLE: cert, KEY_VARIABLE: key}
    os.environ |= {variable: path for variable, path in paths.items() if path is not None}
    if token_file is not None:
        os.environ.pop(TOKEN_VARIABLE, None)
