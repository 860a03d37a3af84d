"""This control plane as one of several replicas: shared state, leader election and peer feeds."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge

from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.etcd.client import EtcdClient
from controlplane.events.event_log import EventLog
from controlplane.intents.repository import IntentRepository
from controlplane.model.plan import Plan
from controlplane.observe.envoy_reports.metrics_service import MetricsService
from controlplane.observe.fact_store import FactStore
from controlplane.observe.statements.collector import StatementCollector
from controlplane.replicas.leader_election import LeaderElection, RoleListener
from controlplane.replicas.lease import Lease
from controlplane.replicas.membership import Membership, ReplicaView
from controlplane.replicas.merged_fleet import ReplicaEnvoy, ReplicaFleet
from controlplane.replicas.peer_feed_server import PeerFeed
from controlplane.replicas.peer_sync import PeerSync, ReplicaOutage
from controlplane.replicas.plan_replicator import PlanReplicator
from controlplane.replicas.session_commands import ReplicaCommands
from controlplane.sessions.command_queue import CommandQueue
from controlplane.storage.debounced_writer import DebouncedWriter
from controlplane.storage.etcd_keys import EtcdKeys, ReplicaRecord
from controlplane.storage.etcd_mirror import EtcdMirror
from controlplane.storage.etcd_store import EtcdStore
from controlplane.storage.file_store import FileStore
from controlplane.storage.store import LoadedState, SavedPlan
from controlplane.version import VERSION
from controlplane.xds.server import XdsServer


class LocalIntentsBackup(DebouncedWriter):
    """Copies the intents to the local disk, so that a start without PD keeps drained nodes drained."""

    def __init__(self, local_store: FileStore, intents: IntentRepository, failures: Counter) -> None:
        super().__init__("the local backup of the intents", failures, changed=intents.needs_local_backup)
        self._local_store = local_store
        self._intents = intents
        self.mark_changed()

    async def _write(self) -> float:
        on_disk = await self._local_store.read_intents()
        if not on_disk.version or on_disk.value != self._intents.current:
            await self._local_store.save_intents(self._intents.current, on_disk.version)
        return 0.0


class ReplicaSet:
    """Connects the parts of this package. Call `connect` before any other method."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        facts: FactStore,
        events: EventLog,
        registry: CollectorRegistry,
        command_queue: CommandQueue,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._facts = facts
        self._events = events
        self.name = settings.replicas.effective_name
        self._instance = uuid.uuid4().hex
        client, prefix = EtcdClient(settings.pd.urls, tls=settings.pd.tls), settings.replicas.prefix
        mirror = EtcdMirror(client, prefix, on_change=self._on_mirror_changed, on_outage=self._on_outage)
        self._lease = Lease(client, settings.replicas.lease_ttl, on_change=self._on_lease_changed)
        self.local_store = FileStore(settings.state_dir, is_copy=True)
        self.store = EtcdStore(client, EtcdKeys(prefix), mirror, self.local_store, self._instance)
        self.peer_feed = PeerFeed(settings, clock, self._own_fleet)
        self.commands = ReplicaCommands(settings, command_queue, lambda: self._peer_addresses)
        self._peer_addresses: Mapping[str, str] = {}
        self._metrics_registry = registry
        self._xds: XdsServer
        self.peer_sync: PeerSync
        self._election: LeaderElection
        self._plan_replicator: PlanReplicator
        self.intents_backup: LocalIntentsBackup
        self._membership: Membership | None = None

    def connect(
        self,
        intents: IntentRepository,
        module_metrics: MetricsService,
        statements: StatementCollector,
        xds: XdsServer,
        role_listener: RoleListener,
        *,
        current_plan: Callable[[], SavedPlan | None],
        on_shared_state_changed: Callable[[LoadedState], None],
        write_failures: Counter,
    ) -> None:
        """Connect the parts of the engine that are created after this object."""
        registry = self._metrics_registry
        self._xds = xds
        self.peer_sync = PeerSync(
            self._settings,
            self.name,
            self._clock,
            self._facts,
            self._events,
            module_metrics,
            statements,
            own_fleet=self._own_fleet,
        )
        backup_failures = Counter(
            "tidevoy_intents_backup_failures",
            "Failed writes of the local copy of the intents.",
            registry=registry,
        )
        self.intents_backup = LocalIntentsBackup(self.local_store, intents, backup_failures)
        leader_changes = Counter(
            "tidevoy_leader_changes", "Leader changes that this control plane observed.", registry=registry
        )
        self._election = LeaderElection(
            self.name,
            self.store,
            self._lease,
            role_listener,
            clock=self._clock,
            on_shared_state_changed=on_shared_state_changed,
            emit=self._events.emit,
            leader_changes=leader_changes,
        )
        self._plan_replicator = PlanReplicator(
            self.store, lambda: self._plan_to_replicate(current_plan()), write_failures
        )
        leader = Gauge("tidevoy_leader", "1 while this control plane leads.", registry=registry)
        leader.set_function(lambda: self.valid_term is not None)
        unreachable = Gauge(
            "tidevoy_replicas_unreachable",
            "Registered control planes that do not report their Envoys to this one.",
            registry=registry,
        )
        unreachable.set_function(lambda: len(self.peer_sync.unreachable()))

    @property
    def valid_term(self) -> int | None:
        """See `LeaderElection.valid_term`."""
        return self._election.valid_term

    async def run(self) -> None:
        """Run all parts until cancelled. The xDS server must have been started."""
        address = self._settings.replicas.advertised_address(self._settings.xds.listen, self._xds.port)
        own_record = ReplicaRecord(
            name=self.name, address=address, version=VERSION, since=self._clock(), instance=self._instance
        )
        self._membership = Membership(
            own_record, self.store, self._lease, on_change=self._on_peers_changed, emit=self._events.emit
        )
        self._on_mirror_changed()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.store.client.keep_members_current())
            tasks.create_task(self.store.mirror.run())
            tasks.create_task(self._lease.run())
            tasks.create_task(self._membership.run())
            tasks.create_task(self._election.run())
            tasks.create_task(self._plan_replicator.run())
            tasks.create_task(self.intents_backup.run())
            tasks.create_task(self.peer_feed.run())
            tasks.create_task(self.peer_sync.run())
            tasks.create_task(self._report_fleet_changes())
            tasks.create_task(self._forward_events())

    async def resign(self) -> None:
        """Give up leadership so that another replica can lead at once. Call it after `run` has ended."""
        self._election.resign()
        await self._lease.revoke()
        await self.intents_backup.save()

    def notify_plan_changed(self, before: Plan, after: Plan, *, is_urgent: bool = False) -> None:
        """See `PlanReplicator.notify_changed`."""
        self._plan_replicator.notify_changed(before, after, is_urgent=is_urgent)

    def fleet(self) -> Sequence[ReplicaEnvoy]:
        """Return the Envoys of all control planes; `replica` is empty for our own."""
        return [
            replace(envoy, replica="") if envoy.replica == self.name else envoy
            for envoy in self.peer_sync.fleet()
        ]

    def views(self) -> list[ReplicaView]:
        """Return all control planes, sorted by name."""
        if self._membership is None:
            return []
        return self._membership.views(self._election.leader, self.peer_sync.unreachable())

    def outages(self) -> Sequence[ReplicaOutage]:
        """Return when other control planes did not report their Envoys to this one."""
        return self.peer_sync.outages()

    async def _report_fleet_changes(self) -> None:
        while True:
            await self._xds.statuses_changed.wait()
            self._xds.statuses_changed.clear()
            self.peer_feed.notify_fleet_changed()

    async def _forward_events(self) -> None:
        async for event in self._events.events_to_forward():
            self.peer_feed.send_event(event.kind, event.subject, event.message, event.data)

    def _on_peers_changed(self, addresses: Mapping[str, str]) -> None:
        self._peer_addresses = addresses
        self.peer_feed.peer_addresses = addresses.values()
        self.peer_sync.set_peers(addresses)

    def _own_fleet(self) -> ReplicaFleet:
        return ReplicaFleet(tuple(self._xds.statuses()), self._xds.stamp)

    def _plan_to_replicate(self, saved: SavedPlan | None) -> SavedPlan | None:
        # Do not compare with `valid_term`: it is None while a lease renewal is late, and a plan that is
        # skipped during this time would be written up to a minute later.
        return saved if saved is not None and saved.term == self._election.write_term else None

    def _on_mirror_changed(self) -> None:
        if self._membership is not None:
            self._membership.update()
            self._election.wake()

    def _on_lease_changed(self) -> None:
        if self._membership is not None:
            self._membership.request_registration()
            self._election.wake()

    def _on_outage(self, outage: str) -> None:
        if outage:
            self._events.emit(
                "replica.outage",
                self.name,
                f"the shared state cannot be read or written, so it does not change: {outage}",
            )
        else:
            self._events.emit("replica.outage_over", self.name, "the shared state is up to date")
