"""How bad one node's vital signs are: levels from 0 (normal) to 2, with hysteresis. Pure.

The levels are TiProxy's (its `factor_health.go` and `factor_memory.go`). What it does with them is not ours:
see `resource_factors`. A sign that is not known, or not any more, has no level at all.
"""

from __future__ import annotations

import math
from dataclasses import replace

from controlplane.model.node_metrics import MetricValue, NodeMetrics

# Seconds for which a reading counts.
CPU_MAX_AGE_SECONDS = 120.0
OTHER_METRICS_MAX_AGE_SECONDS = 60.0

_PD_MAX_FAILURE_RATIO = 0.5
_TIKV_MAX_FAILURE_RATIO = 0.3
_NORMAL_FAILURE_RATIO = 0.1  # of both: at most so many of the requests fail

_HIGH_MEMORY_RATIO, _HIGH_MEMORY_EXIT_RATIO = (
    0.75,
    0.70,
)  # of the memory that it may use: level 2, and until when
_RAISED_MEMORY_RATIO, _RAISED_MEMORY_EXIT_RATIO = 0.60, 0.55  # level 1
_FULL_MEMORY_RATIO = 0.90  # here it may be killed
_URGENT_SECONDS, _URGENT_EXIT_SECONDS = 45.0, 60.0  # seconds to that: level 2, and until when
_SOON_FULL_SECONDS, _SOON_FULL_EXIT_SECONDS = 180.0, 240.0  # level 1
_TYPICAL_MEMORY_RATIO = 0.6  # growth counts for less where less than this is used, and for more where more is
_NORMAL_MEMORY_GROWTH = (
    (_FULL_MEMORY_RATIO - _RAISED_MEMORY_EXIT_RATIO)
    / _SOON_FULL_EXIT_SECONDS
    * _TYPICAL_MEMORY_RATIO
    / _RAISED_MEMORY_EXIT_RATIO
)


def fresh_value(reading: MetricValue | None, now: float, max_age: float) -> float | None:
    """What a reading says, while it counts."""
    return reading.value if reading is not None and now - reading.at <= max_age else None


def is_normal(metrics: NodeMetrics, now: float) -> bool:
    """Whether both levels are surely 0, whatever they were: what nearly all nodes are, told cheaply."""
    pd, tikv, memory = metrics.pd_failures, metrics.tikv_failures, metrics.memory
    if pd is None or tikv is None or memory is None:
        return False
    oldest = now - OTHER_METRICS_MAX_AGE_SECONDS
    return (
        pd.value <= _NORMAL_FAILURE_RATIO
        and pd.at >= oldest
        and tikv.value <= _NORMAL_FAILURE_RATIO
        and tikv.at >= oldest
        and memory.value <= _RAISED_MEMORY_EXIT_RATIO
        and memory.at >= oldest
        and metrics.memory_growth <= _NORMAL_MEMORY_GROWTH
    )


def health_level(metrics: NodeMetrics, previous_level: int, now: float) -> int | None:
    """0 or 2, by how many requests to PD and to TiKV fail. The worse of the two counts.

    Between the two bounds it stays as it was.
    """
    pd = fresh_value(metrics.pd_failures, now, OTHER_METRICS_MAX_AGE_SECONDS)
    tikv = fresh_value(metrics.tikv_failures, now, OTHER_METRICS_MAX_AGE_SECONDS)
    if pd is None and tikv is None:
        return None
    pd, tikv = pd or 0.0, tikv or 0.0
    if pd >= _PD_MAX_FAILURE_RATIO or tikv >= _TIKV_MAX_FAILURE_RATIO:
        return 2
    return 0 if pd <= _NORMAL_FAILURE_RATIO and tikv <= _NORMAL_FAILURE_RATIO else previous_level


def memory_level(metrics: NodeMetrics, previous_level: int, now: float) -> int | None:
    """0, 1 or 2, by the memory in use and by how soon there will be none left."""
    used = fresh_value(metrics.memory, now, OTHER_METRICS_MAX_AGE_SECONDS)
    if used is None:
        return None
    left = seconds_until_memory_full(used, metrics.memory_growth)
    if used > _HIGH_MEMORY_RATIO or left < _URGENT_SECONDS:
        return 2
    if previous_level >= 2 and (used > _HIGH_MEMORY_EXIT_RATIO or left < _URGENT_EXIT_SECONDS):
        return 2
    if used > _RAISED_MEMORY_RATIO or left < _SOON_FULL_SECONDS:
        return 1
    return (
        1
        if previous_level >= 1 and (used > _RAISED_MEMORY_EXIT_RATIO or left < _SOON_FULL_EXIT_SECONDS)
        else 0
    )


def current_metrics(metrics: NodeMetrics, now: float) -> NodeMetrics | None:
    """What is still known of a node; None: nothing is."""

    def if_fresh(reading: MetricValue | None, lasts: float) -> MetricValue | None:
        return reading if fresh_value(reading, now, lasts) is not None else None

    cpu, memory = (
        if_fresh(metrics.cpu, CPU_MAX_AGE_SECONDS),
        if_fresh(metrics.memory, OTHER_METRICS_MAX_AGE_SECONDS),
    )
    pd, tikv = (
        if_fresh(metrics.pd_failures, OTHER_METRICS_MAX_AGE_SECONDS),
        if_fresh(metrics.tikv_failures, OTHER_METRICS_MAX_AGE_SECONDS),
    )
    if cpu is memory is pd is tikv is None:
        return None
    return replace(metrics, cpu=cpu, memory=memory, pd_failures=pd, tikv_failures=tikv)


def cpu_usage(metrics: NodeMetrics, now: float) -> float | None:
    """CPU used, as a part of what the node may use."""
    return fresh_value(metrics.cpu, now, CPU_MAX_AGE_SECONDS)


def seconds_until_memory_full(used: float, growth: float) -> float:
    """Until the node may be killed for its memory, at the pace at which it takes more."""
    if growth <= 0 or used <= 0:
        return math.inf
    return max(_FULL_MEMORY_RATIO - used, 0.0) / growth * _TYPICAL_MEMORY_RATIO / used


def is_memory_urgent(metrics: NodeMetrics, now: float) -> bool:
    """Whether the node may soon be killed for its memory."""
    used = fresh_value(metrics.memory, now, OTHER_METRICS_MAX_AGE_SECONDS)
    return used is not None and seconds_until_memory_full(used, metrics.memory_growth) < _URGENT_SECONDS


def failure_reason(metrics: NodeMetrics, now: float) -> str:
    """What a level of health is given for, in words."""
    return " and ".join(_describe_failures(metrics, now, above=_NORMAL_FAILURE_RATIO))


def failure_summary(metrics: NodeMetrics, now: float) -> str:
    """What is known of a node's health, in words; empty when nothing is."""
    return " and ".join(_describe_failures(metrics, now, above=-1.0))


def _describe_failures(metrics: NodeMetrics, now: float, *, above: float) -> list[str]:
    return [
        f"{100 * value:.0f} failures for each 100 requests to {name}"
        for name, reading in (("PD", metrics.pd_failures), ("TiKV", metrics.tikv_failures))
        if (value := fresh_value(reading, now, OTHER_METRICS_MAX_AGE_SECONDS)) is not None and value > above
    ]


def memory_summary(metrics: NodeMetrics, now: float) -> str:
    """What a level of memory is given for, in words."""
    used = fresh_value(metrics.memory, now, OTHER_METRICS_MAX_AGE_SECONDS)
    if used is None:
        return ""
    left = seconds_until_memory_full(used, metrics.memory_growth)
    soon = f", and none is left in {left:.0f} s at this pace" if left < _SOON_FULL_EXIT_SECONDS else ""
    return f"{used:.0%} of its memory is in use{soon}"
