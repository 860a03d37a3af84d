"""Summary of one simulation. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bench.balance.cases import TopologyChange
from bench.balance.simulation import ObservedChange, SimulationRecord
from bench.reporting.report import Spread

UNEVEN_THRESHOLD = 1.10
JOINED_SHARE_TARGET = 0.9
"""Fraction of the mean load that the joined nodes must reach."""
NEVER_SECONDS = 3_600
"""Stands for "never": the default length of a simulation."""
_SETTLED_SAMPLES = 10  # consecutive samples below the threshold that count as settled
_MAX_OSCILLATION_LAG = 60
_MINUTE_SECONDS = 60
_RECOVERY_SECONDS = 120  # time after a change that does not count as steady state and has its own chart


@dataclass(frozen=True, slots=True)
class Recovery:
    """The time after nodes joined or left."""

    change: TopologyChange
    # Seconds until max/mean stays below 1.10 for ten seconds, or NEVER_SECONDS if the next change came first.
    settled_after: int
    shared_after: int  # seconds until the joined nodes reach JOINED_SHARE_TARGET, or NEVER_SECONDS
    imbalances: tuple[float, ...]  # per second, for two minutes


@dataclass(frozen=True, slots=True)
class SimulationSummary:
    """The figures of one balancer in one case. Imbalances are max/mean; 1 is optimal."""

    record: SimulationRecord
    imbalance: Spread
    mean: float
    steady_median: float  # median without the two minutes after each change
    uneven_fraction: float  # fraction of the time above 1.10
    moves_per_hour: float
    oscillation: float
    minute_medians: tuple[float, ...]
    recoveries: tuple[Recovery, ...]


def summarize(record: SimulationRecord) -> SimulationSummary:
    imbalances = record.imbalances
    return SimulationSummary(
        record=record,
        imbalance=Spread.of(imbalances),
        mean=fmean(imbalances),
        steady_median=median(_steady_samples(imbalances, record.changes) or imbalances),
        uneven_fraction=fmean(imbalance > UNEVEN_THRESHOLD for imbalance in imbalances),
        moves_per_hour=record.moves / len(imbalances) * 3_600,
        oscillation=oscillation(record.deviations),
        minute_medians=tuple(
            median(imbalances[start : start + _MINUTE_SECONDS])
            for start in range(0, len(imbalances), _MINUTE_SECONDS)
        ),
        recoveries=tuple(_make_recovery(change) for change in record.changes),
    )


def samples_until_settled(samples: Sequence[float], limit: float = UNEVEN_THRESHOLD) -> int:
    """Return the position at which ten samples in a row below the limit begin, or NEVER_SECONDS."""
    below = 0
    for position, sample in enumerate(samples):
        below = below + 1 if sample < limit else 0
        if below == _SETTLED_SAMPLES:
            return position + 1 - _SETTLED_SAMPLES
    return NEVER_SECONDS


def oscillation(series: Sequence[Sequence[float]]) -> float:
    """Return the largest rise of the autocorrelation up to a lag of 60. All series have the same length.

    Random deviations fade, so their autocorrelation does not rise with the lag. If an oscillation is added to
    a slow deviation, the autocorrelation stays above 0, so the rise counts from the lowest value so far.
    """
    import numpy as np  # the import is slow, and most commands do not need it

    samples = np.asarray(series)
    samples = samples - samples.mean(axis=1, keepdims=True)
    power = (samples**2).sum()
    if not power:
        return 0.0
    rise, lowest = 0.0, 1.0
    for lag in range(1, _MAX_OSCILLATION_LAG + 1):
        correlation = float((samples[:, lag:] * samples[:, :-lag]).sum() / power)
        rise = max(rise, correlation - lowest)
        lowest = min(lowest, correlation)
    return rise


def _steady_samples(imbalances: Sequence[float], changes: Sequence[ObservedChange]) -> list[float]:
    changing = {second for change in changes for second in range(change.at, change.at + _RECOVERY_SECONDS)}
    return [imbalance for second, imbalance in enumerate(imbalances) if second not in changing]


def _make_recovery(observed: ObservedChange) -> Recovery:
    reached = (second for second, share in enumerate(observed.shares) if share >= JOINED_SHARE_TARGET)
    return Recovery(
        change=observed.change,
        settled_after=samples_until_settled(observed.imbalances),
        shared_after=next(reached, NEVER_SECONDS),
        imbalances=observed.imbalances[:_RECOVERY_SECONDS],
    )
