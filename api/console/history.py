"""What nodes carried in the last minutes: a short ring of points for each, made from counts that only grow.

Times are Unix seconds. A point tells of the time since the one before; what cannot be known of it is None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from controlplane.model.traffic import EMPTY_BUCKETS, quantile

INTERVAL_SECONDS = 5.0  # seconds between two points
MAX_POINTS = 120  # points: ten minutes

# Points further apart than this have a gap between them, over which no rate is told.
_MAX_GAP_SECONDS = 4 * INTERVAL_SECONDS
_P95_QUANTILE = 0.95


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """What was counted of one node, or of all, at one moment."""

    sessions: int | None = None  # None: no Envoy has told yet
    commands: int | None = None  # since the Envoys started; None: no module tells
    buckets: tuple[int, ...] = EMPTY_BUCKETS  # of their latency, as in `Traffic`


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """What one node, or all, carried at one moment."""

    at: float
    sessions: int | None = None
    rate: float | None = None  # commands a second
    p95: float | None = None  # seconds from a command to the end of its response


@dataclass(slots=True)
class _Series:
    points: deque[HistoryPoint]
    last_sample: TrafficSample
    reporting_envoys: Collection[str]


class History:
    """The points of each name, the oldest first. Memory is bounded by the number of names."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._series: dict[str, _Series] = {}

    def put(self, name: str, at: float, sample: TrafficSample, reporting_envoys: Collection[str]) -> None:
        """A new count. `tellers` are the Envoys that it is of.

        One that came with its counts, or left with them, would look like a burst of commands, or like none.
        """
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = _Series(deque(maxlen=self._max_points), sample, reporting_envoys)
            series.points.append(HistoryPoint(at, sample.sessions))
            return
        last = series.points[-1].at
        if at <= last:
            return
        is_comparable = reporting_envoys == series.reporting_envoys and at - last <= _MAX_GAP_SECONDS
        rate, p95 = _rate_and_p95(series.last_sample, sample, at - last) if is_comparable else (None, None)
        series.points.append(HistoryPoint(at, sample.sessions, rate, p95))
        series.last_sample, series.reporting_envoys = sample, reporting_envoys

    def retain(self, names: Iterable[str]) -> None:
        """Forget all others."""
        known = set(names)
        for name in self._series.keys() - known:
            del self._series[name]

    def points(self, name: str) -> tuple[HistoryPoint, ...]:
        """All points of one name; none when it is not known."""
        series = self._series.get(name)
        return tuple(series.points) if series is not None else ()

    def latest(self, name: str) -> HistoryPoint | None:
        """The last point of one name."""
        series = self._series.get(name)
        return series.points[-1] if series is not None else None


def to_columns(points: Iterable[HistoryPoint]) -> Mapping[str, list[float | None]]:
    """Points as a chart takes them: `at`, `sessions`, `rate` and `p95`, each a list."""
    each = list(points)
    return {
        "at": [round(point.at, 1) for point in each],
        "sessions": [point.sessions for point in each],
        "rate": [None if point.rate is None else round(point.rate, 2) for point in each],
        "p95": [None if point.p95 is None else round(point.p95, 6) for point in each],
    }


def _rate_and_p95(
    before: TrafficSample, after: TrafficSample, seconds: float
) -> tuple[float | None, float | None]:
    """Commands a second and their 95th percentile between two counts; None where an Envoy began anew."""
    if before.commands is None or after.commands is None or after.commands < before.commands:
        return None, None
    buckets = tuple(now - then for now, then in zip(after.buckets, before.buckets, strict=True))
    p95 = quantile(_P95_QUANTILE, buckets) if all(more >= 0 for more in buckets) else None
    return (after.commands - before.commands) / seconds, p95
