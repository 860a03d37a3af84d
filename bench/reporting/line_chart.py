"""Charts of what changes with time: panels with a stepped line for each of those that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.reporting.svg import as_svg

_COLUMNS = 2
_WIDTH, _PANEL_HEIGHT, _HEAD = 12, 2.3, 0.9  # inches


@dataclass(frozen=True, slots=True)
class Line:
    """One line: a value for each step of time."""

    name: str
    points: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines in one frame. `step`: how long a point holds, in the unit of the drawing."""

    title: str
    step: float
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Panels that belong together, as plain data; all have the same lines, in the same order.

    Values below `low` or above `high` are drawn there. `limit`: what values are to be below.
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
        """As plain data, from which it can be drawn."""
        return asdict(self)


def draw(drawing: Mapping[str, Any]) -> str:
    """The SVG of a drawing's plain data."""
    from matplotlib.figure import Figure

    panels, low, high, limit = (drawing[key] for key in ("panels", "low", "high", "limit"))
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(_WIDTH, rows * _PANEL_HEIGHT + _HEAD), layout="constrained")
    figure.suptitle(f"{drawing['title']}\n{drawing['about']}")
    figure.supxlabel(f"time, {drawing['unit']}")
    figure.supylabel(drawing["values"])
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, _COLUMNS, number, ylim=(low, high))
        axes.set_title(panel["title"], fontsize="medium")
        for line in panel["lines"]:
            values = [min(max(value, low), high) for value in line["points"]]
            edges = [panel["step"] * step for step in range(len(values) + 1)]
            # Drawn over the frame, on which the lowest and the highest values lie.
            axes.stairs(values, edges, baseline=None, label=line["name"], zorder=3, clip_on=False)
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"limit, {limit:.2f}")
        axes.margins(x=0)
        axes.grid(alpha=0.4)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return as_svg(figure, drawing["title"])
