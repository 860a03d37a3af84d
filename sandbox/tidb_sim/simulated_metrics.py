"""What `GET /metrics` of a stand-in shows of its load and health: what it was told to show, or a calm node.

Not what this process really uses: on a busy machine that would set sessions moving which nobody asked for.
Names and labels: pingcap/tidb pkg/metrics, tikv/client-go metrics, tikv/pd client/metrics.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable

_MEMORY_QUOTA = 8 << 30  # bytes
_REQUESTS = 100.0  # a second, to PD and to TiKV each
_CALM = {"cpu": 0.05, "memory": 0.1, "pd_failures": 0.0, "tikv_failures": 0.0}

# Name, type, labels, counter or gauge, part of it: as in TiDB, some have several sets of labels.
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


class VitalSigns:
    """The signs of one stand-in. Counters grow with the time, by what it was told last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown: dict[str, float] = {**_CALM, "cores": float(os.cpu_count() or 1)}
        self._counters = dict.fromkeys(
            ("cpu_seconds", "pd_requests", "pd_failed", "tikv_requests", "tikv_failed"), 0.0
        )
        self._counted_at = clock()

    def show(self, body: bytes) -> None:
        """Show other signs from now on: JSON with some of cpu, memory, pd_failures, tikv_failures, cores.

        The first two are parts of what it has, failures are parts of requests. ValueError: something else.
        """
        told = json.loads(body)
        if not isinstance(told, dict):
            raise ValueError("no JSON object")
        for name, value in told.items():
            if name not in self._shown:
                raise ValueError(f"{name!r} is none of {', '.join(self._shown)}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is no number from 0 on")
        self._count()
        self._shown |= told

    def text(self) -> str:
        """All series, in Prometheus's text format."""
        self._count()
        values = {
            **self._counters,
            "memory_bytes": self._shown["memory"] * _MEMORY_QUOTA,
            "memory_quota_bytes": _MEMORY_QUOTA,
            "cores": self._shown["cores"],
        }
        lines, before = [], ""
        for name, kind, labels, value, part in _SERIES:
            if name != before:
                lines.append(f"# TYPE {name} {kind}\n")
            lines.append(f"{name}{labels} {values[value] * part}\n")
            before = name
        return "".join(lines)

    def _count(self) -> None:
        now = self._clock()
        requests = _REQUESTS * (now - self._counted_at)
        self._counters["cpu_seconds"] += self._shown["cpu"] * self._shown["cores"] * (now - self._counted_at)
        for of in ("pd", "tikv"):
            self._counters[f"{of}_requests"] += requests
            self._counters[f"{of}_failed"] += requests * self._shown[f"{of}_failures"]
        self._counted_at = now
