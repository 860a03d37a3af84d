"""Show the progress of long work: a bar on a terminal, one line per change elsewhere, or lines of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Self

from cli.output import print_note, print_result, sanitize


class ProgressDisplay:
    """Shows the progress of one command on standard error, or with `as_json` as JSON on standard output."""

    def __init__(self, *, as_json: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._as_json = as_json
        self._last_change: object = None
        text = TextColumn("{task.description}", markup=False)
        # While the bar is live, lines written to standard error appear above it.
        self._bar = Progress(
            *(SpinnerColumn(), BarColumn(), TimeElapsedColumn(), text),
            console=Console(stderr=True, highlight=False),
            transient=True,
            redirect_stdout=False,
            disable=as_json or not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show_state(
        self, text: str, *, change: object = None, completed: int = 0, total: int | None = None
    ) -> None:
        """Show the state on a terminal. Elsewhere, print it if `change` is new and not None."""
        if not self._bar.disable:
            self._bar.update(self._task, description=sanitize(text), completed=completed, total=total)
            self._bar.start()
        elif not self._as_json and change not in (None, self._last_change):
            self._last_change = change
            print_note(text)

    def show_event(self, text: str) -> None:
        """Print a line that stays, unlike the bar."""
        if not self._as_json:
            print_note(text)

    def show_result(self, text: str) -> None:
        """End the bar, and print a line to standard output."""
        self._bar.stop()
        if not self._as_json:
            print_result(sanitize(text))

    def print_json(self, line: Mapping[str, Any], *, change: object) -> None:
        """With `as_json`, print a line if `change` differs from the last one."""
        if self._as_json and change != self._last_change:
            self._last_change = change
            print_result(json.dumps(line, ensure_ascii=False))
