"""The commands `tidevoy traffic ...`: capture the traffic of clients."""

from __future__ import annotations

import typer

from cli import capture

app = typer.Typer(no_args_is_help=True)
app.add_typer(capture.app, name="capture")


@app.callback()
def _traffic_group() -> None:
    """Capture the traffic of clients."""
