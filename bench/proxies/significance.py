"""Ratios between two proxies, their confidence intervals and verdicts.

All functions are pure. Blocks are paired: value i of one proxy was measured within a second of value i of the
other one. scipy is imported where it is used: it would double the time that `tidevoy --help` takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Self

CONFIDENCE = 0.99
NEGLIGIBLE_DIFFERENCE = 0.02
"""A difference up to this counts as equal, however narrow its interval: two processes of one build differ by
up to 1.6 %, since their memory layouts differ."""
MAX_EQUAL_DEVIATION = 0.05
"""An interval that extends further from 1 than this cannot prove equality."""
_TRIMMED_FRACTION = 0.2  # at each end: removes blocks in which the host took the CPU away
_MIN_SPREAD = 1e-9
_RESAMPLES = 4_000
_SEED = 17  # so that the same measurements always give the same interval


class RatioVerdict(StrEnum):
    """The conclusion from a ratio, where lower is better."""

    BETTER = "better"
    EQUAL = "equal"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], reference: Sequence[float]) -> Self:
        """Return the trimmed geometric mean of the blocks' ratios (without the highest and the lowest fifth).

        Values must be above 0. The interval is bootstrapped (BCa) over blocks. Raises ValueError if the
        numbers of blocks differ or are below 3.
        """
        if len(values) != len(reference) or len(values) < 3:
            raise ValueError(f"{len(values)} and {len(reference)} blocks cannot be compared")
        import numpy as np
        from scipy import stats

        logarithms = np.log(values) - np.log(reference)
        mean = partial(stats.trim_mean, proportiontocut=_TRIMMED_FRACTION)
        value = math.exp(mean(logarithms))
        if np.ptp(logarithms) < _MIN_SPREAD:  # the bootstrap fails without any spread
            return cls(value, value, value)
        interval = stats.bootstrap(
            (logarithms,),
            mean,
            confidence_level=CONFIDENCE,
            n_resamples=_RESAMPLES,
            rng=np.random.default_rng(_SEED),
        ).confidence_interval
        return cls(value, math.exp(interval.low), math.exp(interval.high))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Parse the data of `dataclasses.asdict`."""
        return cls(data["value"], data["low"], data["high"])

    @property
    def max_deviation(self) -> float:
        """How far the interval extends from 1."""
        return max(abs(self.low - 1), abs(self.high - 1))

    @property
    def verdict(self) -> RatioVerdict:
        """The verdict; worse and better need an interval that excludes 1 and a difference that matters."""
        if self.low > 1 and self.value > 1 + NEGLIGIBLE_DIFFERENCE:
            return RatioVerdict.WORSE
        if self.high < 1 and self.value < 1 - NEGLIGIBLE_DIFFERENCE:
            return RatioVerdict.BETTER
        return RatioVerdict.EQUAL if self.max_deviation <= MAX_EQUAL_DEVIATION else RatioVerdict.UNCLEAR

    def describe_verdict(self) -> str:
        """Return the verdict as a phrase, such as `equal within 1.4 %`."""
        if self.verdict is RatioVerdict.EQUAL:
            return f"equal within {self.max_deviation:.1%}".replace("%", " %")
        if self.verdict is RatioVerdict.UNCLEAR:
            return "unclear: the interval is too wide"
        return str(self.verdict)

    def __str__(self) -> str:
        """Such as `1.02 (0.99 to 1.05)`."""
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def overall_verdict(verdicts: Iterable[RatioVerdict]) -> RatioVerdict:
    """Return worse if any is worse, else unclear if any is, else better if any is, else equal."""
    present = set(verdicts)
    for verdict in (RatioVerdict.WORSE, RatioVerdict.UNCLEAR, RatioVerdict.BETTER):
        if verdict in present:
            return verdict
    return RatioVerdict.EQUAL


@dataclass(frozen=True, slots=True)
class LatencyDifference:
    """The difference of a latency percentile between two proxies in milliseconds, with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(
        cls, blocks: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], quantile: float
    ) -> Self:
        """Compare latencies by block; both need as many blocks. The interval is bootstrapped over blocks."""
        import numpy as np

        values, reference_values = ([np.asarray(block) for block in side] for side in (blocks, reference))

        def difference(block_numbers: Iterable[int]) -> float:
            numbers = list(block_numbers)
            value, reference_value = (
                np.quantile(np.concatenate([side[number] for number in numbers]), quantile)
                for side in (values, reference_values)
            )
            return float(value - reference_value)

        random = np.random.default_rng(_SEED)
        count = len(values)
        resampled = [difference(random.integers(count, size=count)) for _ in range(_RESAMPLES // 4)]
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(resampled, [tail, 1 - tail])
        return cls(difference(range(count)), float(low), float(high))

    def __str__(self) -> str:
        """Such as `0.12 (0.10 to 0.15)`."""
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"
