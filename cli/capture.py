"""The commands `tidevoy traffic capture ...`: start, stop and show captures of the traffic of clients."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _capture_group() -> None:
    """Start, stop and show captures of the traffic of clients."""
