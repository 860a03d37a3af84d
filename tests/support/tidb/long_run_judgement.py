"""Judges the samples of a long run: nothing may grow after the warm-up.

A quantity is compared in two windows, each a tenth of the run: just after the warm-up, and at the end. Only
samples without a running operation count, so the same nodes exist in all of them. What belongs to one process
of the control plane is judged within its last life, which lasts at least the second half of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from tests.support.tidb.long_run_samples import CONTROL_PLANE, ENVOY, Sample, Sampler

MIN_SECONDS = 1_800
"""Shorter runs are not judged."""
MIB = 1024 * 1024
MEMORY_TOLERANCE, MIN_MEMORY_TOLERANCE_BYTES = 0.05, 4 * MIB
STATE_TOLERANCE_BYTES = 4096
COUNT_TOLERANCE = 2
"""Of descriptors and threads: thread pools grow on demand. A leak in an operation exceeds this many times."""
SERIES_TOLERANCE = 0.05
"""Some series appear when their first rare event occurs."""
LOG_RATE_TOLERANCE = 0.25
"""Operations cause most lines, and two halves of a run do not have exactly the same operations."""
_MIN_WARM_UP_SECONDS, _MAX_WARM_UP_SECONDS = 600, 3600
_START_AGES_SECONDS = (60.0, 300.0)
"""The ages at which different lives of the control plane are compared."""


@dataclass(frozen=True)
class Comparison:
    """A quantity after the warm-up and at the end, and the highest value allowed at the end."""

    quantity: str
    before: float
    after: float
    limit: float

    def __str__(self) -> str:
        verdict = "flat" if self.after <= self.limit else "GROWS"
        return f"{self.quantity}: {self.before:,.0f} -> {self.after:,.0f}, limit {self.limit:,.0f}: {verdict}"


def warm_up_seconds(seconds: float) -> float:
    """Return the warm-up of a run, or of a process, of this length: a quarter, from 10 minutes to an hour."""
    return min(max(seconds / 4, _MIN_WARM_UP_SECONDS), _MAX_WARM_UP_SECONDS)


def judge(sampler: Sampler) -> list[Comparison]:
    """Return all comparisons. Raises ValueError if a window has no samples."""
    samples = [sample for sample in sampler.samples if not sample.operation]
    last_life = [sample for sample in samples if sample.life == samples[-1].life]
    comparisons = []
    for process, own_samples in ((ENVOY, samples), (CONTROL_PLANE, last_life)):
        comparisons.append(_compare(own_samples, f"{process}_memory"))
        comparisons += [
            _compare(own_samples, f"{process}_{count}") for count in ("descriptors", "threads", "series")
        ]
        comparisons.append(_compare_log_rates(samples, f"{process}_log"))
    comparisons.append(_compare(samples, "state"))
    return [*comparisons, *_compare_starts(samples)]


def new_series(sampler: Sampler, process: str, after_seconds: float) -> list[str]:
    """Return the series that first appeared after this time and exist at the end."""
    first_seen = sampler.first_seen[process]
    names = sampler.last_series[process].difference(sampler.removed_series(process))
    return sorted(name for name in names if first_seen[name] > after_seconds)


def _compare(samples: Sequence[Sample], quantity: str) -> Comparison:
    start, end = samples[0].seconds, samples[-1].seconds
    window = (end - start) / 10
    warm = start + warm_up_seconds(end - start)
    before = _median(samples, quantity, warm, warm + window)
    after = _median(samples, quantity, end - window, end)
    return Comparison(quantity, before, after, before + _tolerance(quantity, before))


def _tolerance(quantity: str, before: float) -> float:
    """Return the allowed growth of a quantity."""
    if quantity.endswith("memory"):
        return max(MEMORY_TOLERANCE * before, MIN_MEMORY_TOLERANCE_BYTES)
    if quantity.endswith("series"):
        return SERIES_TOLERANCE * before
    return STATE_TOLERANCE_BYTES if quantity == "state" else COUNT_TOLERANCE


def _median(samples: Sequence[Sample], quantity: str, start: float, end: float) -> float:
    values: list[float | None] = [
        getattr(sample, quantity) for sample in samples if start <= sample.seconds <= end
    ]
    known = [value for value in values if value is not None]
    if not known:
        raise ValueError(f"no sample of {quantity} from {start:.0f} to {end:.0f} s")
    return median_low(known)


def _compare_log_rates(samples: Sequence[Sample], quantity: str) -> Comparison:
    """Compare the bytes per hour in the two halves of the time after the warm-up."""
    start, end = samples[0].seconds, samples[-1].seconds
    warm = start + warm_up_seconds(end - start)
    points = [
        next(sample for sample in samples if sample.seconds >= at) for at in (warm, (warm + end) / 2, end)
    ]
    before, after = (
        3600 * (getattr(last, quantity) - getattr(first, quantity)) / (last.seconds - first.seconds)
        for first, last in pairwise(points)
    )
    return Comparison(f"{quantity} in bytes per hour", before, after, (1 + LOG_RATE_TOLERANCE) * before)


def _compare_starts(samples: Sequence[Sample]) -> list[Comparison]:
    """Compare the control plane's memory after its first and after its last start, at the same age."""
    quantity = f"{CONTROL_PLANE}_memory"
    values = []
    for life in sorted({sample.life for sample in samples}):
        own_samples = [sample for sample in samples if sample.life == life]
        start = own_samples[0].seconds
        youngest, oldest = _START_AGES_SECONDS
        if own_samples[-1].seconds - start >= oldest:
            values.append(_median(own_samples, quantity, start + youngest, start + oldest))
    if len(values) < 2:
        return []
    limit = values[0] + _tolerance(quantity, values[0])
    return [Comparison(f"{quantity} of {len(values)} lives", values[0], values[-1], limit)]
