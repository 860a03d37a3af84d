"""State that all parts of one simulated server share: its identity and its lifecycle phase."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandbox.tidb_sim.simulated_metrics import SimulatedMetrics

DEFAULT_RELEASE = "v8.5.3"
GIT_HASH = "simulated"


@dataclass
class SimNode:
    """One simulated server. The ports are the bound ports.

    TiDB's graceful shutdown has two phases (pingcap/tidb pkg/server/server.go, conn.go). In the first,
    `is_reporting_shutdown`, COM_PING is the only command that fails. In the second, also
    `is_ending_idle_sessions`, sessions end when they are outside a transaction.
    """

    name: str
    release: str
    server_version: str
    labels: Mapping[str, str]
    sql_port: int = 0
    status_port: int = 0
    is_serving: bool = False
    is_reporting_shutdown: bool = False
    is_ending_idle_sessions: bool = False
    started_at: int = field(default_factory=lambda: int(time.time()))
    connections: int = 0
    violations: list[str] = field(default_factory=list)
    simulated_metrics: SimulatedMetrics = field(default_factory=SimulatedMetrics)

    @property
    def is_healthy(self) -> bool:
        """Whether `GET /status` returns 200. While the server starts or stops, it returns 500."""
        return self.is_serving and not self.is_reporting_shutdown

    def record_violation(self, peer: str, what: str) -> None:
        """Record that a client violated the protocol. This makes the test fail."""
        self.violations.append(f"{peer}: {what}")
        print(f"tidb_sim {self.name}: protocol violation by {peer}: {what}", file=sys.stderr, flush=True)
