"""Charts over time: panels with a stepped line for each compared item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.reporting.svg import as_svg

_PANEL_COLUMNS = 2
_WIDTH_INCHES, _PANEL_HEIGHT_INCHES, _HEADER_HEIGHT_INCHES = 12, 2.3, 0.9


@dataclass(frozen=True, slots=True)
class Line:
    """One line: a value for each time step."""

    name: str
    points: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines in one frame. `step`: the time between two points, in the chart's unit."""

    title: str
    step: float
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Panels of one chart; all have the same lines in the same order.

    Values are clipped to the range from `low` to `high`. `limit`: the target that values should stay below.
    """

    file: str
    title: str
    about: str
    values: str  # what is on the vertical axis
    unit: str  # of time
    low: float
    high: float
    limit: float
    panels: tuple[Panel, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON data that `render_svg` draws."""
        return asdict(self)


def render_svg(chart: Mapping[str, Any]) -> str:
    """Return the SVG of a chart's JSON data."""
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
        for line in panel["lines"]:
            values = [min(max(value, low), high) for value in line["points"]]
            edges = [panel["step"] * step for step in range(len(values) + 1)]
            # Drawn over the frame, because the lowest and the highest values lie on it.
            axes.stairs(values, edges, baseline=None, label=line["name"], zorder=3, clip_on=False)
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"limit, {limit:.2f}")
        axes.margins(x=0)
        axes.grid(alpha=0.4)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return as_svg(figure, chart["title"])
