"""What the samples of a simulation amount to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import mul
from statistics import fmean

UNEVEN_THRESHOLD = 1.10
_SETTLED_SAMPLES = 10  # samples in a row below that, for it to be over
_OSCILLATION_LAGS = range(1, 61)


def quantile(share: float, samples: Sequence[float]) -> float:
    """The smallest sample that so many do not exceed; at least one sample."""
    ordered = sorted(samples)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def fraction_above(limit: float, samples: Sequence[float]) -> float:
    """Which part of the samples exceeds a limit."""
    return sum(sample > limit for sample in samples) / len(samples)


def samples_until_settled(samples: Sequence[float], limit: float = UNEVEN_THRESHOLD) -> int | None:
    """After how many samples they are below the limit, and stay so for ten; None: never."""
    below = 0
    for position, sample in enumerate(samples):
        below = below + 1 if sample < limit else 0
        if below == _SETTLED_SAMPLES:
            return position + 1 - _SETTLED_SAMPLES
    return None


def autocorrelations(series: Sequence[Sequence[float]], lags: range) -> list[float]:
    """By lag, how far all series repeat themselves after so many samples: 1 wholly, -1 turned round."""
    centred = []
    for each in series:
        mean = fmean(each)
        centred.append([sample - mean for sample in each])
    power = sum(sum(map(mul, each, each)) for each in centred)
    if not power:
        return [0.0 for _ in lags]
    return [sum(sum(map(mul, each, islice(each, lag, None))) for each in centred) / power for lag in lags]


def oscillation(series: Sequence[Sequence[float]]) -> float:
    """How much of a swing comes back: by how much the autocorrelation, up to 60 samples, rises again.

    What is off by chance fades away, so there is none; what is slow may carry one, all above 0.
    """
    rise, lowest = 0.0, 1.0
    for value in autocorrelations(series, _OSCILLATION_LAGS):
        rise = max(rise, value - lowest)
        lowest = min(lowest, value)
    return rise
