"""Charts of the side-by-side benchmark, as SVG that is the same to the byte for the same document.

A chart has a panel for each table of a group of workloads, and a panel a bar for each peer. The template
`bars.svg.j2` says what that looks like; here is what goes where.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.differences import Peer, Range, Table, chance, counts, figure, in_words, number, ratio, title
from bench.drawing import fitted, render
from bench.peers import TIDEVOY

_PREFIX = "side-by-side"
_COLUMNS = 2
_PANEL_WIDTH = 440  # with the gap to the next one
_NAME_WIDTH, _BAR_WIDTH, _LABEL_WIDTH = 104, 176, 152
_BAR_HEIGHT, _BAR_STEP, _PANEL_HEAD, _PANEL_GAP = 12, 20, 24, 18
_TOP, _MARGIN = 80, 12
_LETTER = 6.6  # the mean width of a letter of 12 pixels


@dataclass(frozen=True, slots=True)
class _Group:
    """Workloads that are shown together: those whose names match."""

    name: str
    title: str
    names: str
    figures: tuple[str, ...]


# The first that matches has it; the last one takes what is left.
_GROUPS = (
    _Group("results", "Results by size", r"^result of ", ("qps", "cpu_us", "p95_ms")),
    _Group(
        "connections",
        "Beside other connections",
        r"connections",
        ("qps", "cpu_us", "p95_ms", "connection_kb"),
    ),
    _Group("point-select", "Point select", r"^point select", ("cpu_us", "p95_ms")),
    _Group("statements", "Statements", r"", ("cpu_us", "p95_ms")),
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a figure is called, and what of it is good."""

    file: str
    title: str
    unit: str
    better: str


_KINDS = {
    "cpu_us": _Kind("cpu", "CPU of the proxy per query", "µs", "less is better"),
    "p95_ms": _Kind("p95", "95th percentile of the response time", "ms", "less is better"),
    "qps": _Kind("qps", "queries per second", "/s", "more is better"),
    "connection_kb": _Kind("memory", "resident memory per connection", "kB", "less is better"),
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart: the name of its file, what it shows, and the SVG."""

    file: str
    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class _Bar:
    """One peer: lengths in pixels from where bars begin, `y` from the top of the panel's bars."""

    name: str
    y: int
    length: float
    low: float
    high: float
    label: str
    about: str
    ours: bool


@dataclass(frozen=True, slots=True)
class _Panel:
    """One table, at its place in the picture."""

    title: str
    x: int
    y: int
    bars: tuple[_Bar, ...]

    @property
    def bottom(self) -> int:
        """Where the next panel may begin."""
        return self.y + _PANEL_HEAD + len(self.bars) * _BAR_STEP + _PANEL_GAP


def draw(document: Mapping[str, Any]) -> list[Chart]:
    """The charts for which the document has figures."""
    charts = []
    for group, tables in _grouped(document["tables"]):
        for key in group.figures:
            shown = [table for table in tables if any(figure(peer, key) for peer in table["peers"])]
            if shown:
                charts.append(_chart(group, key, shown))
    return charts


def keep(document: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write the charts into a directory; what was written. Those of an earlier document are removed."""
    for old in directory.glob(f"{_PREFIX}-*.svg"):
        old.unlink()
    written = []
    for chart in draw(document):
        path = directory / chart.file
        path.write_text(chart.svg, encoding="utf-8")
        written.append(path)
    return written


def _grouped(tables: Sequence[Table]) -> list[tuple[_Group, list[Table]]]:
    found: dict[_Group, list[Table]] = {group: [] for group in _GROUPS}
    for table in tables:
        group = next(group for group in _GROUPS if re.search(group.names, table["workload"]))
        found[group].append(table)
    return list(found.items())


def _chart(group: _Group, key: str, tables: Sequence[Table]) -> Chart:
    kind = _KINDS[key]
    panels: list[_Panel] = []
    y = _TOP
    for start in range(0, len(tables), _COLUMNS):
        row = [
            _panel(table, key, column * _PANEL_WIDTH + _MARGIN, y)
            for column, table in enumerate(tables[start : start + _COLUMNS])
        ]
        y = max(panel.bottom for panel in row)
        panels += row
    reference = tables[0]["reference"]
    heading = f"{group.title}: {kind.title}"
    svg = render(
        "bars.svg.j2",
        title=heading,
        about=(
            f"Medians, with the least and the most of all rounds; {kind.better}.",
            f"Ratio to {reference} in the same round; none: {reference} differs as much from itself (A/A).",
        ),
        width=_COLUMNS * _PANEL_WIDTH + _MARGIN,
        height=y,
        margin=_MARGIN,
        panels=panels,
        first=_PANEL_HEAD,
        start=_NAME_WIDTH,
        thick=_BAR_HEIGHT,
    )
    return Chart(f"{_PREFIX}-{group.name}-{kind.file}.svg", heading, svg)


def _panel(table: Table, key: str, x: int, y: int) -> _Panel:
    found = [(peer, spread) for peer in table["peers"] if (spread := figure(peer, key)) is not None]
    most = max(spread.high for _, spread in found) or 1.0
    bars = tuple(
        _bar(table, peer, key, spread, _BAR_WIDTH / most, number * _BAR_STEP)
        for number, (peer, spread) in enumerate(found)
    )
    return _Panel(fitted(title(table), _PANEL_WIDTH, _LETTER), x, y, bars)


def _bar(table: Table, peer: Peer, key: str, spread: Range, scale: float, y: int) -> _Bar:
    kind = _KINDS[key]
    named = f"{number(spread.median, key)} {kind.unit}"
    return _Bar(
        name=fitted(peer["name"], _NAME_WIDTH - 8, _LETTER),
        y=y,
        length=spread.median * scale,
        low=spread.low * scale,
        high=spread.high * scale,
        label=fitted(_label(table, peer, key, named), _LABEL_WIDTH, _LETTER),
        about=f"{peer['name']}: {named}, {number(spread.low, key)} to {number(spread.high, key)}",
        ours=peer["name"] == TIDEVOY,
    )


def _label(table: Table, peer: Peer, key: str, named: str) -> str:
    if peer["name"] == table["again"]:
        return f"{named}, A/A ± {chance(table, key):.2f}"
    if ratio(peer, key) is None or peer["name"] == table["reference"]:
        return named
    told = in_words(table, peer, key)
    return f"{named}, ratio {told}" if counts(table, peer, key) else f"{named}, {told}"
