"""What all parts of one stand-in share: what it calls itself, and in which phase of its life it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sandbox.tidb_sim.simulated_metrics import SimulatedMetrics

DEFAULT_RELEASE = "v8.5.3"
GIT_HASH = "stand-in"


@dataclass
class SimNode:
    """One stand-in. `stopping` and `closing` are the two steps of TiDB's graceful shutdown.

    While `stopping` everything works but COM_PING; once `closing`, a session outside a transaction ends
    (pingcap/tidb pkg/server/server.go, conn.go). Addresses hold the ports that were really bound.
    """

    name: str
    release: str
    server_version: str
    labels: Mapping[str, str]
    shut_down: Callable[[], None]
    """What the statement SHUTDOWN does."""
    crash: Callable[[], None]
    """Die at once, as by SIGKILL: nothing is taken back, nobody is told."""
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
        """What `GET /status` says: 200, or 500 while starting and stopping."""
        return self.is_serving and not self.is_stopping

    def record_violation(self, peer: str, what: str) -> None:
        """A client broke the protocol: whatever test runs has failed."""
        self.violations.append(f"{peer}: {what}")
        print(f"tidb_sim {self.name}: protocol violation by {peer}: {what}", file=sys.stderr, flush=True)
