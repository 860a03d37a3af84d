"""The command `envoys recycle`: one Envoy takes over from another on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal
from urllib.parse import quote

import typer

from cli import options
from cli.client import ControlPlaneClient, NotFound
from cli.envoy_replacement.child_command import split_command
from cli.envoy_replacement.compatibility import parse_registered_envoy
from cli.envoy_replacement.model import ProgressMessage, RegisteredEnvoy, ReplacementSpec
from cli.envoy_replacement.replacement import EnvoyReplacement, ReportProgress
from cli.errors import CliError
from cli.options import DEFAULT_URL, AsJson, Url
from cli.output import format_duration, print_note, print_result, sanitize

OldAdmin = Annotated[
    str,
    typer.Option("--old-admin", metavar="HOST:PORT", help="Admin port of the Envoy that is to be replaced."),
]
NewAdmin = Annotated[
    str, typer.Option("--new-admin", metavar="HOST:PORT", help="Admin port of the Envoy that takes over.")
]
Start = Annotated[
    str,
    typer.Option(
        metavar="COMMAND",
        help="Starts the new Envoy where it does not run yet: it returns, or is the Envoy itself.",
        show_default=False,
    ),
]
Undo = Annotated[
    str,
    typer.Option(
        metavar="COMMAND",
        help="Ends the new Envoy when it cannot take over; default: its admin port is told to.",
        show_default=False,
    ),
]
Stop = Annotated[
    str,
    typer.Option(
        metavar="COMMAND",
        help="Ends the old Envoy when it has no session any more; default: its admin port is told to.",
        show_default=False,
    ),
]
StartTimeout = Annotated[
    float | None,
    typer.Option(
        parser=options.parse_duration,
        metavar="DURATION",
        help="Time for the new Envoy to become able to take over; default 1m.",
        show_default=False,
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        parser=options.parse_duration,
        metavar="DURATION",
        help="Time for the sessions of the old Envoy to end: 600, 10m, 1h30m; default 1h.",
        show_default=False,
    ),
]
OnDeadlineOption = Annotated[
    Literal["keep", "cut"],
    typer.Option(
        help="What happens to sessions left then: they stay and the command fails, or they are cut."
    ),
]
OptionalListeners = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="LISTENER",
        help="A listener of the old Envoy that the new one need not have; may be given again.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check, and say what would be done.")]


def replace_envoy(
    old_admin: OldAdmin = "127.0.0.1:9901",
    new_admin: NewAdmin = "127.0.0.1:9902",
    start: Start = "",
    undo: Undo = "",
    stop: Stop = "",
    start_timeout: StartTimeout = None,
    deadline: Deadline = None,
    on_deadline: OnDeadlineOption = "keep",
    optional_listeners: OptionalListeners = None,
    dry_run: DryRun = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Replace an Envoy of this machine by another one without cutting a session.

    The new one is started beside the old one and checked; then the old one accepts no new sessions, and ends
    when it has none left. What fails before that leaves the old one serving. Run it again to go on.
    """
    spec = ReplacementSpec(
        old_admin,
        new_admin,
        start_command=split_command("--start", start),
        undo_command=split_command("--undo", undo),
        stop_command=split_command("--stop", stop),
        start_timeout=60.0 if start_timeout is None else start_timeout,
        deadline=3600.0 if deadline is None else deadline,
        on_deadline=on_deadline,
        optional_listeners=frozenset(optional_listeners or ()),
    )
    with ControlPlaneClient(url) as client, _json_progress() if as_json else _terminal_progress() as report:
        replacement = EnvoyReplacement(spec, _ControlPlaneApi(client), report)
        try:
            if dry_run:
                replacement.dry_run()
            else:
                replacement.run()
        except KeyboardInterrupt:
            raise CliError("stopped; run it again to go on") from None


class _ControlPlaneApi:
    """The control plane, as far as a recycle needs it."""

    def __init__(self, client: ControlPlaneClient) -> None:
        self._client = client

    def envoys(self) -> Mapping[str, RegisteredEnvoy]:
        return {each["id"]: parse_registered_envoy(each) for each in self._client.get("/v1/envoys")["envoys"]}

    def forget(self, envoy: str) -> None:
        forget(self._client, envoy)


def forget(client: ControlPlaneClient, envoy: str) -> None:
    """Tell the control plane that an Envoy has ended for good. One that it does not know it has forgotten."""
    try:
        client.delete(f"/v1/envoys/{quote(envoy, safe='')}")
    except NotFound:
        return


@contextmanager
def _json_progress() -> Iterator[ReportProgress]:
    last_line = ""

    def tell(told: ProgressMessage) -> None:
        nonlocal last_line
        line = {"step": told.step, "message": told.message, **told.data}
        now = json.dumps(line | {"seconds": None}, ensure_ascii=False)
        if now != last_line:  # that time passes is no news
            print_result(json.dumps(line, ensure_ascii=False))
            last_line = now

    yield tell


@contextmanager
def _terminal_progress() -> Iterator[ReportProgress]:
    if not sys.stderr.isatty():
        yield _line_progress()
        return
    from rich.console import Console
    from rich.status import Status

    status, lines = Status("", console=Console(stderr=True)), _line_progress()

    def tell(told: ProgressMessage) -> None:
        if told.step == "watch" and "sessions" in told.data:
            status.start()
            left = format_duration(told.data["seconds"])
            status.update(f"{sanitize(told.message)}, {left} until the deadline")
            return
        if told.step != "watch":
            status.stop()  # else it would take what goes to standard output, too
        lines(told)

    try:
        yield tell
    finally:
        status.stop()


def _line_progress() -> ReportProgress:
    last_message = ""

    def tell(told: ProgressMessage) -> None:
        nonlocal last_message
        if told.message == last_message:
            return
        last_message = told.message
        if told.step == "done" or told.message.startswith("would "):
            print_result(sanitize(told.message))
        else:
            print_note(told.message)

    return tell
