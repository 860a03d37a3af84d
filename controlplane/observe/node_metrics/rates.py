"""From a few samples of one node's counters to its vitals. Pure.

* CPU: CPU time used / time / quota, over the last 30 s, or over what there is of it from 1 s on.
* Memory: resident / quota, of the newest sample; its growth since the newest one that is 10 s older or more.
* Failures of PD and of TiKV: as in TiProxy, failures / requests, both as counted in the last two minutes.
  PD's count of requests has only those that succeeded, and one to TiKV may fail more than once, so both
  ratios may exceed 1. With failures and no requests it is 1, without failures 0.

A counter that went back tells of a restart: what was sampled before says nothing of the new process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from controlplane.model.node_metrics import CounterSample, MetricValue, NodeMetrics

HISTORY_SECONDS = 120.0  # seconds: as far back as anything here looks
_CPU_WINDOW_SECONDS = 30.0
_MIN_CPU_WINDOW_SECONDS = 1.0
_MIN_GROWTH_WINDOW_SECONDS = 10.0

_SampleField = Callable[[CounterSample], float | None]

_COUNTERS: tuple[_SampleField, ...] = (
    lambda sample: sample.cpu_seconds,
    lambda sample: sample.pd_requests,
    lambda sample: sample.pd_failures,
    lambda sample: sample.tikv_requests,
    lambda sample: sample.tikv_failures,
)


def append_sample(samples: Sequence[CounterSample], newest: CounterSample) -> tuple[CounterSample, ...]:
    """The samples that count after one more, oldest first."""
    if not samples:
        return (newest,)
    if newest.at <= samples[-1].at:
        return tuple(samples)
    if any(_has_restarted(sample, newest) for sample in samples):  # the last one may lack a counter
        return (newest,)
    return (*(sample for sample in samples if sample.at >= newest.at - HISTORY_SECONDS), newest)


def compute_node_metrics(samples: Sequence[CounterSample]) -> NodeMetrics:
    """What these samples of one node tell of it."""
    if not samples:
        return NodeMetrics()
    newest = samples[-1]
    memory_quota = newest.memory_quota_bytes
    memory = None
    if newest.memory_bytes is not None and memory_quota:
        memory = metric_value(newest.memory_bytes / memory_quota, newest.at)
    return NodeMetrics(
        cpu=_cpu_usage(samples),
        cpu_quota=newest.cpu_quota or None,
        memory=memory,
        memory_growth=_memory_growth(samples),
        pd_failures=_recent_failure_ratio(samples, lambda s: s.pd_failures, lambda s: s.pd_requests),
        tikv_failures=_recent_failure_ratio(samples, lambda s: s.tikv_failures, lambda s: s.tikv_requests),
    )


def metric_value(value: float, at: float) -> MetricValue | None:
    """A ratio as of that time; None: it is beyond all numbers, as with next to nothing for a quota."""
    return MetricValue(value, at) if math.isfinite(value) else None


def failure_ratio(failures: float, requests: float) -> float:
    """Failures for each request counted; see the top of this file."""
    if failures <= 0.0:
        return 0.0
    return failures / requests if requests > 0.0 else 1.0


def _has_restarted(before: CounterSample, after: CounterSample) -> bool:
    pairs = ((counter(before), counter(after)) for counter in _COUNTERS)
    return any(old is not None and new is not None and new < old for old, new in pairs)


def _cpu_usage(samples: Sequence[CounterSample]) -> MetricValue | None:
    newest = samples[-1]
    if newest.cpu_seconds is None or not newest.cpu_quota:
        return None
    earlier = [
        s for s in samples if s.cpu_seconds is not None and s.at <= newest.at - _MIN_CPU_WINDOW_SECONDS
    ]
    if not earlier:
        return None
    # Where samples are rarer than that, the last one before it has to do.
    base = next((s for s in earlier if s.at >= newest.at - _CPU_WINDOW_SECONDS), earlier[-1])
    used = newest.cpu_seconds - (base.cpu_seconds or 0.0)
    return metric_value(used / (newest.at - base.at) / newest.cpu_quota, newest.at)


def _memory_growth(samples: Sequence[CounterSample]) -> float:
    newest = samples[-1]
    if newest.memory_bytes is None or not newest.memory_quota_bytes:
        return 0.0
    for base in reversed(samples):
        if base.memory_bytes is not None and base.at <= newest.at - _MIN_GROWTH_WINDOW_SECONDS:
            grown = newest.memory_bytes - base.memory_bytes
            return grown / newest.memory_quota_bytes / (newest.at - base.at)
    return 0.0


def _recent_failure_ratio(
    samples: Sequence[CounterSample], failures: _SampleField, requests: _SampleField
) -> MetricValue | None:
    both = [
        (sample.at, failed, counted)
        for sample in samples
        if (failed := failures(sample)) is not None and (counted := requests(sample)) is not None
    ]
    newest = samples[-1]
    if len(both) < 2 or both[-1][0] != newest.at:
        return None
    (_, failed_before, counted_before), (_, failed, counted) = both[0], both[-1]
    return metric_value(failure_ratio(failed - failed_before, counted - counted_before), newest.at)
