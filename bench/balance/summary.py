"""Summary of one simulation. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bench.balance.imbalance_statistics import (
    UNEVEN_THRESHOLD,
    fraction_above,
    oscillation,
    quantile,
    samples_until_settled,
)
from bench.balance.simulation import ObservedChange, SimulationRecord

JOINED_SHARE_TARGET = 0.9
"""Fraction of its share of sessions that a joined node must reach."""
_MINUTE_SECONDS = 60
_RECOVERY_SECONDS = 120  # time after a change whose samples are kept
_UNSTEADY_SECONDS = 120  # time after a change that does not count as steady state


@dataclass(frozen=True, slots=True)
class Recovery:
    """The time after nodes joined or left."""

    name: str
    at: int  # seconds since the warm-up
    # Seconds until max/mean is below 1.10 for ten seconds; None: not before the next change.
    settled_after: int | None
    shared_after: int | None  # seconds until the joined nodes have nine tenths of their share
    worst_imbalance: float  # max/mean in the minute after the change
    imbalances: tuple[float, ...]  # by second, for two minutes

    @property
    def is_join(self) -> bool:
        """Whether nodes joined rather than left."""
        return "join" in self.name


@dataclass(frozen=True, slots=True)
class SimulationSummary:
    """The figures of one balancer in one case. Imbalances are max/mean; 1 is optimal."""

    case: str  # its letter
    balancer: str
    lowest: float
    median: float
    mean: float
    p99: float
    highest: float
    steady_median: float  # median without the two minutes after each change
    uneven_fraction: float  # fraction of the time above 1.10
    moves_per_hour: float
    hasty_moves: int  # migrations of a session less than a minute after its last one
    shortest_stay: float | None  # seconds between two migrations of a session; None: no session had two
    oscillation: float  # by how much the autocorrelation of deviations rises again
    sessions: float
    minute_medians: tuple[float, ...]  # the median of each minute
    recoveries: tuple[Recovery, ...]


def summarize(record: SimulationRecord) -> SimulationSummary:
    """Summarize the samples of a simulation."""
    imbalances = record.imbalances
    return SimulationSummary(
        case=record.case.letter,
        balancer=record.balancer,
        lowest=min(imbalances),
        median=median(imbalances),
        mean=fmean(imbalances),
        p99=quantile(0.99, imbalances),
        highest=max(imbalances),
        steady_median=median(_steady_samples(imbalances, record.events) or imbalances),
        uneven_fraction=fraction_above(UNEVEN_THRESHOLD, imbalances),
        moves_per_hour=record.moves / len(imbalances) * 3_600,
        hasty_moves=record.hasty_moves,
        shortest_stay=record.shortest_stay if record.shortest_stay < float("inf") else None,
        oscillation=oscillation(record.deviations),
        sessions=record.sessions,
        minute_medians=tuple(
            median(imbalances[start : start + _MINUTE_SECONDS])
            for start in range(0, len(imbalances), _MINUTE_SECONDS)
        ),
        recoveries=tuple(_make_recovery(event) for event in record.events),
    )


def _steady_samples(imbalances: Sequence[float], events: Sequence[ObservedChange]) -> list[float]:
    changing = {second for event in events for second in range(event.at, event.at + _UNSTEADY_SECONDS)}
    return [imbalance for second, imbalance in enumerate(imbalances) if second not in changing]


def _make_recovery(event: ObservedChange) -> Recovery:
    return Recovery(
        name=event.change.name,
        at=event.at,
        settled_after=samples_until_settled(event.imbalances),
        shared_after=next(
            (second for second, share in enumerate(event.shares) if share >= JOINED_SHARE_TARGET), None
        ),
        worst_imbalance=max(event.imbalances[:_MINUTE_SECONDS]),
        imbalances=event.imbalances[:_RECOVERY_SECONDS],
    )
