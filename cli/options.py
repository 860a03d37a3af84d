"""Options and arguments that several commands have, and how their values are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

_DURATION_PATTERN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_MAX_DURATION_SECONDS = 604_800.0  # a week


def parse_duration(text: str) -> float:
    """A duration as seconds: `600`, `10m`, `1h30m`, `2d`. BadParameter when it is none, or over a week."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        total = float(text)
    elif text and (match := _DURATION_PATTERN.fullmatch(text)):
        parts = (float(part or 0) for part in match.groups())
        total = sum(part * unit for part, unit in zip(parts, (86_400, 3_600, 60, 1), strict=True))
    else:
        raise typer.BadParameter(f"{text!r} is no duration; write it as 600, 10m or 1h30m")
    if total > _MAX_DURATION_SECONDS:
        raise typer.BadParameter(f"{text!r} is longer than a week (7d)")
    return total


def parse_labels(pairs: list[str]) -> dict[str, str]:
    """`zone=a` options as a mapping. BadParameter when one has no `=`."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{pair!r} is no label; write it as name=value")
        found[name] = value
    return found


Url = Annotated[
    str, typer.Option("--url", envvar="TIDEVOY_URL", help="URL of the control plane.", show_default=True)
]
DEFAULT_URL = "http://127.0.0.1:3080"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Address = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="SQL address of the node, host:port.", show_default=False)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="TIDEVOY_CONFIG",
        help="Configuration file (YAML); without one the environment alone counts.",
        show_default=False,
    ),
]
