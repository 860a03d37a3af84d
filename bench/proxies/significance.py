"""Ratios between two proxies, their confidence intervals and verdicts.

All functions are pure. Blocks are paired: value i of one proxy and value i of the other proxy were measured
within about a second. scipy is imported late: its import would double the run time of `tidevoy --help`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Self

CONFIDENCE = 0.99
NEGLIGIBLE_DIFFERENCE = 0.02
"""Smaller differences count as equal, however narrow the interval is: two processes of one build have
different memory layouts, so their figures differ by up to 1.6 %."""
MAX_EQUAL_DEVIATION = 0.05
"""If the interval extends further from 1 than this, the ratio cannot count as equal."""
_TRIMMED_FRACTION = 0.2  # at each end: removes blocks in which the host took CPU away
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
class Estimate:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Format as `1.02 (0.99 to 1.05)`."""
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


class Ratio(Estimate):
    """A ratio between two proxies."""

    __slots__ = ()

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

    @property
    def max_deviation(self) -> float:
        """How far the interval extends from 1."""
        return max(abs(self.low - 1), abs(self.high - 1))

    @property
    def verdict(self) -> RatioVerdict:
        """WORSE and BETTER need an interval that excludes 1 and a difference above NEGLIGIBLE_DIFFERENCE."""
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


def overall_verdict(verdicts: Iterable[RatioVerdict]) -> RatioVerdict:
    """Return the most important verdict that occurs, in the order WORSE, UNCLEAR, BETTER, EQUAL."""
    present = set(verdicts)
    for verdict in (RatioVerdict.WORSE, RatioVerdict.UNCLEAR, RatioVerdict.BETTER):
        if verdict in present:
            return verdict
    return RatioVerdict.EQUAL


class LatencyDifference(Estimate):
    """The difference of a latency percentile between two proxies, in milliseconds."""

    __slots__ = ()

    @classmethod
    def of(
        cls, blocks: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], quantile: float
    ) -> Self:
        """Compare latencies of equally many blocks. The interval is bootstrapped over blocks."""
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
