"""The `tidevoy` command: one file per subject, plus commands that other packages add by entry point."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated

import typer

from cli import config, envoys, events, nodes, replicas, rollouts, serve, tokens
from cli.credentials import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from cli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, CliError
from controlplane.errors import ConfigError, TidevoyError

_ENTRY_POINT_GROUP = "tidevoy.commands"
_OPTIONS_WITH_VALUE = frozenset({"--url", "--token-file", "--ca", "--cert", "--key"})


def main() -> None:
    """Run the console script and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code: 0 done, 1 failed, 2 wrong usage or configuration."""
    try:
        build_app(arguments)(list(arguments), prog_name="tidevoy")
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else EXIT_FAILED
    except CliError as error:
        return _print_error(str(error), error.exit_code)
    except ConfigError as error:
        return _print_error(str(error), EXIT_USAGE)
    except TidevoyError as error:
        return _print_error(str(error), EXIT_FAILED)
    except BrokenPipeError:
        # The reader closed the pipe (`tidevoy events | head`). Without this, the interpreter fails again
        # at exit
        # when it flushes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return EXIT_OK


def _print_error(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"tidevoy: {line}", file=sys.stderr)
    return code


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the app with all commands that `arguments` may name."""
    app = typer.Typer(
        help="A load balancer for TiDB: operate the control plane.",
        no_args_is_help=True,
        rich_markup_mode=None,  # help and usage errors read the same on a terminal and in a log
        pretty_exceptions_enable=False,
    )
    app.callback()(_global_options)
    for command_module in (serve, nodes, rollouts, envoys, replicas, events, config, tokens):
        command_module.register(app)
    _register_extensions(app, arguments)
    return app


def _show_version(requested: bool) -> None:
    if requested:
        print(f"tidevoy {version('tidevoy')}")
        raise typer.Exit


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
    for variable, path in (
        (TOKEN_FILE_VARIABLE, token_file),
        (CA_VARIABLE, ca),
        (CERT_VARIABLE, cert),
        (KEY_VARIABLE, key),
    ):
        if path is not None:
            os.environ[variable] = path
    if token_file is not None:
        os.environ.pop(TOKEN_VARIABLE, None)


def _register_extensions(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Add the commands of other packages, importing each only if it is requested or all are listed."""
    requested = _requested_command(arguments)
    groups = (group.name for group in app.registered_groups)
    if requested in {*groups, *(command.name for command in app.registered_commands)}:
        return
    for entry in entry_points(group=_ENTRY_POINT_GROUP):
        if requested in (None, entry.name):
            _register_extension(app, entry)


def _requested_command(arguments: Sequence[str]) -> str | None:
    """Return the command name that follows the global options, or None."""
    rest = iter(arguments)
    for argument in rest:
        if argument in _OPTIONS_WITH_VALUE:
            next(rest, None)
        elif not argument.startswith("-"):
            return argument
    return None


def _register_extension(app: typer.Typer, entry: EntryPoint) -> None:
    try:
        register = entry.load()
    except ImportError as error:
        missing = error.name or str(error)

        @app.command(
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
    else:
        register(app)
