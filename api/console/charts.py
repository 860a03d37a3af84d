"""Traffic of the last minutes for the charts: samples of monotonic counters, and the rates between them.

Times are Unix seconds. A point covers the time since the previous point; unknown values are None.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

import structlog
from fastapi import Depends, Request

from controlplane.engine.engine import Engine
from controlplane.errors import UnknownNode
from controlplane.model.traffic import EMPTY_BUCKETS, quantile

log = structlog.get_logger("tidevoy.console")

INTERVAL_SECONDS = 5.0  # between two points
MAX_POINTS = 120  # ten minutes
FLEET_KEY = ""  # the key of all nodes together in the history

# No rate is computed between two points that are further apart than this many intervals.
_MAX_GAP_INTERVALS = 4
_P95_QUANTILE = 0.95
# The sampler works in slices of this length, so that it never blocks the loop for longer.
_MAX_SLICE_SECONDS = 0.005
# The sampler pauses between two slices, so that it uses at most this share of a core. With 5,000 nodes and
# 100 Envoys, a sample of all nodes takes seconds of CPU time, so points are minutes apart.
_MAX_CPU_SHARE = 0.02

SPARKLINE_WIDTH, SPARKLINE_HEIGHT = 120, 28
_SPARKLINE_MARGIN = 2


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """The counters of one node, or of all nodes together, at one time."""

    sessions: int | None = None  # None before the first report of an Envoy
    commands: int | None = None  # since the Envoys started; None if no module reports
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
    reporting_envoys: frozenset[str] | None


class History:
    """The last `max_points` points of each key. A key is a node's address or FLEET_KEY."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._series: dict[str, _Series] = {}

    def put(
        self,
        key: str,
        at: float,
        sample: TrafficSample,
        reporting_envoys: frozenset[str] | None,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        """Add a sample; `interval` is the current number of seconds between samples.

        `reporting_envoys` are the Envoys whose counters the sample sums, or None if Envoys joined or left
        meanwhile. If they change, no rate is computed, because the counters of an Envoy that joins or leaves
        would look like a burst of commands or like no commands.
        """
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series(deque(maxlen=self._max_points), sample, reporting_envoys)
            series.points.append(HistoryPoint(at, sample.sessions))
            return
        elapsed = at - series.points[-1].at
        if elapsed <= 0:
            return
        is_comparable = (
            reporting_envoys is not None
            and reporting_envoys == series.reporting_envoys
            and elapsed <= _MAX_GAP_INTERVALS * interval
        )
        rate, p95 = _rate_and_p95(series.last_sample, sample, elapsed) if is_comparable else (None, None)
        series.points.append(HistoryPoint(at, sample.sessions, rate, p95))
        series.last_sample, series.reporting_envoys = sample, reporting_envoys

    def retain(self, keys: Iterable[str]) -> None:
        """Remove all keys other than these."""
        for key in self._series.keys() - set(keys):
            del self._series[key]

    def points(self, key: str) -> tuple[HistoryPoint, ...]:
        """Return all points of one key, oldest first; an empty tuple if the key is unknown."""
        series = self._series.get(key)
        return tuple(series.points) if series is not None else ()

    def latest(self, key: str) -> HistoryPoint | None:
        """Return the last point of one key, or None if the key is unknown."""
        series = self._series.get(key)
        return series.points[-1] if series is not None else None


class TrafficSampler:
    """Samples the traffic of all nodes periodically, without blocking the event loop for long."""

    def __init__(self, engine: Engine) -> None:
        self.history = History()
        self._engine = engine

    async def run(self) -> None:
        """Keep the history up to date until cancelled. An error is logged and ends only the sampling."""
        loop = asyncio.get_running_loop()
        interval = INTERVAL_SECONDS
        try:
            while True:
                started_at = loop.time()
                await self._take_sample(interval)
                duration = loop.time() - started_at
                interval = max(INTERVAL_SECONDS, duration)
                await asyncio.sleep(max(INTERVAL_SECONDS - duration, rest_seconds(_MAX_SLICE_SECONDS)))
        except Exception:
            log.exception("the charts get no more samples; restart the control plane")

    async def _take_sample(self, interval: float) -> None:
        """Add one point for each node, and one for all of them together."""
        loop = asyncio.get_running_loop()
        plan = self._engine.cluster.plan
        reporting_envoys = self._reporting_envoys()
        fleet_envoys: frozenset[str] | None = reporting_envoys  # None once Envoys have joined or left
        samples: list[TrafficSample] = []
        slice_start = loop.time()
        for address in plan.nodes:
            if (worked := loop.time() - slice_start) > _MAX_SLICE_SECONDS:
                await asyncio.sleep(rest_seconds(worked))
                slice_start = loop.time()
                reporting_envoys = self._reporting_envoys()
                if reporting_envoys != fleet_envoys:
                    fleet_envoys = None
            try:
                view = self._engine.cluster.node(address)
            except UnknownNode:
                continue  # removed meanwhile
            sample = TrafficSample(view.sessions)
            if (traffic := view.traffic) is not None:
                sample = TrafficSample(view.sessions, sum(traffic.commands.values()), traffic.latency_buckets)
            samples.append(sample)
            self.history.put(address, self._engine.cluster.now(), sample, reporting_envoys, interval)
        self.history.put(FLEET_KEY, self._engine.cluster.now(), _sum_samples(samples), fleet_envoys, interval)
        self.history.retain([FLEET_KEY, *plan.nodes])

    def _reporting_envoys(self) -> frozenset[str]:
        facts = self._engine.cluster.facts
        return frozenset(facts.module_reports)


async def _get_history(request: Request) -> History:
    sampler: TrafficSampler = request.app.state.traffic_sampler
    return sampler.history


HistoryDep = Annotated[History, Depends(_get_history)]


def rest_seconds(worked: float) -> float:
    """Return how long to pause after `worked` seconds of work."""
    return worked / _MAX_CPU_SHARE - worked


def sum_known(counts: Iterable[int | None]) -> int | None:
    """Return the sum of the known counts, or None if none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _sum_samples(samples: Collection[TrafficSample]) -> TrafficSample:
    buckets = tuple(map(sum, zip(EMPTY_BUCKETS, *(sample.buckets for sample in samples), strict=True)))
    return TrafficSample(
        sum_known(sample.sessions for sample in samples),
        sum_known(sample.commands for sample in samples),
        buckets,
    )


def _rate_and_p95(
    before: TrafficSample, after: TrafficSample, seconds: float
) -> tuple[float | None, float | None]:
    """Return commands per second and their p95 latency between two samples; None after an Envoy restart."""
    if before.commands is None or after.commands is None or after.commands < before.commands:
        return None, None
    buckets = tuple(new - old for new, old in zip(after.buckets, before.buckets, strict=True))
    p95 = quantile(_P95_QUANTILE, buckets) if all(count >= 0 for count in buckets) else None
    return (after.commands - before.commands) / seconds, p95


def to_columns(points: Iterable[HistoryPoint]) -> Mapping[str, list[float | None]]:
    """Convert points to the columns of a chart: `at`, `sessions`, `rate` and `p95`, each a list."""
    rows = list(points)
    return {
        "at": [round(point.at, 1) for point in rows],
        "sessions": [point.sessions for point in rows],
        "rate": [None if point.rate is None else round(point.rate, 2) for point in rows],
        "p95": [None if point.p95 is None else round(point.p95, 6) for point in rows],
    }


def sparkline(values: Sequence[float | None], slots: int) -> list[str]:
    """Return the `points` of an SVG polyline for each run of known values, newest at the right.

    The scale starts at 0.
    """
    max_value = max((value for value in values if value is not None), default=0.0) or 1.0
    step = SPARKLINE_WIDTH / max(slots - 1, 1)
    bottom = SPARKLINE_HEIGHT - _SPARKLINE_MARGIN
    height = bottom - _SPARKLINE_MARGIN
    lines: list[str] = []
    for is_known, run in groupby(enumerate(values, slots - len(values)), lambda item: item[1] is not None):
        points = [f"{x * step:.1f},{bottom - (value or 0) / max_value * height:.1f}" for x, value in run]
        if is_known and len(points) > 1:
            lines.append(" ".join(points))
    return lines
