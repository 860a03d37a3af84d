"""Replicas without decisions: the xDS port, what Envoys report there, and the feeds between them."""

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
    """One of them. `loads`, `reports` and `events` are what it knows; `heard` are the events of others."""

    def __init__(self, name: str, settings: Settings, *, clock_error_seconds: float = 0.0) -> None:
        """`ahead`: seconds by which its clock is wrong."""
        self.name, self.settings = name, settings
        self.loads: list[EnvoyLoad] = []
        self.on_load: Callable[[EnvoyLoad], None] = self.loads.append
        self.reports: list[ModuleReport] = []
        self.events: list[tuple[str, str, str]] = []
        self.peer_events: list[tuple[str, str, str, Mapping[str, Any]]] = []
        self.known: frozenset[str] = frozenset()
        self.metrics_streams: list[
            int
        ] = []  # numbers of the metrics streams, one for each message of an Envoy's
        self.load_report_envoys: list[str] = []  # ids of Envoys, one for each load report that came here
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
        """Tell and hear nothing from now on; connections stay open."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait({self._run})
            self._run = None

    def find_envoy(self, envoy: str = "envoy-1") -> ReplicaEnvoy | None:
        """An Envoy as this replica sees it; None: it does not."""
        return next((each for each in self.peer_sync.fleet() if each.status.id == envoy), None)

    def require_envoy(self, envoy: str = "envoy-1") -> ReplicaEnvoy:
        """An Envoy that this replica is to know."""
        found = self.find_envoy(envoy)
        assert found is not None
        return found

    def sees_envoy_at(self, replica: str, envoy: str = "envoy-1") -> bool:
        """Whether it sees that Envoy connected to that replica alone."""
        placed = self.find_envoy(envoy)
        return (
            placed is not None
            and placed.replica == replica
            and placed.status.connected_since is not None
            and placed.status.streams == 1
        )

    def sees_envoy_acked(self, envoy: str = "envoy-1") -> bool:
        """Whether it sees that the Envoy has taken all that there is."""
        placed = self.find_envoy(envoy)
        return (
            placed is not None
            and bool(placed.status.acked_version)
            and placed.status.acked_version == placed.status.published_version
        )

    async def wait_connected_to(self, *others: FakeReplica) -> None:
        """Returns when it follows these."""
        await wait_until(lambda: not {each.name for each in others} & self.peer_sync.unreachable().keys())


def _skewed_clock(seconds: float) -> Clock:
    clock = monotonic_unix_clock()
    return lambda: clock() + seconds


def connect_all(*stations: FakeReplica) -> None:
    """Each knows all."""
    for each in stations:
        each.peer_sync.set_peers({other.name: other.address for other in stations})


@contextlib.asynccontextmanager
async def run_replicas(
    settings: Settings, *names: str, clock_errors: Mapping[str, float] | None = None
) -> AsyncIterator[list[FakeReplica]]:
    """Replicas of these names that follow each other. `ahead`: of the clocks that are wrong."""
    async with contextlib.AsyncExitStack() as stack:
        all_ = [
            FakeReplica(name, settings, clock_error_seconds=(clock_errors or {}).get(name, 0.0))
            for name in names
        ]
        for each in all_:
            await each.start()
            stack.push_async_callback(each.stop)
        connect_all(*all_)
        for each in all_:
            await each.wait_connected_to(*(other for other in all_ if other is not each))
        yield all_
