"""The charts of a comparison of replays: geometry for inline SVG. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.model.comparison import Comparison, DigestComparison, Finding
from controlplane.verification.verdict import is_slower, ranked_digests

INTERVAL_WIDTH = 100
"""Width of the charts of ratios, in SVG user units."""
SCATTER_WIDTH, SCATTER_HEIGHT = 480, 320

_MAX_DIGESTS = 200  # on a page
_MIN_RATIO_RANGE = 2.0  # the scale reaches at least from 1/2 to 2
_MAX_RATIO_RANGE = 64.0  # the scale reaches at most from 1/64 to 64; longer intervals are cut
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 72, 24, 12, 42


@dataclass(frozen=True, slots=True)
class LogScale:
    """Maps values from `low` to `high` to positions from `start` to `end`, logarithmically."""

    low: float
    high: float
    start: float
    end: float

    def position(self, value: float) -> float:
        """Return the position of a value; values outside are at the ends."""
        value = min(max(value, self.low), self.high)
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return round(self.start + share * (self.end - self.start), 1)


@dataclass(frozen=True, slots=True)
class IntervalBar:
    """The positions of a ratio and of the bounds of its interval."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class DigestRow:
    """One digest in the table and in the charts."""

    entry: DigestComparison
    change: str  # "slower", "faster" or "same"
    bar: IntervalBar | None  # None: too few pairs


@dataclass(frozen=True, slots=True)
class ScatterPoint:
    """One digest in the chart of medians."""

    x: float
    y: float
    row: DigestRow


@dataclass(frozen=True, slots=True)
class Tick:
    """A labeled position on an axis; `value` are microseconds."""

    position: float
    value: float


@dataclass(frozen=True, slots=True)
class Scatter:
    """The chart of the medians: the old server's on the x axis, the new server's on the y axis."""

    points: tuple[ScatterPoint, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    left: float = _MARGIN_LEFT
    right: float = SCATTER_WIDTH - _MARGIN_RIGHT
    top: float = _MARGIN_TOP
    bottom: float = SCATTER_HEIGHT - _MARGIN_BOTTOM


def comparison_values(
    comparison: Comparison, findings: Sequence[Finding], max_ratio: float, digest_count: int = 0
) -> Mapping[str, Any]:
    """Return the values of the template `_comparison.html`.

    `digest_count`: that of the whole comparison, if this one is shortened.
    """
    ranked = ranked_digests(comparison)
    scale = _ratio_scale(ranked, max_ratio)
    rows = [_digest_row(entry, max_ratio, scale) for entry in ranked[:_MAX_DIGESTS]]
    return {
        "comparison": comparison,
        "findings": findings,
        "max_ratio": max_ratio,
        "rows": rows,
        "digest_count": max(digest_count, len(ranked)),
        "one": scale.position(1.0),
        "limit": scale.position(max_ratio),
        "scatter": _build_scatter(rows),
    }


def _digest_row(entry: DigestComparison, max_ratio: float, scale: LogScale) -> DigestRow:
    change = "same"
    if is_slower(entry, max_ratio):
        change = "slower"
    elif entry.ratio is not None and entry.ratio_high is not None and entry.ratio_high < 1.0:
        change = "faster"
    bar = None
    if entry.ratio is not None:
        bounds = (entry.ratio_low, entry.ratio, entry.ratio_high)
        bar = IntervalBar(*(scale.position(entry.ratio if value is None else value) for value in bounds))
    return DigestRow(entry, change, bar)


def _ratio_scale(entries: Iterable[DigestComparison], max_ratio: float) -> LogScale:
    """Return a scale with the ratio 1 in the middle."""
    values = [value for entry in entries for value in (entry.ratio, entry.ratio_low, entry.ratio_high)]
    positive = [value for value in values if value is not None and value > 0]
    distances = [max(value, 1 / value) for value in positive]
    reach = min(max([_MIN_RATIO_RANGE, 1.1 * max_ratio, *distances]), _MAX_RATIO_RANGE)
    return LogScale(1 / reach, reach, 2, INTERVAL_WIDTH - 2)


def _build_scatter(rows: Iterable[DigestRow]) -> Scatter | None:
    """Return the chart of the digests that have medians on both sides; None if there are none."""
    medians = [
        (row, row.entry.old.median_us, row.entry.new.median_us)
        for row in rows
        if row.entry.old.median_us and row.entry.new.median_us
    ]
    values = [value for _, old, new in medians for value in (old, new) if value is not None]
    if not values:
        return None
    # Both axes have the same scale, in whole powers of ten, so that equal medians are on the diagonal.
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    x = LogScale(10.0**low, 10.0**high, _MARGIN_LEFT, SCATTER_WIDTH - _MARGIN_RIGHT)
    y = LogScale(10.0**low, 10.0**high, SCATTER_HEIGHT - _MARGIN_BOTTOM, _MARGIN_TOP)
    points = tuple(ScatterPoint(x.position(old or 0), y.position(new or 0), row) for row, old, new in medians)
    powers = [10.0**exponent for exponent in range(low, high + 1)]
    return Scatter(
        points,
        tuple(Tick(x.position(power), power) for power in powers),
        tuple(Tick(y.position(power), power) for power in powers),
    )
