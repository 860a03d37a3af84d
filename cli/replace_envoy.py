"""The command `envoys replace`: replace an Envoy by another one on this machine."""

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
    typer.Option("--old-admin", metavar="HOST:PORT", help="Admin port of the Envoy to replace."),
]
NewAdmin = Annotated[
    str, typer.Option("--new-admin", metavar="HOST:PORT", help="Admin port of the Envoy that takes over.")
]
Start = Annotated[
    str,
    typer.Option(
        metavar="COMMAND",
        help="Command that starts the new Envoy if it does not run yet: it returns, or it is the Envoy"
        " itself.",
        show_default=False,
    ),
]
Undo = Annotated[
    str,
    typer.Option(
        metavar="COMMAND",
        help="Command that stops the new Envoy if it cannot take over; default: stop it through its admin"
        " port.",
        show_default=False,
    ),
]
Stop = Annotated[
    str,
    typer.Option(
        metavar="COMMAND",
        help="Command that stops the old Envoy when it has no sessions left; default: stop it through its"
        " admin port.",
        show_default=False,
    ),
]
StartTimeout = Annotated[
    float | None,
    typer.Option(
        parser=options.parse_duration,
        metavar="DURATION",
        help="Time for the new Envoy to become ready to take over; default 1m.",
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
        help="What happens to sessions that are left at the deadline: keep them and fail, or cut them."
    ),
]
OptionalListeners = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="LISTENER",
        help="A listener of the old Envoy that the new one does not need; repeatable.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check, and show what would be done.")]


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
    """Replace an Envoy on this machine by another one without cutting a session.

    Starts the new Envoy beside the old one and checks it; then the old Envoy stops accepting sessions, and
    stops when it has none left. If an earlier step fails, the old Envoy keeps serving. Run the command again
    to continue.
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
            raise CliError("interrupted; run the command again to continue") from None


class _ControlPlaneApi:
    """The control plane calls that a replacement needs."""

    def __init__(self, client: ControlPlaneClient) -> None:
        self._client = client

    def envoys(self) -> Mapping[str, RegisteredEnvoy]:
        envoys = self._client.get("/v1/envoys")["envoys"]
        return {envoy["id"]: parse_registered_envoy(envoy) for envoy in envoys}

    def forget(self, envoy: str) -> None:
        forget(self._client, envoy)


def forget(client: ControlPlaneClient, envoy: str) -> None:
    """Remove an Envoy that has stopped for good from the control plane. An unknown Envoy is no error."""
    try:
        client.delete(f"/v1/envoys/{quote(envoy, safe='')}")
    except NotFound:
        return


@contextmanager
def _json_progress() -> Iterator[ReportProgress]:
    last_line = ""

    def report(progress: ProgressMessage) -> None:
        nonlocal last_line
        line = {"step": progress.step, "message": progress.message, **progress.data}
        # A line that differs only in the remaining time is not printed.
        line_without_time = json.dumps(line | {"seconds": None}, ensure_ascii=False)
        if line_without_time != last_line:
            print_result(json.dumps(line, ensure_ascii=False))
            last_line = line_without_time

    yield report


@contextmanager
def _terminal_progress() -> Iterator[ReportProgress]:
    if not sys.stderr.isatty():
        yield _line_progress()
        return
    from rich.console import Console
    from rich.status import Status

    status, report_line = Status("", console=Console(stderr=True)), _line_progress()

    def report(progress: ProgressMessage) -> None:
        if progress.step == "watch" and "sessions" in progress.data:
            status.start()
            time_left = format_duration(progress.data["seconds"])
            status.update(f"{sanitize(progress.message)}, {time_left} until the deadline")
            return
        if progress.step != "watch":
            status.stop()  # a running Status also captures standard output
        report_line(progress)

    try:
        yield report
    finally:
        status.stop()


def _line_progress() -> ReportProgress:
    last_message = ""

    def report(progress: ProgressMessage) -> None:
        nonlocal last_message
        if progress.message == last_message:
            return
        last_message = progress.message
        if progress.step == "done" or progress.message.startswith("would "):
            print_result(sanitize(progress.message))
        else:
            print_note(progress.message)

    return report
