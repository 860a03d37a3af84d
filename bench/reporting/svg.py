"""Render matplotlib figures as SVG; the same data gives the same bytes."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the import is slow, and most commands draw nothing
    from matplotlib.figure import Figure


def as_svg(figure: Figure, title: str) -> str:
    """Return the SVG of a figure with text elements. `title`: the SVG's title."""
    from matplotlib import rc_context

    output = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tidevoy"}):
        figure.savefig(output, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    return output.getvalue()
