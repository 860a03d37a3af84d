"""What all parts of one stand-in share: what it calls itself, and in which phase of its life it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sandbox.tidb_sim.simulated_metrics import VitalSigns

DEFAULT_RELEASE = "v8.5.3"
GIT_HASH = "stand-in"


@dataclass
class Node:
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
    serving: bool = False
    stopping: bool = False
    closing: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    connections: int = 0
    violations: list[str] = field(default_factory=list)
    vital_signs: VitalSigns = field(default_factory=VitalSigns)

    @property
    def healthy(self) -> bool:
        """What `GET /status` says: 200, or 500 while starting and stopping."""
        return self.serving and not self.stopping

    def violation(self, peer: str, what: str) -> None:
        """A client broke the protocol: whatever test runs has failed."""
        self.violations.append(f"{peer}: {what}")
        print(f"tidb_sim {self.name}: protocol violation by {peer}: {what}", file=sys.stderr, flush=True)
