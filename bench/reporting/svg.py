"""Charts of matplotlib as SVG; the same data gives the same bytes."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing it takes long, and most commands draw nothing
    from matplotlib.figure import Figure


def as_svg(figure: Figure, title: str) -> str:
    """The SVG of a figure, with its text as text. `title`: what the picture is called."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tidevoy"}):
        figure.savefig(text, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    return text.getvalue()
