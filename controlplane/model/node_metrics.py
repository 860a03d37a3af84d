"""What TiDB servers tell of their own load and health: readings, and the ratios made of them. Pure data.

Every ratio may be unknown (None), which is neither zero nor full, and has the time as of which it was true.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CounterSample:
    """Counters and gauges of one node at one moment. None: it does not export that.

    Names of the series are TiDB's (docs/concepts/balancing.md lists them). Counters begin at zero when it starts.
    """

    at: float  # Unix seconds, by our clock
    cpu_seconds: float | None = None  # counter: CPU time used
    cpu_quota: float | None = None  # cores that it may use
    memory_bytes: float | None = None  # resident
    memory_quota_bytes: float | None = None  # 0: it has none
    pd_requests: float | None = None  # counter: time stamps that PD gave
    pd_failures: float | None = None  # counter: time stamps that PD failed to give
    tikv_requests: float | None = None  # counter
    tikv_failures: float | None = None  # counter: times that it waited before it asked TiKV again


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A ratio that was true at a moment."""

    value: float
    at: float  # Unix seconds, by our clock


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """What is known of one node. None: nothing, or nothing any more."""

    cpu: MetricValue | None = None  # CPU used / quota, over the last 30 s or so; 1: all of it
    cpu_quota: float | None = None  # cores
    memory: MetricValue | None = None  # resident memory / quota
    memory_growth: float = 0.0  # of that ratio, per second; negative: it shrinks
    pd_failures: MetricValue | None = None  # failed / all requests to PD in the last two minutes
    tikv_failures: MetricValue | None = None  # the same for TiKV; may exceed 1
