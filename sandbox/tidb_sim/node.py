"""State that all parts of one simulated server share: its identity and its lifecycle phase."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sandbox.tidb_sim.simulated_metrics import SimulatedMetrics

DEFAULT_RELEASE = "v8.5.3"
GIT_HASH = "simulated"


@dataclass
class SimNode:
    """One simulated server. `is_stopping` and `is_closing` are the two phases of TiDB's graceful shutdown.

    While `is_stopping`, everything works except COM_PING; once `is_closing`, a session outside a transaction
    ends (pingcap/tidb pkg/server/server.go, conn.go). The ports are those that were actually bound.
    """

    name: str
    release: str
    server_version: str
    labels: Mapping[str, str]
    shut_down: Callable[[], None]
    """Called by the statement SHUTDOWN."""
    crash: Callable[[], None]
    """Exit at once, as by SIGKILL: without deregistering or notifying anyone."""
    host: str = ""
    sql_port: int = 0
    status_port: int = 0
    is_serving: bool = False
    is_stopping: bool = False
    is_closing: bool = False
    started_at: int = field(default_factory=lambda: int(time.time()))
    connections: int = 0
    violations: list[str] = field(default_factory=list)
    simulated_metrics: SimulatedMetrics = field(default_factory=SimulatedMetrics)

    @property
    def is_healthy(self) -> bool:
        """The health in `GET /status`: 200 if true, or 500 while starting and stopping."""
        return self.is_serving and not self.is_stopping

    def record_violation(self, peer: str, what: str) -> None:
        """Record that a client violated the protocol, which fails the running test."""
        self.violations.append(f"{peer}: {what}")
        print(f"tidb_sim {self.name}: protocol violation by {peer}: {what}", file=sys.stderr, flush=True)
