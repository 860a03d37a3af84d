"""Load and health metrics of TiDB servers: raw samples, and the ratios computed from them. Pure data.

An unknown ratio is None, which means neither zero nor full. Every ratio carries the time it is valid for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CounterSample:
    """Counters and gauges of one node at one point in time. None: the node does not export the series.

    docs/concepts/balancing.md lists the TiDB names of the series. Counters start at zero with the process.
    """

    at: float  # Unix seconds, by our clock
    cpu_seconds: float | None = None  # counter: CPU time used
    cpu_quota: float | None = None  # in cores
    memory_bytes: float | None = None  # resident
    memory_quota_bytes: float | None = None  # 0: no limit
    pd_requests: float | None = None  # counter: timestamps that PD provided
    pd_failures: float | None = None  # counter: timestamps that PD failed to provide
    tikv_requests: float | None = None  # counter
    tikv_failures: float | None = None  # counter: backoffs before a TiKV request was retried


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A ratio and the time it is valid for."""

    value: float
    at: float  # Unix seconds, by our clock


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """Current metrics of one node. None: not known, or too old."""

    cpu: MetricValue | None = None  # CPU used / quota, over about the last 30 s; 1: all of it
    cpu_quota: float | None = None  # cores
    memory: MetricValue | None = None  # resident memory / quota
    memory_growth: float = 0.0  # change of `memory` per second; negative: it shrinks
    pd_failures: MetricValue | None = None  # failed / all requests to PD over the last two minutes
    tikv_failures: MetricValue | None = None  # the same for TiKV; may exceed 1
