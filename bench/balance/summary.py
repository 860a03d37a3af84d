"""What one simulation amounts to, small enough to be kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bench.balance.imbalance_statistics import UNEVEN, above, oscillation, quantile, settling
from bench.balance.simulation import Event, Record

SHARE = 0.9
"""Of its share of the sessions, what a node has that has joined well."""
_MINUTE = 60
_SHOWN = 120  # seconds behind a change that are kept
_CALM = 120  # seconds behind a change that are no steady state


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came of nodes that joined or left."""

    name: str
    at: int  # seconds since the warm-up
    settled: (
        int | None
    )  # seconds until max/mean is below 1.10 for ten seconds; None: not before the next change
    shared: int | None  # seconds until those that joined have nine tenths of their share
    worst: float  # max/mean of the minute behind it
    imbalances: tuple[float, ...]  # by second, of two minutes

    @property
    def is_join(self) -> bool:
        """Whether nodes joined, and none left."""
        return "join" in self.name


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one balancer in one case. Imbalances are max/mean, 1 where nothing could be better."""

    case: str  # its letter
    balancer: str
    least: float
    median: float
    mean: float
    p99: float
    most: float
    steady: float  # median of the time that is over two minutes behind any change
    uneven: float  # part of the time above 1.10
    moves_per_hour: float
    hasty: int  # moves of a session less than a minute after the one before
    shortest_stay: float | None  # seconds between two moves of one session; None: none has moved twice
    swing: float  # by how much the autocorrelation of deviations rises again
    sessions: float
    minutes: tuple[float, ...]  # the median of each minute
    recoveries: tuple[Recovery, ...]


def outcome(record: Record) -> Outcome:
    """The figures of what was seen."""
    seen = record.imbalances
    return Outcome(
        case=record.case.letter,
        balancer=record.balancer,
        least=min(seen),
        median=median(seen),
        mean=fmean(seen),
        p99=quantile(0.99, seen),
        most=max(seen),
        steady=median(_steady(seen, record.events) or seen),
        uneven=above(UNEVEN, seen),
        moves_per_hour=record.moves / len(seen) * 3_600,
        hasty=record.hasty,
        shortest_stay=record.shortest_stay if record.shortest_stay < float("inf") else None,
        swing=oscillation(record.deviations),
        sessions=record.sessions,
        minutes=tuple(median(seen[start : start + _MINUTE]) for start in range(0, len(seen), _MINUTE)),
        recoveries=tuple(_recovery(event) for event in record.events),
    )


def _steady(seen: Sequence[float], events: Sequence[Event]) -> list[float]:
    changing = {second for event in events for second in range(event.at, event.at + _CALM)}
    return [each for second, each in enumerate(seen) if second not in changing]


def _recovery(event: Event) -> Recovery:
    return Recovery(
        name=event.change.name,
        at=event.at,
        settled=settling(event.imbalances),
        shared=next((second for second, part in enumerate(event.shares) if part >= SHARE), None),
        worst=max(event.imbalances[:_MINUTE]),
        imbalances=event.imbalances[:_SHOWN],
    )
