"""Charts of what changes with time, as SVG that is the same to the byte for the same document.

A chart has panels, and a panel a stepped line for each of those that are compared. The template
`lines.svg.j2` says what that looks like; here is what goes where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.drawing import fitted, render

_COLUMNS = 2
_PANEL_WIDTH, _PANEL_HEIGHT = 440, 196  # with the gap to the next one
_PLOT_LEFT, _PLOT_TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 32, 24, 384, 128
_TOP, _MARGIN = 96, 12
_LETTER = 6.6  # the mean width of a letter of 12 pixels
_KEY_LINE = 18  # pixels of a line's sample in the key, and the gap behind it
_MARKS = 4  # steps between marks on an axis


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
    unit: str  # of time
    low: float
    high: float
    limit: float
    panels: tuple[Panel, ...]

    def as_json(self) -> dict[str, Any]:
        """As plain data, from which it can be drawn."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A place on an axis, in pixels, and what stands there."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class _Key:
    """A line by its number, and where the key to it stands."""

    number: int
    name: str
    x: float


@dataclass(frozen=True, slots=True)
class _Placed:
    """A panel at its place in the picture."""

    title: str
    x: int
    y: int
    paths: tuple[str, ...]
    times: tuple[_Mark, ...]


def draw(drawing: Mapping[str, Any]) -> str:
    """The SVG of a drawing's plain data."""
    panels = [_placed(panel, drawing, number) for number, panel in enumerate(drawing["panels"])]
    low, high = drawing["low"], drawing["high"]
    steps = [low + (high - low) * mark / _MARKS for mark in range(_MARKS + 1)]
    rows = -(-len(panels) // _COLUMNS)
    return render(
        "lines.svg.j2",
        title=drawing["title"],
        about=drawing["about"],
        width=_COLUMNS * _PANEL_WIDTH + _MARGIN,
        height=_TOP + rows * _PANEL_HEIGHT,
        margin=_MARGIN,
        keys=_keys([line["name"] for line in drawing["panels"][0]["lines"]]),
        panels=panels,
        left=_PLOT_LEFT,
        top=_PLOT_TOP,
        plot_width=_PLOT_WIDTH,
        plot_height=_PLOT_HEIGHT,
        levels=[_Mark(_height(value, drawing), f"{value:.2f}") for value in steps],
        limit=_height(drawing["limit"], drawing),
    )


def _keys(names: Sequence[str]) -> list[_Key]:
    keys, x = [], float(_MARGIN)
    for number, name in enumerate(names):
        keys.append(_Key(number, name, x))
        x += 2 * _KEY_LINE + len(name) * _LETTER
    return keys


def _placed(panel: Mapping[str, Any], drawing: Mapping[str, Any], number: int) -> _Placed:
    longest = max(len(line["points"]) for line in panel["lines"])
    marks = tuple(
        _Mark(_PLOT_WIDTH * mark / _MARKS, f"{panel['step'] * longest * mark / _MARKS:g}")
        for mark in range(_MARKS + 1)
    )
    last = marks[-1]
    return _Placed(
        title=fitted(panel["title"], _PANEL_WIDTH - _MARGIN, _LETTER),
        x=number % _COLUMNS * _PANEL_WIDTH + _MARGIN,
        y=number // _COLUMNS * _PANEL_HEIGHT + _TOP,
        paths=tuple(_path(line["points"], longest, drawing) for line in panel["lines"]),
        times=(*marks[:-1], _Mark(last.at, f"{last.label} {drawing['unit']}")),
    )


def _path(points: Sequence[float], longest: int, drawing: Mapping[str, Any]) -> str:
    """Each value holds for a step, to the next one."""
    width = _PLOT_WIDTH / longest
    steps = [f"V{_height(value, drawing):.1f}H{(i + 1) * width:.1f}" for i, value in enumerate(points)]
    return f"M0 {_height(points[0], drawing):.1f}{''.join(steps)}" if points else ""


def _height(value: float, drawing: Mapping[str, Any]) -> float:
    """Pixels from the top of the frame."""
    low, high = float(drawing["low"]), float(drawing["high"])
    return _PLOT_HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))
