"""The load and health that a simulated server reports in `GET /metrics`. By default, the load is low.

The real resource usage of this process is not reported: on a busy machine, it would start migrations that no
test expects. Names and labels: pingcap/tidb pkg/metrics, tikv/client-go metrics, tikv/pd client/metrics.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable

_MEMORY_QUOTA_BYTES = 8 << 30
_REQUESTS_PER_SECOND = 100.0  # Requests to PD; the number of requests to TiKV is the same.
_DEFAULT_VALUES = {"cpu": 0.05, "memory": 0.1, "pd_failures": 0.0, "tikv_failures": 0.0}

# Name, type, labels, key of the value, and the part of the value that this series has. As in TiDB, some names
# have several series with different labels.
_SERIES = (
    ("process_cpu_seconds_total", "counter", "", "cpu_seconds", 1.0),
    ("process_resident_memory_bytes", "gauge", "", "memory_bytes", 1.0),
    ("tidb_server_maxprocs", "gauge", "", "cores", 1.0),
    ("tidb_server_memory_quota_bytes", "gauge", "", "memory_quota_bytes", 1.0),
    ("pd_client_cmd_handle_cmds_duration_seconds_count", "counter", '{type="tso"}', "pd_requests", 1.0),
    ("pd_client_cmd_handle_cmds_duration_seconds_count", "counter", '{type="wait"}', "pd_requests", 1.0),
    ("pd_client_cmd_handle_failed_cmds_duration_seconds_count", "counter", '{type="tso"}', "pd_failed", 1.0),
    ("tidb_tikvclient_request_seconds_count", "counter", '{type="Cop",store="1"}', "tikv_requests", 0.75),
    ("tidb_tikvclient_request_seconds_count", "counter", '{type="Get",store="4"}', "tikv_requests", 0.25),
    ("tidb_tikvclient_backoff_seconds_count", "counter", '{type="tikvRPC"}', "tikv_failed", 1.0),
    ("tidb_tikvclient_backoff_seconds_count", "counter", '{type="txnLock"}', "tikv_requests", 1.0),
)


class SimulatedMetrics:
    """The metrics of one simulated server. Counters grow with time, at the rates that were set last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, float] = {**_DEFAULT_VALUES, "cores": float(os.cpu_count() or 1)}
        self._counters = dict.fromkeys(
            ("cpu_seconds", "pd_requests", "pd_failed", "tikv_requests", "tikv_failed"), 0.0
        )
        self._advanced_at = clock()

    def set_values(self, body: bytes) -> None:
        """Set metrics from a JSON object with some of cpu, memory, pd_failures, tikv_failures, cores.

        cpu and memory are fractions of the total, failures are fractions of requests. Raises ValueError.
        """
        new_values = json.loads(body)
        if not isinstance(new_values, dict):
            raise ValueError("not a JSON object")
        for name, value in new_values.items():
            if name not in self._values:
                raise ValueError(f"{name!r} is not one of {', '.join(self._values)}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is not a number of at least 0")
        self._advance_counters()
        self._values |= new_values

    def render(self) -> str:
        """Return all series in Prometheus's text format."""
        self._advance_counters()
        values = {
            **self._counters,
            "memory_bytes": self._values["memory"] * _MEMORY_QUOTA_BYTES,
            "memory_quota_bytes": _MEMORY_QUOTA_BYTES,
            "cores": self._values["cores"],
        }
        lines, previous_name = [], ""
        for name, kind, labels, value, fraction in _SERIES:
            if name != previous_name:
                lines.append(f"# TYPE {name} {kind}\n")
            lines.append(f"{name}{labels} {values[value] * fraction}\n")
            previous_name = name
        return "".join(lines)

    def _advance_counters(self) -> None:
        now = self._clock()
        requests = _REQUESTS_PER_SECOND * (now - self._advanced_at)
        self._counters["cpu_seconds"] += (
            self._values["cpu"] * self._values["cores"] * (now - self._advanced_at)
        )
        for dependency in ("pd", "tikv"):
            self._counters[f"{dependency}_requests"] += requests
            self._counters[f"{dependency}_failed"] += requests * self._values[f"{dependency}_failures"]
        self._advanced_at = now
