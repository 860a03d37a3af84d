"""Charts as SVG, drawn with matplotlib. The same data gives the same bytes.

matplotlib is imported late: the import is slow, and most commands draw nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANEL_COLUMNS = 2
_WIDTH_INCHES, _PANEL_HEIGHT_INCHES, _HEADER_HEIGHT_INCHES = 12, 2.3, 0.9


def as_svg(figure: Figure, title: str) -> str:
    """Return a figure as SVG with text elements instead of outlines. `title`: the SVG's title."""
    from matplotlib import rc_context

    output = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tidevoy"}):
        figure.savefig(output, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    return output.getvalue()


@dataclass(frozen=True, slots=True)
class Panel:
    """Stepped lines in one frame, by name. A line has one value for each unit of time."""

    title: str
    lines: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Panels of one chart; all have the same lines in the same order.

    Values are clipped to the range from `low` to `high`. `limit`: the target, drawn as a dashed line.
    """

    file: str
    title: str
    about: str
    values: str  # label of the vertical axis
    unit: str  # of time
    low: float
    high: float
    limit: float
    panels: tuple[Panel, ...]


def draw_line_chart(chart: Mapping[str, Any]) -> str:
    """Return the SVG of a LineChart's JSON data."""
    from matplotlib.figure import Figure

    panels, low, high, limit = (chart[key] for key in ("panels", "low", "high", "limit"))
    rows = -(-len(panels) // _PANEL_COLUMNS)
    figure = Figure(
        figsize=(_WIDTH_INCHES, rows * _PANEL_HEIGHT_INCHES + _HEADER_HEIGHT_INCHES), layout="constrained"
    )
    figure.suptitle(f"{chart['title']}\n{chart['about']}")
    figure.supxlabel(f"time, {chart['unit']}")
    figure.supylabel(chart["values"])
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, _PANEL_COLUMNS, number, ylim=(low, high))
        axes.set_title(panel["title"], fontsize="medium")
        for name, points in panel["lines"].items():
            values = [min(max(value, low), high) for value in points]
            # Draw over the frame, because the lowest and the highest values lie on it.
            axes.stairs(values, baseline=None, label=name, zorder=3, clip_on=False)
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"limit, {limit:.2f}")
        axes.margins(x=0)
        axes.grid(alpha=0.4)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return as_svg(figure, chart["title"])
