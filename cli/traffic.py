"""The commands `tidevoy traffic ...`: capture the traffic of clients, replay it, and compare results."""

from __future__ import annotations

import typer

from cli import capture, traffic_comparison, traffic_replay

app = typer.Typer(no_args_is_help=True)
app.add_typer(capture.app, name="capture")
app.command("replay")(traffic_replay.replay)
app.command("compare")(traffic_comparison.compare)


@app.callback()
def _traffic_group() -> None:
    """Capture the traffic of clients, replay it on a server, and compare the results."""
