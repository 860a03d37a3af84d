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
from cli.client import Client, Missing
from cli.envoy_replacement.child_command import words
from cli.envoy_replacement.compatibility import member
from cli.envoy_replacement.model import Member, Order, Told
from cli.envoy_replacement.replacement import Recycle, Tell
from cli.errors import Failure
from cli.options import DEFAULT_URL, AsJson, Url
from cli.output import elapsed, printable, remark, say

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
        parser=options.seconds,
        metavar="DURATION",
        help="Time for the new Envoy to become able to take over; default 1m.",
        show_default=False,
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        parser=options.seconds,
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
Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="LISTENER",
        help="A listener of the old Envoy that the new one need not have; may be given again.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check, and say what would be done.")]


def recycle(
    old_admin: OldAdmin = "127.0.0.1:9901",
    new_admin: NewAdmin = "127.0.0.1:9902",
    start: Start = "",
    undo: Undo = "",
    stop: Stop = "",
    start_timeout: StartTimeout = None,
    deadline: Deadline = None,
    on_deadline: OnDeadlineOption = "keep",
    without: Without = None,
    dry_run: DryRun = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Replace an Envoy of this machine by another one without cutting a session.

    The new one is started beside the old one and checked; then the old one accepts no new sessions, and ends
    when it has none left. What fails before that leaves the old one serving. Run it again to go on.
    """
    order = Order(
        old_admin,
        new_admin,
        start=words("--start", start),
        undo=words("--undo", undo),
        stop=words("--stop", stop),
        start_timeout=60.0 if start_timeout is None else start_timeout,
        deadline=3600.0 if deadline is None else deadline,
        on_deadline=on_deadline,
        without=frozenset(without or ()),
    )
    with Client(url) as client, _json_lines() if as_json else _progress() as tell:
        job = Recycle(order, _Plane(client), tell)
        try:
            if dry_run:
                job.rehearse()
            else:
                job.run()
        except KeyboardInterrupt:
            raise Failure("stopped; run it again to go on") from None


class _Plane:
    """The control plane, as far as a recycle needs it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def envoys(self) -> Mapping[str, Member]:
        return {each["id"]: member(each) for each in self._client.get("/v1/envoys")["envoys"]}

    def forget(self, envoy: str) -> None:
        forget(self._client, envoy)


def forget(client: Client, envoy: str) -> None:
    """Tell the control plane that an Envoy has ended for good. One that it does not know it has forgotten."""
    try:
        client.delete(f"/v1/envoys/{quote(envoy, safe='')}")
    except Missing:
        return


@contextmanager
def _json_lines() -> Iterator[Tell]:
    said = ""

    def tell(told: Told) -> None:
        nonlocal said
        line = {"step": told.step, "message": told.message, **told.data}
        now = json.dumps(line | {"seconds": None}, ensure_ascii=False)
        if now != said:  # that time passes is no news
            say(json.dumps(line, ensure_ascii=False))
            said = now

    yield tell


@contextmanager
def _progress() -> Iterator[Tell]:
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.status import Status

    status, lines = Status("", console=Console(stderr=True)), _lines()

    def tell(told: Told) -> None:
        if told.step == "watch" and "sessions" in told.data:
            status.start()
            left = elapsed(told.data["seconds"])
            status.update(f"{printable(told.message)}, {left} until the deadline")
            return
        if told.step != "watch":
            status.stop()  # else it would take what goes to standard output, too
        lines(told)

    try:
        yield tell
    finally:
        status.stop()


def _lines() -> Tell:
    said = ""

    def tell(told: Told) -> None:
        nonlocal said
        if told.message == said:
            return
        said = told.message
        if told.step == "done" or told.message.startswith("would "):
            say(printable(told.message))
        else:
            remark(told.message)

    return tell
