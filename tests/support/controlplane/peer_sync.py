"""Replicas without decisions: the xDS port, what Envoys report there, and the feeds between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from controlplane.clock import Clock, steady_clock
from controlplane.config.settings import Settings
from controlplane.model.facts import EnvoyLoad
from controlplane.model.nodes import CLUSTER_NAME
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.load_reports import LoadReports
from controlplane.observe.envoy_reports.metrics_service import MetricsService
from controlplane.replicas.merged_fleet import Placed, ReplicaFleet
from controlplane.replicas.peer_sync import Mesh
from controlplane.xds.server import XdsServer
from tests.support.waiting import until


class Station:
    """One of them. `loads`, `reports` and `events` are what it knows; `heard` are the events of others."""

    def __init__(self, name: str, settings: Settings, *, ahead: float = 0.0) -> None:
        """`ahead`: seconds by which its clock is wrong."""
        self.name, self.settings = name, settings
        self.loads: list[EnvoyLoad] = []
        self.take_load: Callable[[EnvoyLoad], None] = self.loads.append
        self.reports: list[ModuleReport] = []
        self.events: list[tuple[str, str, str]] = []
        self.heard: list[tuple[str, str, str, Mapping[str, Any]]] = []
        self.known: frozenset[str] = frozenset()
        self.messages: list[int] = []  # numbers of the metrics streams, one for each message of an Envoy's
        self.reported: list[str] = []  # ids of Envoys, one for each load report that came here
        self.clock = _ahead(ahead)
        self.mesh = Mesh(
            settings,
            name,
            self.clock,
            ours=lambda: ReplicaFleet(tuple(self.xds.statuses()), self.xds.stamp),
            on_load=lambda load: self.take_load(load),
            on_report=self.reports.append,
            on_fleet=lambda: None,
            on_event=lambda *event: self.heard.append(event),
            new_stream=lambda joined: metrics.stream(joined),
        )
        metrics = MetricsService(self.reports.append, self.clock, known=lambda: self.known, tap=self)
        self.xds = XdsServer(
            settings,
            self.clock,
            on_event=self._tell,
            on_change=self.mesh.changed,
            services=[
                LoadReports(
                    self.loads.append,
                    self.clock,
                    interval=lambda: settings.balance.report_interval,
                    cluster=CLUSTER_NAME,
                    tap=self._load,
                ).register,
                metrics.register,
                self.mesh.register,
            ],
        )
        self._run: asyncio.Task[None] | None = None

    def _load(self, envoy: str, at: float, report: bytes) -> None:
        self.reported.append(envoy)
        self.mesh.load(envoy, at, report)

    def telemetry(self, number: int, envoy: str, at: float, data: bytes, *, first: bool) -> None:
        self.messages.append(number)
        self.mesh.telemetry(number, envoy, at, data, first=first)

    def telemetry_ended(self, number: int) -> None:
        self.mesh.telemetry_ended(number)

    def _tell(self, kind: str, subject: str, message: str) -> None:
        self.events.append((kind, subject, message))
        self.mesh.event(kind, subject, message, {})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.xds.port}"

    async def start(self) -> None:
        await self.xds.start()
        self._run = asyncio.create_task(self.mesh.run())

    async def stop(self) -> None:
        await self.fall_silent()
        await self.xds.stop()

    async def fall_silent(self) -> None:
        """Tell and hear nothing from now on; connections stay open."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait({self._run})
            self._run = None

    def find(self, envoy: str = "envoy-1") -> Placed | None:
        """An Envoy as this replica sees it; None: it does not."""
        return next((each for each in self.mesh.fleet() if each.status.id == envoy), None)

    def placed(self, envoy: str = "envoy-1") -> Placed:
        """An Envoy that this replica is to know."""
        found = self.find(envoy)
        assert found is not None
        return found

    def is_at(self, replica: str, envoy: str = "envoy-1") -> bool:
        """Whether it sees that Envoy connected to that replica alone."""
        placed = self.find(envoy)
        return (
            placed is not None
            and placed.replica == replica
            and placed.status.connected_since is not None
            and placed.status.streams == 1
        )

    def is_acked(self, envoy: str = "envoy-1") -> bool:
        """Whether it sees that the Envoy has taken all that there is."""
        placed = self.find(envoy)
        return (
            placed is not None
            and bool(placed.status.acked_version)
            and placed.status.acked_version == placed.status.published_version
        )

    async def hears(self, *others: Station) -> None:
        """Returns when it follows these."""
        await until(lambda: not {each.name for each in others} & self.mesh.unheard().keys())


def _ahead(seconds: float) -> Clock:
    clock = steady_clock()
    return lambda: clock() + seconds


def introduce(*stations: Station) -> None:
    """Each knows all."""
    for each in stations:
        each.mesh.peers({other.name: other.address for other in stations})


@contextlib.asynccontextmanager
async def stations(
    settings: Settings, *names: str, ahead: Mapping[str, float] | None = None
) -> AsyncIterator[list[Station]]:
    """Replicas of these names that follow each other. `ahead`: of the clocks that are wrong."""
    async with contextlib.AsyncExitStack() as stack:
        all_ = [Station(name, settings, ahead=(ahead or {}).get(name, 0.0)) for name in names]
        for each in all_:
            await each.start()
            stack.push_async_callback(each.stop)
        introduce(*all_)
        for each in all_:
            await each.hears(*(other for other in all_ if other is not each))
        yield all_
