"""Statistics of a simulation's samples. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import mul
from statistics import fmean

UNEVEN_THRESHOLD = 1.10
_SETTLED_SAMPLES = 10  # consecutive samples below the threshold that count as settled
_OSCILLATION_LAGS = range(1, 61)


def quantile(share: float, samples: Sequence[float]) -> float:
    """Return the smallest sample that `share` of the samples do not exceed; needs at least one sample."""
    ordered = sorted(samples)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def fraction_above(limit: float, samples: Sequence[float]) -> float:
    """Return the fraction of samples above a limit."""
    return sum(sample > limit for sample in samples) / len(samples)


def samples_until_settled(samples: Sequence[float], limit: float = UNEVEN_THRESHOLD) -> int | None:
    """Return the number of samples until ten consecutive ones are below the limit; None: never."""
    below = 0
    for position, sample in enumerate(samples):
        below = below + 1 if sample < limit else 0
        if below == _SETTLED_SAMPLES:
            return position + 1 - _SETTLED_SAMPLES
    return None


def autocorrelations(series: Sequence[Sequence[float]], lags: range) -> list[float]:
    """Return the joint autocorrelation of all series by lag in samples: 1 identical, -1 inverted."""
    centered = []
    for samples in series:
        mean = fmean(samples)
        centered.append([sample - mean for sample in samples])
    power = sum(sum(map(mul, samples, samples)) for samples in centered)
    if not power:
        return [0.0 for _ in lags]
    return [
        sum(sum(map(mul, samples, islice(samples, lag, None))) for samples in centered) / power
        for lag in lags
    ]


def oscillation(series: Sequence[Sequence[float]]) -> float:
    """Return how much of an oscillation recurs: the rise of the autocorrelation within 60 samples.

    A random deviation only fades, so it has none; a slow deviation may carry an oscillation above 0.
    """
    rise, lowest = 0.0, 1.0
    for value in autocorrelations(series, _OSCILLATION_LAGS):
        rise = max(rise, value - lowest)
        lowest = min(lowest, value)
    return rise
