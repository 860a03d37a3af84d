"""Replicas without an engine: the xDS port, the reports of Envoys there, and the feeds between replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from controlplane.clock import Clock, monotonic_unix_clock
from controlplane.config.settings import Settings
from controlplane.model.facts import EnvoyLoad
from controlplane.model.nodes import CLUSTER_NAME
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.load_reports import LoadReportService
from controlplane.observe.envoy_reports.metrics_service import MetricsService
from controlplane.replicas.merged_fleet import ReplicaEnvoy, ReplicaFleet
from controlplane.replicas.peer_sync import PeerSync
from controlplane.xds.server import XdsServer
from tests.support.waiting import wait_until


class FakeReplica:
    """One replica. `loads`, `reports` and `events` are its own; `peer_events` are the events of others."""

    def __init__(self, name: str, settings: Settings, *, clock_error_seconds: float = 0.0) -> None:
        """`clock_error_seconds`: how far its clock is wrong."""
        self.name, self.settings = name, settings
        self.loads: list[EnvoyLoad] = []
        self.on_load: Callable[[EnvoyLoad], None] = self.loads.append
        self.reports: list[ModuleReport] = []
        self.events: list[tuple[str, str, str]] = []
        self.peer_events: list[tuple[str, str, str, Mapping[str, Any]]] = []
        self.known: frozenset[str] = frozenset()
        self.metrics_streams: list[int] = []  # Stream number of each metrics message of an Envoy.
        self.load_report_envoys: list[str] = []  # Envoy id of each load report received here.
        self.clock = _skewed_clock(clock_error_seconds)
        self.peer_sync = PeerSync(
            settings,
            name,
            self.clock,
            own_fleet=lambda: ReplicaFleet(tuple(self.xds.statuses()), self.xds.stamp),
            on_load=lambda load: self.on_load(load),
            on_report=self.reports.append,
            on_fleet=lambda: None,
            on_event=lambda *event: self.peer_events.append(event),
            new_stream=lambda joined: metrics.new_stream(joined),
        )
        metrics = MetricsService(self.reports.append, self.clock, known_nodes=lambda: self.known, sink=self)
        self.xds = XdsServer(
            settings,
            self.clock,
            on_event=self._on_event,
            on_change=self.peer_sync.notify_fleet_changed,
            services=[
                LoadReportService(
                    self.loads.append,
                    self.clock,
                    interval=lambda: settings.balance.report_interval,
                    cluster=CLUSTER_NAME,
                    sink=self._on_load_report,
                ).register,
                metrics.register,
                self.peer_sync.register,
            ],
        )
        self._run: asyncio.Task[None] | None = None

    def _on_load_report(self, envoy: str, at: float, report: bytes) -> None:
        self.load_report_envoys.append(envoy)
        self.peer_sync.load(envoy, at, report)

    def telemetry(self, number: int, envoy: str, at: float, data: bytes, *, first: bool) -> None:
        self.metrics_streams.append(number)
        self.peer_sync.telemetry(number, envoy, at, data, first=first)

    def telemetry_ended(self, number: int) -> None:
        self.peer_sync.telemetry_ended(number)

    def _on_event(self, kind: str, subject: str, message: str) -> None:
        self.events.append((kind, subject, message))
        self.peer_sync.send_event(kind, subject, message, {})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.xds.port}"

    async def start(self) -> None:
        await self.xds.start()
        self._run = asyncio.create_task(self.peer_sync.run())

    async def stop(self) -> None:
        await self.stop_sync()
        await self.xds.stop()

    async def stop_sync(self) -> None:
        """Stop sending to and receiving from peers; connections stay open."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait({self._run})
            self._run = None

    def find_envoy(self, envoy: str = "envoy-1") -> ReplicaEnvoy | None:
        """Return an Envoy as this replica sees it; None: it does not."""
        return next((other for other in self.peer_sync.fleet() if other.status.id == envoy), None)

    def require_envoy(self, envoy: str = "envoy-1") -> ReplicaEnvoy:
        """Return an Envoy that this replica must see."""
        replica_envoy = self.find_envoy(envoy)
        assert replica_envoy is not None
        return replica_envoy

    def sees_envoy_at(self, replica: str, envoy: str = "envoy-1") -> bool:
        """Return whether it sees that Envoy connected to that replica alone."""
        replica_envoy = self.find_envoy(envoy)
        return (
            replica_envoy is not None
            and replica_envoy.replica == replica
            and replica_envoy.status.connected_since is not None
            and replica_envoy.status.streams == 1
        )

    def sees_envoy_acked(self, envoy: str = "envoy-1") -> bool:
        """Return whether it sees that the Envoy has acknowledged the published version."""
        replica_envoy = self.find_envoy(envoy)
        return (
            replica_envoy is not None
            and bool(replica_envoy.status.acked_version)
            and replica_envoy.status.acked_version == replica_envoy.status.published_version
        )

    async def wait_connected_to(self, *others: FakeReplica) -> None:
        """Wait until it is connected to these replicas."""
        await wait_until(lambda: not {other.name for other in others} & self.peer_sync.unreachable().keys())


def _skewed_clock(seconds: float) -> Clock:
    clock = monotonic_unix_clock()
    return lambda: clock() + seconds


def connect_all(*replicas: FakeReplica) -> None:
    """Make all replicas peers of each other."""
    for replica in replicas:
        replica.peer_sync.set_peers({other.name: other.address for other in replicas})


@contextlib.asynccontextmanager
async def run_replicas(
    settings: Settings, *names: str, clock_errors: Mapping[str, float] | None = None
) -> AsyncIterator[list[FakeReplica]]:
    """Run connected replicas with these names. `clock_errors`: of the clocks that are wrong, in seconds."""
    async with contextlib.AsyncExitStack() as stack:
        replicas = [
            FakeReplica(name, settings, clock_error_seconds=(clock_errors or {}).get(name, 0.0))
            for name in names
        ]
        for replica in replicas:
            await replica.start()
            stack.push_async_callback(replica.stop)
        connect_all(*replicas)
        for replica in replicas:
            await replica.wait_connected_to(*(other for other in replicas if other is not replica))
        yield replicas
