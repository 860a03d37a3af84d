"""Options and arguments that several commands share, and the parsers of their values."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

_DURATION_PATTERN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_MAX_DURATION_DAYS = 7
_SECONDS_PER_DAY = 86_400


def require_finite(value: float | None) -> float | None:
    """Return the value of an option. Raises BadParameter for `nan` and `inf`, which pass limits."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def parse_duration(text: str, max_days: int = _MAX_DURATION_DAYS) -> float:
    """Parse a duration such as `600`, `10m`, `1h30m` or `2d` into seconds.

    Raises BadParameter if it is invalid or longer than `max_days`.
    """
    if re.fullmatch(r"\d+(\.\d+)?", text):
        total = float(text)
    elif text and (match := _DURATION_PATTERN.fullmatch(text)):
        parts = (float(part or 0) for part in match.groups())
        total = sum(part * unit for part, unit in zip(parts, (_SECONDS_PER_DAY, 3_600, 60, 1), strict=True))
    else:
        raise typer.BadParameter(f"{text!r} is not a duration; write it as 600, 10m or 1h30m")
    if total > max_days * _SECONDS_PER_DAY:
        raise typer.BadParameter(f"{text!r} is longer than {max_days} days ({max_days}d)")
    return total


def duration_option(help_text: str, max_days: int = _MAX_DURATION_DAYS, *, name: str | None = None) -> Any:
    """Return an option whose value `parse_duration` parses. `name`: default is that of the parameter."""
    return typer.Option(
        *([name] if name is not None else []),
        parser=partial(parse_duration, max_days=max_days),
        metavar="DURATION",
        help=help_text,
    )


def parse_labels(pairs: list[str]) -> dict[str, str]:
    """Parse `zone=a` options into a mapping. Raises BadParameter if one has no name or no `=`."""
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{pair!r} is not a label; write it as name=value")
        labels[name] = value
    return labels


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
        help="Configuration file (YAML); without it, only the environment is used.",
        show_default=False,
    ),
]
