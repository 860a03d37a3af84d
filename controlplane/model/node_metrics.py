"""Load and health metrics of TiDB servers: raw samples, and the ratios computed from them. Pure data.

An unknown ratio is None. Every ratio has the time of the sample from which it was computed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CounterSample:
    """Counters and gauges of one node at one point in time. A series that the node does not export is None.

    docs/concepts/balancing.md lists the names of the series. Counters start at zero when TiDB starts.
    """

    at: float  # Unix seconds, by our clock
    cpu_seconds: float | None = None  # counter: CPU time used
    cpu_quota: float | None = None  # in cores
    memory_bytes: float | None = None  # resident memory
    memory_quota_bytes: float | None = None  # 0: no limit
    pd_requests: float | None = None  # counter: timestamps that PD provided
    pd_failures: float | None = None  # counter: timestamps that PD failed to provide
    tikv_requests: float | None = None  # counter
    tikv_failures: float | None = None  # counter: backoffs before a TiKV request was retried


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A ratio and the time of the sample from which it was computed."""

    value: float
    at: float  # Unix seconds, by our clock


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """The latest metrics of one node. An unknown value is None."""

    cpu: MetricValue | None = None  # CPU time used / quota over about the last 30 s; 1: fully used
    cpu_quota: float | None = None  # cores
    memory: MetricValue | None = None  # resident memory / quota
    memory_growth: float = 0.0  # change of `memory` per second; negative: it decreases
    pd_failures: MetricValue | None = None  # failures per successful request to PD over the last two minutes
    tikv_failures: MetricValue | None = None  # failures per request to TiKV over two minutes; may exceed 1
