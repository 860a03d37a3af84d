"""Traffic history of the last minutes: a ring of points per node, computed from monotonic counters.

Times are Unix seconds. A point covers the time since the previous point; unknown values are None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from controlplane.model.traffic import EMPTY_BUCKETS, quantile

INTERVAL_SECONDS = 5.0  # between two points
MAX_POINTS = 120  # ten minutes

# No rate is computed between two points that are further apart than this many intervals.
_MAX_GAP_INTERVALS = 4
_P95_QUANTILE = 0.95


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """The counters of one node, or of all nodes together, at one time."""

    sessions: int | None = None  # None: no Envoy has reported yet
    commands: int | None = None  # since the Envoys started; None: no module reports
    buckets: tuple[int, ...] = EMPTY_BUCKETS  # latency buckets of the commands, as in `Traffic`


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The traffic of one node, or of all nodes together, at one time."""

    at: float
    sessions: int | None = None
    rate: float | None = None  # commands per second
    p95: float | None = None  # seconds from a command to the end of its response


@dataclass(slots=True)
class _Series:
    points: deque[HistoryPoint]
    last_sample: TrafficSample
    reporting_envoys: Collection[str]


class History:
    """The points of each name, oldest first. Memory is bounded by the number of names."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._series: dict[str, _Series] = {}

    def put(
        self,
        name: str,
        at: float,
        sample: TrafficSample,
        reporting_envoys: Collection[str],
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        """Add a sample of `reporting_envoys`; `interval`: seconds between two samples at present.

        No rate is computed when these Envoys change: one that joins or leaves with its counters would look
        like a burst of commands or like no commands.
        """
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = _Series(deque(maxlen=self._max_points), sample, reporting_envoys)
            series.points.append(HistoryPoint(at, sample.sessions))
            return
        elapsed = at - series.points[-1].at
        if elapsed <= 0:
            return
        is_comparable = (
            reporting_envoys == series.reporting_envoys and elapsed <= _MAX_GAP_INTERVALS * interval
        )
        rate, p95 = _rate_and_p95(series.last_sample, sample, elapsed) if is_comparable else (None, None)
        series.points.append(HistoryPoint(at, sample.sessions, rate, p95))
        series.last_sample, series.reporting_envoys = sample, reporting_envoys

    def retain(self, names: Iterable[str]) -> None:
        """Remove all names other than these."""
        retained = set(names)
        for name in self._series.keys() - retained:
            del self._series[name]

    def points(self, name: str) -> tuple[HistoryPoint, ...]:
        """Return all points of one name; an empty tuple if it is unknown."""
        series = self._series.get(name)
        return tuple(series.points) if series is not None else ()

    def latest(self, name: str) -> HistoryPoint | None:
        """Return the last point of one name, or None if it is unknown."""
        series = self._series.get(name)
        return series.points[-1] if series is not None else None


def to_columns(points: Iterable[HistoryPoint]) -> Mapping[str, list[float | None]]:
    """Convert points to the columns of a chart: `at`, `sessions`, `rate` and `p95`, each a list."""
    rows = list(points)
    return {
        "at": [round(point.at, 1) for point in rows],
        "sessions": [point.sessions for point in rows],
        "rate": [None if point.rate is None else round(point.rate, 2) for point in rows],
        "p95": [None if point.p95 is None else round(point.p95, 6) for point in rows],
    }


def _rate_and_p95(
    before: TrafficSample, after: TrafficSample, seconds: float
) -> tuple[float | None, float | None]:
    """Return commands per second and their p95 latency between two samples; None after an Envoy restart."""
    if before.commands is None or after.commands is None or after.commands < before.commands:
        return None, None
    buckets = tuple(new - old for new, old in zip(after.buckets, before.buckets, strict=True))
    p95 = quantile(_P95_QUANTILE, buckets) if all(count >= 0 for count in buckets) else None
    return (after.commands - before.commands) / seconds, p95
