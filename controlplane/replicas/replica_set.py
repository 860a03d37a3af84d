"""This control plane as one of several replicas: shared state, leader election and peer feeds."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge

from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.etcd.client import EtcdClient
from controlplane.intents.repository import IntentRepository
from controlplane.model.plan import Plan
from controlplane.observe.observers import Observers
from controlplane.replicas.leader_election import Decider, LeaderElection
from controlplane.replicas.lease import Lease, boottime_clock
from controlplane.replicas.local_intents_backup import LocalIntentsBackup
from controlplane.replicas.membership import Membership, ReplicaView
from controlplane.replicas.merged_fleet import ReplicaEnvoy, ReplicaFleet
from controlplane.replicas.peer_sync import PeerSync
from controlplane.replicas.plan_replicator import PlanReplicator
from controlplane.storage.etcd_keys import EtcdKeys, ReplicaRecord
from controlplane.storage.etcd_mirror import EtcdMirror
from controlplane.storage.etcd_store import EtcdStore
from controlplane.storage.file_store import FileStore
from controlplane.storage.store import LoadedState, SavedPlan
from controlplane.version import VERSION
from controlplane.xds.server import XdsServer


class ReplicaSet:
    """Connects the parts of this package. Call `connect` before any other method."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        emit: Callable[..., None],
        publish_event: Callable[..., None],
        registry: CollectorRegistry,
    ) -> None:
        """`emit` gets our own events; `publish_event` gets events that other replicas have sent."""
        replica_settings = settings.replicas
        self._settings = settings
        self._clock = clock
        self._emit = emit
        self.name = replica_settings.effective_name
        self._instance = uuid.uuid4().hex
        self._client = EtcdClient(settings.pd.urls, tls=settings.pd.tls)
        self._keys = EtcdKeys(replica_settings.prefix)
        self._mirror = EtcdMirror(
            self._client,
            replica_settings.prefix,
            on_change=self._on_mirror_changed,
            on_outage=self._on_outage,
        )
        self._lease = Lease(self._client, replica_settings.lease, on_change=self._on_lease_changed)
        self.local_store = FileStore(settings.state_dir)
        self.store = EtcdStore(self._client, self._keys, self._mirror, self.local_store, self._instance)
        self.peer_sync = PeerSync(
            settings,
            self.name,
            clock,
            own_fleet=self._own_fleet,
            on_load=lambda load: self._observers.on_load_report(load),
            on_report=lambda report: self._observers.on_module_report(report, is_already_reported=True),
            on_fleet=self._on_fleet_changed,
            on_event=publish_event,
            new_stream=lambda joined: self._observers.new_telemetry_stream(joined),
        )
        self._metrics_registry = registry
        self._observers: Observers
        self._xds: XdsServer
        self._election: LeaderElection
        self._plan_replicator: PlanReplicator
        self.intents_backup: LocalIntentsBackup
        self._membership: Membership | None = None

    def connect(
        self,
        intents: IntentRepository,
        observers: Observers,
        xds: XdsServer,
        decider: Decider,
        *,
        current_plan: Callable[[], SavedPlan | None],
        on_shared_state_changed: Callable[[LoadedState], None],
        write_failures: Counter,
    ) -> None:
        """Connect the parts of the engine: consumers of peer facts, the xDS server and the planner."""
        self._observers, self._xds = observers, xds
        self.intents_backup = LocalIntentsBackup(self.local_store, intents)
        self._election = LeaderElection(
            self.name,
            self._client,
            self._keys,
            self._mirror,
            self._lease,
            self.store,
            decider,
            clock=self._clock,
            boottime_clock=boottime_clock,
            lease_seconds=self._settings.replicas.lease,
            on_shared_state_changed=on_shared_state_changed,
            emit=self._emit,
            leader_changes=Counter(
                "tidevoy_leader_changes",
                "Leader changes that this control plane observed.",
                registry=self._metrics_registry,
            ),
        )
        self._plan_replicator = PlanReplicator(
            self.store, lambda: self._plan_to_replicate(current_plan()), write_failures
        )
        leader = Gauge("tidevoy_leader", "1 while this control plane leads.", registry=self._metrics_registry)
        leader.set_function(lambda: self.term is not None)
        unreachable = Gauge(
            "tidevoy_replicas_unreachable",
            "Registered control planes that do not report their Envoys to this one.",
            registry=self._metrics_registry,
        )
        unreachable.set_function(lambda: len(self.peer_sync.unreachable()))

    @property
    def term(self) -> int | None:
        """See `Leadership`."""
        return self._election.term

    async def run(self) -> None:
        """Run all parts until cancelled. The xDS server must have been started."""
        address = self._settings.replicas.advertised_address(self._settings.xds.listen, self._xds.port)
        own_record = ReplicaRecord(self.name, address, VERSION, self._clock(), self._instance)
        self._membership = Membership(
            own_record,
            self._client,
            self._keys,
            self._lease,
            on_change=self.peer_sync.set_peers,
            emit=self._emit,
        )
        self._on_mirror_changed()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._client.keep_members_current())
            tasks.create_task(self._mirror.run())
            tasks.create_task(self._lease.run())
            tasks.create_task(self._membership.run())
            tasks.create_task(self._election.run())
            tasks.create_task(self._plan_replicator.run())
            tasks.create_task(self.intents_backup.run())
            tasks.create_task(self.peer_sync.run())

    async def resign(self) -> None:
        """Give up leadership so that another replica can lead at once. Call it after `run` has ended."""
        self._election.resign()
        await self._lease.revoke()
        await self.intents_backup.save()

    def notify_plan_changed(self, before: Plan, after: Plan) -> None:
        """Replicate a changed plan."""
        self._plan_replicator.notify_changed(before, after)

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

    def _on_fleet_changed(self) -> None:
        self._observers.fact_store.set_unreachable_replicas(frozenset(self.peer_sync.unreachable()))
        self._observers.on_xds_request()

    def _own_fleet(self) -> ReplicaFleet:
        return ReplicaFleet(tuple(self._xds.statuses()), self._xds.stamp)

    def _plan_to_replicate(self, saved: SavedPlan | None) -> SavedPlan | None:
        # Not `term`: a plan that is skipped while a lease renewal is late would never be written.
        return saved if saved is not None and saved.term == self._election.fenced_term else None

    def _on_mirror_changed(self) -> None:
        if self._membership is not None:
            self._membership.update(self._mirror.entries, is_current=self._mirror.is_current)
            self._election.wake()

    def _on_lease_changed(self) -> None:
        if self._membership is not None:
            self._membership.request_registration()
            self._election.wake()

    def _on_outage(self, outage: str) -> None:
        if outage:
            self._emit(
                "replica.outage",
                self.name,
                f"the shared state cannot be read or written, so it does not change: {outage}",
            )
        else:
            self._emit("replica.outage_over", self.name, "the shared state is up to date")
