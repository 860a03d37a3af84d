"""This control plane as one of several: what it shares with the others, and who of them leads."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge

from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.etcd.client import EtcdClient
from controlplane.intents.repository import Intentions
from controlplane.model.plan import Plan
from controlplane.observe.observers import Observation
from controlplane.replicas.leader_election import Helm, Succession
from controlplane.replicas.lease import Lease, awake_clock
from controlplane.replicas.local_intents_backup import IntentsCopy
from controlplane.replicas.membership import Registry, ReplicaView
from controlplane.replicas.merged_fleet import Placed, ReplicaFleet
from controlplane.replicas.peer_sync import Mesh
from controlplane.replicas.plan_replicator import PlanWriter
from controlplane.storage.etcd_keys import Keys, Registered
from controlplane.storage.etcd_mirror import Mirror
from controlplane.storage.etcd_store import SharedStore
from controlplane.storage.file_store import StateDirectory
from controlplane.storage.store import SavedPlan, Stored
from controlplane.version import VERSION
from controlplane.xds.server import XdsServer


class Replicas:
    """The parts of this package, joined. `connect` comes before anything else is called."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        tell: Callable[..., None],
        show: Callable[..., None],
        registry: CollectorRegistry,
    ) -> None:
        """`tell` is for events of ours, `show` for those that other replicas have told of already."""
        chosen = settings.replicas
        self._settings = settings
        self._clock = clock
        self._tell = tell
        self.name = chosen.own_name
        self._instance = uuid.uuid4().hex
        self._client = EtcdClient(settings.pd.urls, tls=settings.pd.tls)
        self._keys = Keys(chosen.prefix)
        self._mirror = Mirror(
            self._client, chosen.prefix, on_change=self._on_mirror, on_outage=self._on_outage
        )
        self._lease = Lease(self._client, chosen.lease, on_change=self._on_lease)
        self.copy = StateDirectory(settings.state_dir)
        self.store = SharedStore(self._client, self._keys, self._mirror, self.copy, self._instance)
        self.mesh = Mesh(
            settings,
            self.name,
            clock,
            ours=self._ours,
            on_load=lambda load: self._observation.on_load(load),
            on_report=lambda report: self._observation.on_report(report, is_told=True),
            on_fleet=self._on_fleet,
            on_event=show,
            new_stream=lambda joined: self._observation.new_stream(joined),
        )
        self._metrics = registry
        self._observation: Observation
        self._xds: XdsServer
        self._succession: Succession
        self._writer: PlanWriter
        self.intents: IntentsCopy
        self._registry: Registry | None = None

    def connect(
        self,
        intentions: Intentions,
        observation: Observation,
        xds: XdsServer,
        helm: Helm,
        *,
        current: Callable[[], SavedPlan | None],
        on_stored: Callable[[Stored], None],
        failures: Counter,
    ) -> None:
        """What facts of other replicas go to, what publishes and decides here, and the plan of now."""
        self._observation, self._xds = observation, xds
        self.intents = IntentsCopy(self.copy, intentions)
        self._succession = Succession(
            self.name,
            self._client,
            self._keys,
            self._mirror,
            self._lease,
            self.store,
            helm,
            clock=self._clock,
            awake=awake_clock,
            seconds=self._settings.replicas.lease,
            on_stored=on_stored,
            tell=self._tell,
            changes=Counter("tidevoy_leader_changes", "Leaders that were seen.", registry=self._metrics),
        )
        self._writer = PlanWriter(self.store, lambda: self._to_share(current()), failures)
        leader = Gauge("tidevoy_leader", "1 while this control plane leads.", registry=self._metrics)
        leader.set_function(lambda: self.term is not None)
        unheard = Gauge(
            "tidevoy_replicas_unheard",
            "Control planes that are registered, and tell this one nothing of their Envoys.",
            registry=self._metrics,
        )
        unheard.set_function(lambda: len(self.mesh.unheard()))

    @property
    def term(self) -> int | None:
        """See `Leadership`."""
        return self._succession.term

    async def run(self) -> None:
        """Be one of several until cancelled. The xDS server is open by now."""
        address = self._settings.replicas.advertised(self._settings.xds.listen, self._xds.port)
        us = Registered(self.name, address, VERSION, self._clock(), self._instance)
        self._registry = Registry(
            us, self._client, self._keys, self._lease, on_change=self.mesh.peers, tell=self._tell
        )
        self._on_mirror()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._client.keep_learning())
            tasks.create_task(self._mirror.run())
            tasks.create_task(self._lease.run())
            tasks.create_task(self._registry.run())
            tasks.create_task(self._succession.run())
            tasks.create_task(self._writer.run())
            tasks.create_task(self.intents.run())
            tasks.create_task(self.mesh.run())

    async def leave(self) -> None:
        """Let another one lead at once. Nothing that runs needs to lead any more."""
        self._succession.leave()
        await self._lease.give_back()
        await self.intents.save()

    def changed(self, before: Plan, after: Plan) -> None:
        """There is another plan."""
        self._writer.changed(before, after)

    def fleet(self) -> Sequence[Placed]:
        """The Envoys of all control planes; `replica` is empty for ours."""
        return [
            replace(placed, replica="") if placed.replica == self.name else placed
            for placed in self.mesh.fleet()
        ]

    def views(self) -> list[ReplicaView]:
        """All control planes, by name."""
        if self._registry is None:
            return []
        return self._registry.views(self._succession.reign, self.mesh.unheard())

    def _on_fleet(self) -> None:
        self._observation.store.put_unheard(frozenset(self.mesh.unheard()))
        self._observation.on_answer()

    def _ours(self) -> ReplicaFleet:
        return ReplicaFleet(tuple(self._xds.statuses()), self._xds.stamp)

    def _to_share(self, saved: SavedPlan | None) -> SavedPlan | None:
        # Not by `term`: a plan that is passed over while the lease is late would never be shared.
        return saved if saved is not None and saved.term == self._succession.fenced_term else None

    def _on_mirror(self) -> None:
        if self._registry is not None:
            self._registry.look(self._mirror.entries, stands=self._mirror.stands)
            self._succession.look()

    def _on_lease(self) -> None:
        if self._registry is not None:
            self._registry.register()
            self._succession.look()

    def _on_outage(self, outage: str) -> None:
        if outage:
            self._tell(
                "replica.outage",
                self.name,
                f"what replicas share cannot be read or written, so nothing of it changes: {outage}",
            )
        else:
            self._tell("replica.outage_over", self.name, "what replicas share is up to date")
