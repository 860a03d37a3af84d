"""The control plane: connects observers, planner and xDS server; no other module knows them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
import structlog
from prometheus_client import CollectorRegistry

from controlplane.clock import Clock, monotonic_unix_clock
from controlplane.config.loader import apply_reload
from controlplane.config.settings import Settings
from controlplane.decide import views
from controlplane.decide.completed_removals import forget_completed_removals
from controlplane.decide.explain import NodeExplanation, explain
from controlplane.engine.node_operations import NodeOperations
from controlplane.engine.plan_saver import PlanSaver
from controlplane.engine.planner import Planner
from controlplane.errors import (
    ConfigError,
    StateUnavailable,
    UnknownNode,
    VersionConflict,
)
from controlplane.events.event_log import EventLog
from controlplane.events.event_messages import intent_events, is_warning, reload_message
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.intents.repository import IntentRepository
from controlplane.metrics import logs
from controlplane.metrics.certificates import CertificateMetrics
from controlplane.metrics.registry import Metrics, MetricsSnapshot
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.events import Event
from controlplane.model.facts import Facts
from controlplane.model.intents import Intents
from controlplane.model.nodes import EMPTY_MAP, TopologyProblem
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.views import DrainProgress, EnvoyView, NodeView, ReloadResult
from controlplane.observe.observers import Observers
from controlplane.replicas.membership import ReplicaView
from controlplane.replicas.merged_fleet import ReplicaEnvoy
from controlplane.replicas.replica_set import ReplicaSet
from controlplane.rollouts.observation import ClusterState
from controlplane.rollouts.service import RolloutService
from controlplane.storage.clamp_timestamps import clamp_intent_times
from controlplane.storage.file_store import FileStore
from controlplane.storage.store import Leadership, LoadedState, SoleLeader, Store, Versioned
from controlplane.xds.server import XdsServer

log = structlog.get_logger("tidevoy.engine")


class Engine:
    """A running control plane. Call every method from the event loop that runs `run`."""

    def __init__(
        self,
        settings: Settings,
        *,
        load_settings: Callable[[], Settings] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self._load_settings = load_settings
        self._clock = clock or monotonic_unix_clock()
        self._wake = asyncio.Event()  # set when a decision may be due
        self._started = asyncio.Event()
        self._reload_lock = asyncio.Lock()
        self._events = EventLog(self._clock)
        self._metrics = Metrics(self._metrics_inputs)
        CertificateMetrics(lambda: self.settings, self._metrics.registry)
        self._replicas = self._create_replicas()
        self._store: Store = FileStore(settings.state_dir)
        self._local_store = self._store
        self.leadership: Leadership = SoleLeader()
        if self._replicas is not None:
            self._store, self._local_store = self._replicas.store, self._replicas.local_store
            self.leadership = self._replicas
        self._intents = IntentRepository(self._store, self._on_intents_changed)
        self._observers = Observers(
            settings,
            self._clock,
            emit=self.record_event,
            wake=self._wake.set,
            report_sink=self._replicas.peer_sync if self._replicas is not None else None,
        )
        self._facts = self._observers.fact_store
        self._xds = XdsServer(
            settings,
            self._clock,
            on_event=self.record_event,
            on_request=self._observers.on_xds_request,
            on_change=self._on_own_envoys_changed,
            services=self._grpc_services(),
        )
        self._plan_saver = PlanSaver(
            self._local_store,
            lambda: self._planner.saved_plan,
            self._metrics.failed_plan_saves,
            before_save=self._forget_completed_removals,
        )
        self._planner = Planner(
            settings,
            self._clock,
            intents=self._intents,
            observers=self._observers,
            xds=self._xds,
            fleet=self._fleet,
            metrics=self._metrics,
            emit=self.record_event,
            on_change=self._on_plan_changed,
            wake=self._wake,
        )
        self.rollouts = RolloutService(
            self._store,
            clock=self._clock,
            term=lambda: self.leadership.term,
            cluster_state=self._cluster_state,
            change_intents=self._intents.change,
            settings=lambda: self.settings,
            emit=self.record_event,
            registry=self._metrics.registry,
        )
        node_operations = NodeOperations(
            self._clock, self._intents, self._planner, self._observers.fact_store, self
        )
        self.add, self.remove, self.update = (
            node_operations.add,
            node_operations.remove,
            node_operations.update,
        )
        self.drain, self.undrain = node_operations.drain, node_operations.undrain
        self.forget_envoy = node_operations.forget_envoy
        if self._replicas is not None:
            self._planner.become_follower()
            self._replicas.connect(
                self._intents,
                self._observers,
                self._xds,
                self._planner,
                current_plan=lambda: self._planner.saved_plan,
                on_shared_state_changed=self._on_shared_state_changed,
                write_failures=self._metrics.failed_plan_saves,
            )

    @property
    def registry(self) -> CollectorRegistry:
        """The metrics that `GET /metrics` serves."""
        return self._metrics.registry

    @property
    def xds_port(self) -> int:
        """The port that the xDS server is bound to; valid after the start."""
        return self._xds.port

    async def run(self) -> None:
        """Observe, decide and publish until cancelled. Raises TidevoyError if it cannot start."""
        async with self._store.lock():
            await self._restore_state()
            self._observers.load_static_nodes(self._intents.current)
            try:
                await self._xds.start()
                self._planner.decide()
                self._started.set()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._observers.run())
                    tasks.create_task(self._planner.run())
                    tasks.create_task(self._plan_saver.run())
                    tasks.create_task(self.rollouts.run())
                    if self._replicas is not None:
                        tasks.create_task(self._replicas.run())
            finally:
                self._events.close()
                try:
                    if self._replicas is not None:
                        await self._replicas.resign()
                finally:
                    try:
                        await self._xds.stop()
                    finally:
                        await self._plan_saver.save()

    async def wait_started(self) -> None:
        """Return when the saved state is restored and the xDS port is open."""
        await self._started.wait()

    # --- reading ---

    def nodes(self) -> list[NodeView]:
        """Return all nodes."""
        facts = self._facts.view()
        return [self._node_view(planned, facts) for planned in self._plan.nodes.values()]

    def node(self, address: str) -> NodeView:
        """Return one node. Raises UnknownNode."""
        if address not in self._plan.nodes:
            raise UnknownNode(address)
        return self._node_view(self._plan.nodes[address], self._facts.view())

    def _node_view(self, planned: NodePlan, facts: Facts) -> NodeView:
        now = self._clock()
        drain_progress = self._planner.drain_progress(planned, facts, now)
        return views.node_view(
            planned, facts, self._intents.current, drain_progress, self._plan.rebalance, now
        )

    def explain(self, addresses: Iterable[str] | None = None) -> Mapping[str, NodeExplanation]:
        """Explain each node's share of new sessions, by address; all nodes by default."""
        return explain(self._plan, self._facts.view(), self._planner.policy, self._clock(), addresses)

    def topology_problems(self) -> list[TopologyProblem]:
        """Return the source entries that are invalid."""
        return views.topology_problems(self._facts.view())

    def excluded_addresses(self) -> list[str]:
        """Return the removed addresses that stay excluded even if a source still lists them."""
        return sorted(self._intents.current.removed.keys() - self._plan.nodes.keys())

    def other_keyspace(self) -> Mapping[str, str]:
        """Return the nodes of other keyspaces, address -> keyspace. They never get traffic."""
        return views.other_keyspace(self._facts.view())

    def envoys(self, *, traffic: bool = True) -> list[EnvoyView]:
        """Return the fleet, sorted by id. Without `traffic` the call is cheap at any size."""
        ended = self._intents.current.ended_envoys
        return views.envoy_views(self._envoy_statuses(), self._facts.view(), ended, traffic=traffic)

    def readiness_problems(self) -> list[str]:
        """Return why this control plane is not ready, one sentence each; empty if it is ready."""
        if not self._started.is_set():
            return ["the control plane is starting"]
        return views.readiness_problems(
            self._plan, self._facts.view(), is_published=self._planner.publish_gate.is_open
        )

    def now(self) -> float:
        """Return the time by the clock that the facts use."""
        return self._clock()

    def plan_and_facts(self) -> tuple[Plan, Facts]:
        """Return the current plan and facts, for frequent readers. The facts may change at the next await."""
        return self._plan, self._facts.view()

    def events(self, after_id: int | None = None) -> AsyncIterator[Event]:
        """Stream events; with `after_id`, first replay the retained events that are newer than that id."""
        return self._events.subscribe(after_id)

    # --- the configuration ---

    async def reload(self) -> ReloadResult:
        """Reload the configuration. Raises ConfigError; the old configuration then stays in force."""
        if self._load_settings is None:
            return ReloadResult()
        async with self._reload_lock:
            try:
                new_settings = await asyncio.to_thread(self._load_settings)
            except ConfigError as error:
                self._metrics.reloads.labels("rejected").inc()
                self.record_event(
                    "config.rejected", "config", f"the old configuration stays in force: {error}"
                )
                raise
            self.settings, result = apply_reload(self.settings, new_settings)
            logs.set_level(self.settings.log.level)
            self._planner.configure(self.settings)
            self._observers.configure(self.settings)
            self._xds.configure(self.settings)
            self._observers.load_static_nodes(self._intents.current)
            self._planner.decide()
        self._metrics.reloads.labels("applied").inc()
        self.record_event("config.reloaded", "config", reload_message(result))
        return result

    # --- persistent state ---

    async def _restore_state(self) -> None:
        stored = await self._store.load()
        for load_error in stored.load_errors:
            self.record_event("state.load_failed", str(self.settings.state_dir), load_error)
        now = self._clock()
        self._intents.restore(
            Versioned(clamp_intent_times(stored.intents.value, now), stored.intents.version)
        )
        self.rollouts.restore(stored.rollouts)
        if stored.plan is not None:
            self._planner.restore(stored.plan)

    def _on_plan_changed(self, before: Plan, after: Plan) -> None:
        self._plan_saver.mark_changed()
        self.rollouts.wake()
        if self._replicas is not None:
            self._replicas.notify_plan_changed(before, after)

    def _on_shared_state_changed(self, stored: LoadedState) -> None:
        now = self._clock()
        stored_intents = stored.intents
        if stored_intents.version > self._intents.version:
            self._intents.accept(
                Versioned(clamp_intent_times(stored_intents.value, now), stored_intents.version)
            )
        self.rollouts.accept(stored.rollouts)

    def _cluster_state(self) -> ClusterState:
        plan, facts = self.plan_and_facts()

        def drain_progress(address: str) -> DrainProgress | None:
            planned = plan.nodes.get(address)
            return (
                self._planner.drain_progress(planned, facts, self._clock()) if planned is not None else None
            )

        statuses = self._envoy_statuses()
        return ClusterState(
            plan, facts, self._intents.current, self._planner.policy, statuses, drain_progress
        )

    def _on_intents_changed(self, before: Intents, by_operator: bool) -> None:
        if self._replicas is not None:
            self._replicas.intents_backup.notify_changed()
        if by_operator:
            for draft in intent_events(before, self._intents.current):
                self.record_event(*draft)
        self._observers.load_static_nodes(self._intents.current)
        self._planner.decide(at_once=True)

    async def _forget_completed_removals(self) -> None:
        """Delete the intents of removed nodes that are gone. A failed write is retried later."""

        def without_completed(intents: Intents) -> Intents:
            if self.leadership.term is None:
                return intents
            return forget_completed_removals(intents, self._plan, self._facts.view())

        try:
            await self._intents.change(without_completed, by_operator=False)
        except (StateUnavailable, VersionConflict) as error:
            log.warning("could not record a completed removal", error=str(error))

    # --- other control planes ---

    def replicas(self) -> list[ReplicaView]:
        """Return all control planes, sorted by name; empty if replication is off."""
        return self._replicas.views() if self._replicas is not None else []

    def _create_replicas(self) -> ReplicaSet | None:
        if not self.settings.replicas.enabled:
            return None
        return ReplicaSet(
            self.settings,
            self._clock,
            emit=self.record_event,
            publish_event=self._publish_event,
            registry=self._metrics.registry,
        )

    def _grpc_services(self) -> Sequence[Callable[[grpc.aio.Server, AuthorizeEnvoy], None]]:
        own_services = self._observers.grpc_services
        return (
            (*own_services, self._replicas.peer_sync.register) if self._replicas is not None else own_services
        )

    def _fleet(self) -> Sequence[ReplicaEnvoy]:
        if self._replicas is not None:
            return self._replicas.fleet()
        return [ReplicaEnvoy(status, "") for status in self._xds.statuses()]

    def _envoy_statuses(self) -> list[EnvoyStatus]:
        return [envoy.status for envoy in self._fleet()]

    def _on_own_envoys_changed(self) -> None:
        if self._replicas is not None:
            self._replicas.peer_sync.notify_fleet_changed()

    # --- events and metrics ---

    def record_event(
        self, kind: str, subject: str, message: str, data: Mapping[str, Any] = EMPTY_MAP
    ) -> None:
        """Record an event: publish it, count it, log it, and send it to the other replicas."""
        self._publish_event(kind, subject, message, data)
        if self._replicas is not None:
            self._replicas.peer_sync.send_event(kind, subject, message, data)

    def _publish_event(
        self, kind: str, subject: str, message: str, data: Mapping[str, Any] = EMPTY_MAP
    ) -> None:
        self._events.append(kind, subject, message, data)
        self._metrics.count_event(kind)
        write = log.warning if is_warning(kind) else log.info
        write(message, kind=kind, subject=subject)

    @property
    def _plan(self) -> Plan:
        return self._planner.plan

    def _metrics_inputs(self) -> MetricsSnapshot:
        facts = self._facts.view()
        topologies, reports = list(facts.topologies.values()), list(facts.module_reports.values())
        is_panic_threshold_active, outage = (
            bool(self._plan.panic_threshold_reason),
            bool(facts.node_metrics_outage),
        )
        is_published = self._planner.publish_gate.is_open
        return MetricsSnapshot(
            self.nodes(), self.envoys(), topologies, is_panic_threshold_active, is_published, reports, outage
        )
