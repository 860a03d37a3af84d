"""Classify the metrics of one node into levels from 0 (normal) to 2, with hysteresis. No I/O.

The levels are the same as in TiProxy (its `factor_health.go` and `factor_memory.go`); `resource_factors` says
how they are used. A metric that is unknown or too old has no level.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from controlplane.model.node_metrics import MetricValue, NodeMetrics

# Older values of a metric are ignored.
CPU_MAX_AGE_SECONDS = 120.0
OTHER_METRICS_MAX_AGE_SECONDS = 60.0

_PD_MAX_FAILURE_RATIO = 0.5
_TIKV_MAX_FAILURE_RATIO = 0.3
NORMAL_FAILURE_RATIO = 0.1  # up to this ratio, failed requests to PD and TiKV are normal

# Ratios of used memory to the quota. A level starts above the first ratio of its line and ends at the second.
_HIGH_MEMORY_RATIO, _HIGH_MEMORY_EXIT_RATIO = 0.75, 0.70  # level 2
_RAISED_MEMORY_RATIO, _RAISED_MEMORY_EXIT_RATIO = 0.60, 0.55  # level 1
_FULL_MEMORY_RATIO = 0.90  # above it, the process may be killed
# Seconds until `_FULL_MEMORY_RATIO` is reached. A level starts below the first time of its line and ends at
# the second.
_URGENT_SECONDS, _URGENT_EXIT_SECONDS = 45.0, 60.0  # level 2
_SOON_FULL_SECONDS, _SOON_FULL_EXIT_SECONDS = 180.0, 240.0  # level 1
_TYPICAL_MEMORY_RATIO = 0.6  # growth counts less below this ratio and more above it
_NORMAL_MEMORY_GROWTH = (
    (_FULL_MEMORY_RATIO - _RAISED_MEMORY_EXIT_RATIO)
    / _SOON_FULL_EXIT_SECONDS
    * _TYPICAL_MEMORY_RATIO
    / _RAISED_MEMORY_EXIT_RATIO
)


def fresh_value(reading: MetricValue | None, now: float, max_age: float) -> float | None:
    """Return the value of a metric, or None if it is unknown or older than `max_age` seconds."""
    return reading.value if reading is not None and now - reading.at <= max_age else None


def is_certainly_normal(metrics: NodeMetrics, now: float) -> bool:
    """Return whether health and memory are certainly normal, whatever their levels were before."""
    pd, tikv, memory = metrics.pd_failures, metrics.tikv_failures, metrics.memory
    if pd is None or tikv is None or memory is None:
        return False
    oldest = now - OTHER_METRICS_MAX_AGE_SECONDS
    return (
        pd.value <= NORMAL_FAILURE_RATIO
        and pd.at >= oldest
        and tikv.value <= NORMAL_FAILURE_RATIO
        and tikv.at >= oldest
        and memory.value <= _RAISED_MEMORY_EXIT_RATIO
        and memory.at >= oldest
        and metrics.memory_growth <= _NORMAL_MEMORY_GROWTH
    )


def health_level(metrics: NodeMetrics, previous_level: int, now: float) -> int | None:
    """Return level 0 or 2 by the failure ratios of requests to PD and TiKV, or None if both are unknown.

    The worse ratio counts. If it is neither normal nor too high, the previous level stays.
    """
    pd = fresh_value(metrics.pd_failures, now, OTHER_METRICS_MAX_AGE_SECONDS)
    tikv = fresh_value(metrics.tikv_failures, now, OTHER_METRICS_MAX_AGE_SECONDS)
    if pd is None and tikv is None:
        return None
    pd, tikv = pd or 0.0, tikv or 0.0
    if pd >= _PD_MAX_FAILURE_RATIO or tikv >= _TIKV_MAX_FAILURE_RATIO:
        return 2
    return 0 if pd <= NORMAL_FAILURE_RATIO and tikv <= NORMAL_FAILURE_RATIO else previous_level


def memory_level(metrics: NodeMetrics, previous_level: int, now: float) -> int | None:
    """Return level 0, 1 or 2 by the used memory and the time until it is full, or None if unknown."""
    used = fresh_value(metrics.memory, now, OTHER_METRICS_MAX_AGE_SECONDS)
    if used is None:
        return None
    seconds_left = seconds_until_memory_full(used, metrics.memory_growth)
    if used > _HIGH_MEMORY_RATIO or seconds_left < _URGENT_SECONDS:
        return 2
    if previous_level >= 2 and (used > _HIGH_MEMORY_EXIT_RATIO or seconds_left < _URGENT_EXIT_SECONDS):
        return 2
    if used > _RAISED_MEMORY_RATIO or seconds_left < _SOON_FULL_SECONDS:
        return 1
    if previous_level >= 1 and (used > _RAISED_MEMORY_EXIT_RATIO or seconds_left < _SOON_FULL_EXIT_SECONDS):
        return 1
    return 0


def current_metrics(metrics: NodeMetrics, now: float) -> NodeMetrics | None:
    """Return the metrics without the values that are too old, or None if no value is left."""
    max_ages = dict.fromkeys(("memory", "pd_failures", "tikv_failures"), OTHER_METRICS_MAX_AGE_SECONDS)
    max_ages["cpu"] = CPU_MAX_AGE_SECONDS
    values: dict[str, Any] = {
        name: getattr(metrics, name)
        if fresh_value(getattr(metrics, name), now, max_age) is not None
        else None
        for name, max_age in max_ages.items()
    }
    return replace(metrics, **values) if any(values.values()) else None


def cpu_usage(metrics: NodeMetrics, now: float) -> float | None:
    """Return the used part of the node's CPU quota, or None if unknown."""
    return fresh_value(metrics.cpu, now, CPU_MAX_AGE_SECONDS)


def seconds_until_memory_full(used: float, growth: float) -> float:
    """Estimate the seconds until the node may be killed for its memory use, from its growth rate."""
    if growth <= 0 or used <= 0:
        return math.inf
    return max(_FULL_MEMORY_RATIO - used, 0.0) / growth * _TYPICAL_MEMORY_RATIO / used


def is_memory_urgent(metrics: NodeMetrics, now: float) -> bool:
    """Return whether the node may soon be killed for its memory use."""
    used = fresh_value(metrics.memory, now, OTHER_METRICS_MAX_AGE_SECONDS)
    return used is not None and seconds_until_memory_full(used, metrics.memory_growth) < _URGENT_SECONDS


def failure_summary(metrics: NodeMetrics, now: float, *, above: float = -1.0) -> str:
    """Describe the failure ratios that are greater than `above`; empty if there are none."""
    return " and ".join(
        f"{100 * value:.0f} failures per 100 requests to {name}"
        for name, reading in (("PD", metrics.pd_failures), ("TiKV", metrics.tikv_failures))
        if (value := fresh_value(reading, now, OTHER_METRICS_MAX_AGE_SECONDS)) is not None and value > above
    )


def memory_summary(metrics: NodeMetrics, now: float) -> str:
    """Describe the memory usage of a node; empty if unknown."""
    used = fresh_value(metrics.memory, now, OTHER_METRICS_MAX_AGE_SECONDS)
    if used is None:
        return ""
    seconds_left = seconds_until_memory_full(used, metrics.memory_growth)
    forecast = ""
    if seconds_left < _SOON_FULL_EXIT_SECONDS:
        forecast = f", and it runs out in {seconds_left:.0f} s at this rate"
    return f"{used:.0%} of its memory is in use{forecast}"
