"""Computes the metrics of one node from a few samples of its counters. No I/O.

* CPU: CPU time used / elapsed time / quota, over the last 30 s, or over a shorter history of at least 1 s.
* Memory: resident memory / quota in the newest sample. Growth: the change in the last 10 s or more.
* Failures of PD and of TiKV: failures / requests in the last two minutes, as in TiProxy. Both ratios may
  exceed 1: PD's request counter counts only successes, and a request to TiKV may fail more than once. The
  ratio is 1 if there are failures but no requests, and 0 without failures.

If a counter decreases, the node has restarted, and older samples are dropped.
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
    """Return the samples to keep after `newest` has arrived, oldest first."""
    if not samples:
        return (newest,)
    if newest.at <= samples[-1].at:
        return tuple(samples)
    if any(_has_restarted(sample, newest) for sample in samples):  # each sample may lack counters
        return (newest,)
    return (*(sample for sample in samples if sample.at >= newest.at - HISTORY_SECONDS), newest)


def compute_node_metrics(samples: Sequence[CounterSample]) -> NodeMetrics:
    """Compute the metrics of a node from its samples, oldest first."""
    if not samples:
        return NodeMetrics()
    memory, memory_growth = _memory_usage(samples)
    return NodeMetrics(
        cpu=_cpu_usage(samples),
        cpu_quota=samples[-1].cpu_quota or None,
        memory=memory,
        memory_growth=memory_growth,
        pd_failures=_recent_failure_ratio(samples, lambda s: s.pd_failures, lambda s: s.pd_requests),
        tikv_failures=_recent_failure_ratio(samples, lambda s: s.tikv_failures, lambda s: s.tikv_requests),
    )


def _metric_value(value: float, at: float) -> MetricValue | None:
    """Return a ratio with its time; None if the ratio is infinite because of a tiny quota."""
    return MetricValue(value, at) if math.isfinite(value) else None


def failure_ratio(failures: float, requests: float) -> float:
    """Return the ratio of failures that the module docstring defines."""
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
    # If no other sample is in the window, use the last sample before the window.
    base = next((s for s in earlier if s.at >= newest.at - _CPU_WINDOW_SECONDS), earlier[-1])
    used_seconds = newest.cpu_seconds - (base.cpu_seconds or 0.0)
    return _metric_value(used_seconds / (newest.at - base.at) / newest.cpu_quota, newest.at)


def _memory_usage(samples: Sequence[CounterSample]) -> tuple[MetricValue | None, float]:
    """Return the memory ratio and its growth per second."""
    newest, growth = samples[-1], 0.0
    quota = newest.memory_quota_bytes
    if newest.memory_bytes is None or not quota:
        return None, growth
    for base in samples:
        if base.memory_bytes is not None and base.at <= newest.at - _MIN_GROWTH_WINDOW_SECONDS:
            growth = (newest.memory_bytes - base.memory_bytes) / quota / (newest.at - base.at)
    return _metric_value(newest.memory_bytes / quota, newest.at), growth


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
    return _metric_value(failure_ratio(last_failed - first_failed, last_sent - first_sent), newest.at)
