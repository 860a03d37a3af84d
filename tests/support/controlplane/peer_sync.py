"""Replicas for tests, without the engine that makes plans.

Each replica serves the xDS port, receives the reports of the Envoys that are connected to it, and exchanges
reports and events with its peers (the other replicas).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from controlplane.clock import Clock, monotonic_unix_clock
from controlplane.config.settings import Settings
from controlplane.config.statements import StatementSettings
from controlplane.events.event_log import EventLog
from controlplane.grpc_auth import XdsPortService
from controlplane.model.facts import EnvoyLoad
from controlplane.model.plan import Policy
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.load_reports import LoadReportService
from controlplane.observe.envoy_reports.metrics_service import MetricsService
from controlplane.observe.envoy_reports.statement_reports import StatementReportService
from controlplane.observe.fact_store import FactStore
from controlplane.observe.statements.collector import StatementCollector
from controlplane.replicas.merged_fleet import ReplicaEnvoy, ReplicaFleet
from controlplane.replicas.peer_feed_server import PeerFeed
from controlplane.replicas.peer_sync import PeerSync
from tests.support.controlplane.running_xds import RecordedEvents, make_xds_server, run_xds_server
from tests.support.waiting import wait_until


class RecordedFacts(FactStore):
    """A fact store that records the load reports and module reports that it receives."""

    def __init__(self, events: EventLog) -> None:
        super().__init__(events, Policy())
        self.loads: list[EnvoyLoad] = []
        self.reports: list[ModuleReport] = []

    def put_load(self, load: EnvoyLoad) -> None:
        super().put_load(load)
        self.loads.append(load)

    def put_module_report(self, report: ModuleReport, *, is_already_reported: bool = False) -> None:
        super().put_module_report(report, is_already_reported=is_already_reported)
        self.reports.append(report)


class FakeReplica:
    """One replica. `loads` and `reports` come from its own Envoys and from peers.

    `events` are its own events, `peer_events` the events that peers have sent.
    """

    def __init__(self, name: str, settings: Settings, *, clock_error_seconds: float = 0.0) -> None:
        """`clock_error_seconds`: how many seconds its clock is ahead (negative: behind)."""
        self.name, self.settings = name, settings
        self._event_log = RecordedEvents()
        self.events = self._event_log.recorded
        self.peer_events = self._event_log.recorded_remote
        self.facts = RecordedFacts(self._event_log)
        self.loads, self.reports = self.facts.loads, self.facts.reports
        self.known_nodes: frozenset[str] = frozenset()
        self.metrics_streams: list[int] = []  # Stream number of each metrics message of an Envoy.
        self.load_report_envoys: list[str] = []  # Envoy id of each load report received here.
        self.clock = _skewed_clock(clock_error_seconds)
        self._module_metrics = MetricsService(
            self.facts.put_module_report, self.clock, known_nodes=lambda: self.known_nodes, forwarder=self
        )
        self.statements = StatementCollector(StatementSettings(digests="on"), self.clock)
        statement_reports = StatementReportService(
            self.statements.put, self.clock, envoy_of=self.facts.envoy_of_process, forwarder=self
        )
        self.peer_feed = PeerFeed(settings, self.clock, self._own_fleet)
        self.peer_sync = PeerSync(
            settings,
            name,
            self.clock,
            self.facts,
            self._event_log,
            self._module_metrics,
            self.statements,
            own_fleet=self._own_fleet,
        )
        load_reports = LoadReportService(
            self.facts.put_load,
            self.clock,
            interval=lambda: settings.balance.report_interval,
            forwarder=self,
        )
        services: list[XdsPortService] = [
            *(load_reports, self._module_metrics, statement_reports, self.peer_feed)
        ]
        self.xds = make_xds_server(settings, self._event_log, services, self.clock)
        self._xds_run = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    # --- `ReportForwarder`: records the reports of Envoys and forwards them to peers ---

    def forward_load_report(self, envoy: str, at: float, report: bytes) -> None:
        self.load_report_envoys.append(envoy)
        self.peer_feed.forward_load_report(envoy, at, report)

    def forward_telemetry(self, number: int, envoy: str, at: float, data: bytes, *, first: bool) -> None:
        self.metrics_streams.append(number)
        self.peer_feed.forward_telemetry(number, envoy, at, data, first=first)

    def forward_statements(self, envoy: str, at: float, report: bytes) -> None:
        self.peer_feed.forward_statements(envoy, at, report)

    def forward_telemetry_end(self, number: int) -> None:
        self.peer_feed.forward_telemetry_end(number)

    def _own_fleet(self) -> ReplicaFleet:
        return ReplicaFleet(tuple(self.xds.statuses()), self.xds.stamp)

    async def _forward_events(self) -> None:
        async for event in self._event_log.events_to_forward():
            self.peer_feed.send_event(event.kind, event.subject, event.message, {})

    async def _report_fleet_changes(self) -> None:
        while True:
            await self.xds.statuses_changed.wait()
            self.xds.statuses_changed.clear()
            self.peer_feed.notify_fleet_changed()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.xds.port}"

    async def start(self) -> None:
        await self._xds_run.enter_async_context(run_xds_server(self.xds))
        self._tasks = [
            asyncio.create_task(work)
            for work in (
                self.peer_feed.run(),
                self.peer_sync.run(),
                self._forward_events(),
                self._report_fleet_changes(),
            )
        ]

    async def stop(self) -> None:
        await self.stop_sync()
        await self._xds_run.aclose()

    async def stop_sync(self) -> None:
        """Stop exchanging data with peers. The connections stay open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def set_peers(self, *replicas: FakeReplica) -> None:
        """Make these replicas the peers of this replica, which is ignored if it is among them."""
        addresses = {replica.name: replica.address for replica in replicas if replica.name != self.name}
        self.set_peer_addresses(addresses)

    def set_peer_addresses(self, addresses: Mapping[str, str]) -> None:
        """Replace its peers by the replicas with these names and addresses."""
        self.peer_feed.peer_addresses = addresses.values()
        self.peer_sync.set_peers(addresses)

    def find_envoy(self, envoy: str = "envoy-1") -> ReplicaEnvoy | None:
        """Return an Envoy as this replica sees it, None if it does not see the Envoy."""
        return next((other for other in self.peer_sync.fleet() if other.status.id == envoy), None)

    def require_envoy(self, envoy: str = "envoy-1") -> ReplicaEnvoy:
        """Return an Envoy that this replica must see."""
        replica_envoy = self.find_envoy(envoy)
        assert replica_envoy is not None
        return replica_envoy

    def sees_envoy_at(self, replica: str, envoy: str = "envoy-1") -> bool:
        """Return whether this replica sees the Envoy connected to `replica` and to no other replica."""
        replica_envoy = self.find_envoy(envoy)
        return (
            replica_envoy is not None
            and replica_envoy.replica == replica
            and replica_envoy.status.connected_since is not None
            and replica_envoy.status.streams == 1
        )

    def sees_envoy_acked(self, envoy: str = "envoy-1") -> bool:
        """Return whether this replica sees that the Envoy has acknowledged the published version."""
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
        replica.set_peers(*replicas)


@contextlib.asynccontextmanager
async def run_replicas(
    settings: Settings, *names: str, clock_errors: Mapping[str, float] | None = None
) -> AsyncIterator[list[FakeReplica]]:
    """Run connected replicas with these names.

    `clock_errors`: how many seconds clocks are ahead, by replica name. The other clocks are correct.
    """
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
