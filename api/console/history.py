"""What nodes carried in the last minutes: a short ring of points for each, made from counts that only grow.

Times are Unix seconds. A point tells of the time since the one before; what cannot be known of it is None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from controlplane.model.traffic import NO_BUCKETS, quantile

INTERVAL = 5.0  # seconds between two points
KEPT = 120  # points: ten minutes

# Points further apart than this have a gap between them, over which no rate is told.
_LONGEST = 4 * INTERVAL
_P95 = 0.95


@dataclass(frozen=True, slots=True)
class Count:
    """What was counted of one node, or of all, at one moment."""

    sessions: int | None = None  # None: no Envoy has told yet
    commands: int | None = None  # since the Envoys started; None: no module tells
    buckets: tuple[int, ...] = NO_BUCKETS  # of their latency, as in `Traffic`


@dataclass(frozen=True, slots=True)
class Point:
    """What one node, or all, carried at one moment."""

    at: float
    sessions: int | None = None
    rate: float | None = None  # commands a second
    p95: float | None = None  # seconds from a command to the end of its response


@dataclass(slots=True)
class _Ring:
    points: deque[Point]
    count: Count
    tellers: Collection[str]


class History:
    """The points of each name, the oldest first. Memory is bounded by the number of names."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._rings: dict[str, _Ring] = {}

    def put(self, name: str, at: float, count: Count, tellers: Collection[str]) -> None:
        """A new count. `tellers` are the Envoys that it is of.

        One that came with its counts, or left with them, would look like a burst of commands, or like none.
        """
        ring = self._rings.get(name)
        if ring is None:
            ring = self._rings[name] = _Ring(deque(maxlen=self._kept), count, tellers)
            ring.points.append(Point(at, count.sessions))
            return
        last = ring.points[-1].at
        if at <= last:
            return
        is_comparable = tellers == ring.tellers and at - last <= _LONGEST
        rate, p95 = _since(ring.count, count, at - last) if is_comparable else (None, None)
        ring.points.append(Point(at, count.sessions, rate, p95))
        ring.count, ring.tellers = count, tellers

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others."""
        known = set(names)
        for name in self._rings.keys() - known:
            del self._rings[name]

    def of(self, name: str) -> tuple[Point, ...]:
        """All points of one name; none when it is not known."""
        ring = self._rings.get(name)
        return tuple(ring.points) if ring is not None else ()

    def latest(self, name: str) -> Point | None:
        """The last point of one name."""
        ring = self._rings.get(name)
        return ring.points[-1] if ring is not None else None


def columns(points: Iterable[Point]) -> Mapping[str, list[float | None]]:
    """Points as a chart takes them: `at`, `sessions`, `rate` and `p95`, each a list."""
    each = list(points)
    return {
        "at": [round(point.at, 1) for point in each],
        "sessions": [point.sessions for point in each],
        "rate": [None if point.rate is None else round(point.rate, 2) for point in each],
        "p95": [None if point.p95 is None else round(point.p95, 6) for point in each],
    }


def _since(before: Count, after: Count, seconds: float) -> tuple[float | None, float | None]:
    """Commands a second and their 95th percentile between two counts; None where an Envoy began anew."""
    if before.commands is None or after.commands is None or after.commands < before.commands:
        return None, None
    buckets = tuple(now - then for now, then in zip(after.buckets, before.buckets, strict=True))
    p95 = quantile(_P95, buckets) if all(more >= 0 for more in buckets) else None
    return (after.commands - before.commands) / seconds, p95
