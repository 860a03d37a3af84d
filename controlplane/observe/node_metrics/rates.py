"""Computes the metrics of one node from a few samples of its counters. No I/O.

* CPU: CPU time used / elapsed time / quota, over the last 30 s, or over a shorter history of at least 1 s.
* Memory: resident / quota, of the newest sample; its growth since the newest sample that is 10 s older or
  more.
* Failures of PD and of TiKV: as in TiProxy, failures / requests, both over the last two minutes. PD's request
  counter has only successful ones, and a request to TiKV may fail more than once, so both ratios may exceed
  1. The ratio is 1 if there are failures but no requests, and 0 without failures.

A counter that decreased means a restart: older samples say nothing about the new process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from controlplane.model.node_metrics import CounterSample, MetricValue, NodeMetrics

HISTORY_SECONDS = 120.0  # the longest window in this module
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
    """Return the samples to keep after a new one, oldest first."""
    if not samples:
        return (newest,)
    if newest.at <= samples[-1].at:
        return tuple(samples)
    if any(
        _has_restarted(sample, newest) for sample in samples
    ):  # check all: the last one may lack a counter
        return (newest,)
    return (*(sample for sample in samples if sample.at >= newest.at - HISTORY_SECONDS), newest)


def compute_node_metrics(samples: Sequence[CounterSample]) -> NodeMetrics:
    """Compute the metrics of a node from its samples, oldest first."""
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
    """Return a ratio with its time; None if it is infinite, as with a tiny quota."""
    return MetricValue(value, at) if math.isfinite(value) else None


def failure_ratio(failures: float, requests: float) -> float:
    """Return the failures per request, as the module docstring defines it."""
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
    # If samples are farther apart than the window, use the last one before it.
    base = next((s for s in earlier if s.at >= newest.at - _CPU_WINDOW_SECONDS), earlier[-1])
    used_seconds = newest.cpu_seconds - (base.cpu_seconds or 0.0)
    return metric_value(used_seconds / (newest.at - base.at) / newest.cpu_quota, newest.at)


def _memory_growth(samples: Sequence[CounterSample]) -> float:
    newest = samples[-1]
    if newest.memory_bytes is None or not newest.memory_quota_bytes:
        return 0.0
    for base in reversed(samples):
        if base.memory_bytes is not None and base.at <= newest.at - _MIN_GROWTH_WINDOW_SECONDS:
            growth_bytes = newest.memory_bytes - base.memory_bytes
            return growth_bytes / newest.memory_quota_bytes / (newest.at - base.at)
    return 0.0


def _recent_failure_ratio(
    samples: Sequence[CounterSample], failures: _SampleField, requests: _SampleField
) -> MetricValue | None:
    counts = [
        (sample.at, failed, sent)
        for sample in samples
        if (failed := failures(sample)) is not None and (sent := requests(sample)) is not None
    ]
    newest = samples[-1]
    if len(counts) < 2 or counts[-1][0] != newest.at:
        return None
    (_, first_failed, first_sent), (_, last_failed, last_sent) = counts[0], counts[-1]
    return metric_value(failure_ratio(last_failed - first_failed, last_sent - first_sent), newest.at)
