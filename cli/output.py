"""Output of commands: tables and JSON on standard output, notes on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

_STYLE_BY_STATE = {
    "active": "green",
    "joining": "cyan",
    "unhealthy": "red",
    "draining": "yellow",
    "drained": "blue",
}
_STYLE_BY_STATE |= {"done": "green", "failed": "red", "paused": "yellow", "aborted": "yellow"}


def print_result(text: str) -> None:
    """Print a line of the result to standard output and flush, since a reader of a pipe may wait for it."""
    print(text, flush=True)


def print_note(text: str) -> None:
    """Print a line that is not part of the result to standard error."""
    print(f"tidevoy: {sanitize(text)}", file=sys.stderr)


def sanitize(text: str) -> str:
    """Replace characters in foreign text that a terminal may interpret as control sequences."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def show_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    to_stderr: bool = False,
    wraps_all: bool = False,
) -> None:
    """Print a table, fitted to the width of a terminal. Elsewhere, each row is one full line.

    On a terminal, only the last column is wrapped, unless `wraps_all`; the others are cut.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, stderr=to_stderr)
    if not console.is_terminal:
        print("\n".join(format_plain_table(headers, rows)), file=console.file)
        return
    console.print(build_table(headers, rows, wraps_all=wraps_all))


def build_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    wraps_all: bool = False,
    wraps_last: bool = True,
) -> Any:
    """Return a table for rich's `Console`, which fits it to the width of the terminal."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        is_cut = not wraps_all and not (wraps_last and header == headers[-1])
        table.add_column(header, no_wrap=is_cut, overflow="fold" if wraps_all else "ellipsis")
    for row in rows:
        table.add_row(*(_styled_cell(cell) for cell in row))
    return table


def format_plain_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are two spaces apart."""
    lines = [list(headers), *([sanitize(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _styled_cell(cell: str) -> Any:
    from rich.text import Text

    return Text(sanitize(cell), style=_STYLE_BY_STATE.get(cell, ""))


def format_count(value: int | None) -> str:
    """Format a number; None (unknown) gives `-`."""
    return "-" if value is None else str(value)


def format_time(text: str | None) -> str:
    """Format an RFC 3339 time in the local time zone, to the second; None gives `-`."""
    return "-" if text is None else datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def format_duration(duration: float) -> str:
    """Format seconds as `1:02:03` or `2:03`."""
    minutes, second = divmod(int(duration), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
