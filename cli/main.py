"""The `tidevoy` command: one file a noun, and commands of packages above by entry point."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated

import typer

from cli import config, envoys, events, nodes, replicas, rollouts, serve, tokens
from cli.credentials import CA, CERT, KEY, TOKEN, TOKEN_FILE
from cli.errors import DONE, FAILED, USAGE, Failure
from controlplane.errors import ConfigError, TidevoyError

_GROUP = "tidevoy.commands"
_WITH_VALUE = frozenset({"--url", "--token-file", "--ca", "--cert", "--key"})


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line. Answers the exit code: 0 done, 1 failed, 2 usage or a bad configuration."""
    try:
        build(arguments)(list(arguments), prog_name="tidevoy")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except Failure as failure:
        return _fail(str(failure), failure.code)
    except ConfigError as error:
        return _fail(str(error), USAGE)
    except TidevoyError as error:
        return _fail(str(error), FAILED)
    except BrokenPipeError:
        # The reader has enough (`tidevoy events | head`); keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return DONE


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"tidevoy: {line}", file=sys.stderr)
    return code


def build(arguments: Sequence[str]) -> typer.Typer:
    """The app with all commands that `arguments` may mean."""
    app = typer.Typer(
        help="A load balancer for TiDB: operate the control plane.",
        no_args_is_help=True,
        rich_markup_mode=None,  # help and usage errors read the same on a terminal and in a log
        pretty_exceptions_enable=False,
    )
    app.callback()(_global_options)
    for noun in (serve, nodes, rollouts, envoys, replicas, events, config, tokens):
        noun.register(app)
    _register_others(app, arguments)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
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
            help="File with a caller's token [env var: TIDEVOY_TOKEN_FILE; TIDEVOY_TOKEN: the token].",
        ),
    ] = None,
    ca: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="CA file for the control plane's TLS [env var: TIDEVOY_CA]."),
    ] = None,
    cert: Annotated[
        str | None, typer.Option(metavar="PATH", help="Certificate of a caller [env var: TIDEVOY_CERT].")
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
        os.environ["TIDEVOY_URL"] = url  # where the command's own option looks next
    for variable, path in ((TOKEN_FILE, token_file), (CA, ca), (CERT, cert), (KEY, key)):
        if path is not None:
            os.environ[variable] = path
    if token_file is not None:
        os.environ.pop(TOKEN, None)


def _register_others(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Commands of other packages. Each is imported only when it is meant, or when all are to be listed."""
    meant = _command(arguments)
    groups = (group.name for group in app.registered_groups)
    if meant in {*groups, *(command.name for command in app.registered_commands)}:
        return
    for entry in entry_points(group=_GROUP):
        if meant in (None, entry.name):
            _register(app, entry)


def _command(arguments: Sequence[str]) -> str | None:
    """The command that the arguments name, behind the global options; None when they name none."""
    rest = iter(arguments)
    for argument in rest:
        if argument in _WITH_VALUE:
            next(rest, None)
        elif not argument.startswith("-"):
            return argument
    return None


def _register(app: typer.Typer, entry: EntryPoint) -> None:
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
        def absent() -> None:
            raise Failure(
                f"`tidevoy {entry.name}` needs {missing}, which is not installed: "
                "install Tidevoy with its extra `sandbox`, or add it by itself"
            )
    else:
        register(app)
