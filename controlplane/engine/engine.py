"""The loop that joins observers, decisions and the publisher; the only place that knows all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
import structlog
from prometheus_client import CollectorRegistry

from controlplane.clock import Clock, steady_clock
from controlplane.config.loader import settle
from controlplane.config.settings import Settings
from controlplane.decide import views
from controlplane.decide.completed_removals import finished
from controlplane.decide.explain import Explanation, explain
from controlplane.engine.node_operations import Operators
from controlplane.engine.plan_saver import PlanKeeper
from controlplane.engine.planner import Planner
from controlplane.errors import (
    ConfigError,
    StateUnavailable,
    Superseded,
    UnknownNode,
)
from controlplane.events.event_log import EventLog
from controlplane.events.event_messages import intent_events, is_warning, reload_message
from controlplane.grpc_auth import Admit
from controlplane.intents.repository import Intentions
from controlplane.metrics import logs
from controlplane.metrics.certificates import CertificateMetrics
from controlplane.metrics.registry import Metrics, Sight
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.events import Event
from controlplane.model.facts import Facts
from controlplane.model.intents import Intents
from controlplane.model.nodes import NOTHING, Problem
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.views import Departure, EnvoyView, NodeView, Reloaded
from controlplane.observe.observers import Observation
from controlplane.replicas.membership import ReplicaView
from controlplane.replicas.merged_fleet import Placed
from controlplane.replicas.replica_set import Replicas
from controlplane.rollouts.observation import Outlook
from controlplane.rollouts.service import Rollouts
from controlplane.storage.clamp_timestamps import intents_until
from controlplane.storage.file_store import StateDirectory
from controlplane.storage.store import Alone, Leadership, Store, Stored, Versioned
from controlplane.xds.server import XdsServer

log = structlog.get_logger("tidevoy.engine")


class Engine:
    """A running control plane. All methods belong to the event loop that `run` runs in."""

    def __init__(
        self,
        settings: Settings,
        *,
        load_settings: Callable[[], Settings] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self._load_settings = load_settings
        self._clock = clock or steady_clock()
        self._wake = asyncio.Event()  # a decision may be due
        self._started = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._events = EventLog(self._clock)
        self._metrics = Metrics(self._sight)
        CertificateMetrics(lambda: self.settings, self._metrics.registry)
        self._replicas = self._other_control_planes()
        self._store: Store = StateDirectory(settings.state_dir)
        self._directory = self._store
        self.leadership: Leadership = Alone()
        if self._replicas is not None:
            self._store, self._directory = self._replicas.store, self._replicas.copy
            self.leadership = self._replicas
        self._intentions = Intentions(self._store, self._on_intents)
        self._observation = Observation(
            settings,
            self._clock,
            tell=self.note,
            wake=self._wake.set,
            feed=self._replicas.mesh if self._replicas is not None else None,
        )
        self._facts = self._observation.store
        self._xds = XdsServer(
            settings,
            self._clock,
            on_event=self.note,
            on_answer=self._observation.on_answer,
            on_change=self._on_own_envoys,
            services=self._services(),
        )
        self._keeper = PlanKeeper(
            self._directory,
            lambda: self._planner.saved,
            self._metrics.saves_failed,
            first=self._finish_removals,
        )
        self._planner = Planner(
            settings,
            self._clock,
            intentions=self._intentions,
            observation=self._observation,
            xds=self._xds,
            fleet=self._fleet,
            metrics=self._metrics,
            tell=self.note,
            on_change=self._on_plan,
            wake=self._wake,
        )
        self.rollouts = Rollouts(
            self._store,
            clock=self._clock,
            term=lambda: self.leadership.term,
            look=self._outlook,
            change=self._intentions.change,
            settings=lambda: self.settings,
            tell=self.note,
            registry=self._metrics.registry,
        )
        operators = Operators(self._clock, self._intentions, self._planner, self._observation.store, self)
        self.add, self.remove, self.amend = operators.add, operators.remove, operators.amend
        self.drain, self.undrain = operators.drain, operators.undrain
        self.forget_envoy = operators.forget_envoy
        if self._replicas is not None:
            self._planner.stand_by()
            self._replicas.connect(
                self._intentions,
                self._observation,
                self._xds,
                self._planner,
                current=lambda: self._planner.saved,
                on_stored=self._on_stored,
                failures=self._metrics.saves_failed,
            )

    @property
    def registry(self) -> CollectorRegistry:
        """What `GET /metrics` shows."""
        return self._metrics.registry

    @property
    def xds_port(self) -> int:
        """The port that the xDS server is bound to, once started."""
        return self._xds.port

    async def run(self) -> None:
        """Observe, decide and publish until cancelled. TidevoyError when it cannot start."""
        async with self._store.held():
            await self._restore()
            self._observation.look_at_given(self._intentions.now)
            try:
                await self._xds.start()
                self._planner.decide()
                self._started.set()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._observation.run())
                    tasks.create_task(self._planner.run())
                    tasks.create_task(self._keeper.run())
                    tasks.create_task(self.rollouts.run())
                    if self._replicas is not None:
                        tasks.create_task(self._replicas.run())
            finally:
                self._events.close()
                try:
                    if self._replicas is not None:
                        await self._replicas.leave()
                finally:
                    try:
                        await self._xds.stop()
                    finally:
                        await self._keeper.save()

    async def started(self) -> None:
        """Returns when state is read back and the xDS port is open."""
        await self._started.wait()

    # --- reading ---

    def nodes(self) -> list[NodeView]:
        """All nodes, by address."""
        facts = self._facts.facts()
        return [self._view(planned, facts) for planned in self._plan.nodes.values()]

    def node(self, address: str) -> NodeView:
        """One node. UnknownNode."""
        if address not in self._plan.nodes:
            raise UnknownNode(address)
        return self._view(self._plan.nodes[address], self._facts.facts())

    def _view(self, planned: NodePlan, facts: Facts) -> NodeView:
        now = self._clock()
        departure = self._planner.departure(planned, facts, now)
        return views.node_view(planned, facts, self._intentions.now, departure, self._plan.rebalance, now)

    def explain(self, addresses: Iterable[str] | None = None) -> Mapping[str, Explanation]:
        """Why nodes have the share of new sessions that they have, by address; of all by default."""
        return explain(self._plan, self._facts.facts(), self._planner.policy, self._clock(), addresses)

    def problems(self) -> list[Problem]:
        """Entries of sources that could not be used."""
        return views.problems(self._facts.facts())

    def excluded(self) -> list[str]:
        """Addresses that an operator removed and that are kept out, whoever names them."""
        return sorted(self._intentions.now.removed.keys() - self._plan.nodes.keys())

    def foreign(self) -> Mapping[str, str]:
        """Nodes of other keyspaces: address -> keyspace. Never routed to."""
        return views.foreign(self._facts.facts())

    def envoys(self, *, traffic: bool = True) -> list[EnvoyView]:
        """The fleet, by id; without `traffic` it costs little whatever there is."""
        ended = self._intentions.now.ended
        return views.envoy_views(self._statuses(), self._facts.facts(), ended, traffic=traffic)

    def unready(self) -> list[str]:
        """Why this control plane is not ready, one sentence each; empty when it is."""
        if not self._started.is_set():
            return ["the control plane is starting"]
        return views.unready(self._plan, self._facts.facts(), published=self._planner.first.open)

    def now(self) -> float:
        """The time, by the clock of the facts."""
        return self._clock()

    def seen(self) -> tuple[Plan, Facts]:
        """The plan in force and the facts, for who looks often; facts may change at the next await."""
        return self._plan, self._facts.facts()

    def events(self, after: int | None = None) -> AsyncIterator[Event]:
        """Events as they happen; first those kept that are newer than the id `after`, when it is given."""
        return self._events.follow(after)

    # --- the configuration ---

    async def reload(self) -> Reloaded:
        """Read the configuration again. ConfigError, and then the old one stays in force."""
        if self._load_settings is None:
            return Reloaded()
        async with self._reloading:
            try:
                wanted = await asyncio.to_thread(self._load_settings)
            except ConfigError as error:
                self._metrics.reloads.labels("rejected").inc()
                self.note("config.rejected", "config", f"the old configuration stays in force: {error}")
                raise
            self.settings, changed = settle(self.settings, wanted)
            logs.set_level(self.settings.log.level)
            self._planner.configure(self.settings)
            self._observation.configure(self.settings)
            self._xds.configure(self.settings)
            self._observation.look_at_given(self._intentions.now)
            self._planner.decide()
        self._metrics.reloads.labels("applied").inc()
        self.note("config.reloaded", "config", reload_message(changed))
        return changed

    # --- what is kept ---

    async def _restore(self) -> None:
        stored = await self._store.load()
        for damage in stored.damages:
            self.note("state.damaged", str(self.settings.state_dir), damage)
        now = self._clock()
        self._intentions.restore(Versioned(intents_until(stored.intents.value, now), stored.intents.version))
        self.rollouts.restore(stored.rollouts)
        if stored.plan is not None:
            self._planner.restore(stored.plan)

    def _on_plan(self, before: Plan, after: Plan) -> None:
        """There is another plan."""
        self._keeper.changed()
        self.rollouts.wake()
        if self._replicas is not None:
            self._replicas.changed(before, after)

    def _on_stored(self, stored: Stored) -> None:
        """What control planes share may have changed."""
        now = self._clock()
        kept = stored.intents
        if kept.version > self._intentions.version:
            self._intentions.take(Versioned(intents_until(kept.value, now), kept.version))
        self.rollouts.put(stored.rollouts)

    def _outlook(self) -> Outlook:
        plan, facts = self.seen()

        def departure(address: str) -> Departure | None:
            planned = plan.nodes.get(address)
            return self._planner.departure(planned, facts, self._clock()) if planned is not None else None

        statuses = self._statuses()
        return Outlook(plan, facts, self._intentions.now, self._planner.policy, statuses, departure)

    def _on_intents(self, before: Intents, by_operator: bool) -> None:
        """Other intents are kept, and so in force."""
        if self._replicas is not None:
            self._replicas.intents.changed()
        if by_operator:
            for told in intent_events(before, self._intentions.now):
                self.note(*told)
        self._observation.look_at_given(self._intentions.now)
        self._planner.decide(at_once=True)

    async def _finish_removals(self) -> None:
        """Forget what was asked for nodes that have left. What cannot be written is tried again later."""

        def without(intents: Intents) -> Intents:
            if self.leadership.term is None:
                return intents
            return finished(intents, self._plan, self._facts.facts())

        try:
            await self._intentions.change(without, by_operator=False)
        except (StateUnavailable, Superseded) as error:
            log.warning("a finished removal could not be recorded", error=str(error))

    # --- other control planes ---

    def replicas(self) -> list[ReplicaView]:
        """All control planes, by name; none where there is only one."""
        return self._replicas.views() if self._replicas is not None else []

    def _other_control_planes(self) -> Replicas | None:
        if not self.settings.replicas.enabled:
            return None
        return Replicas(
            self.settings, self._clock, tell=self.note, show=self._show, registry=self._metrics.registry
        )

    def _services(self) -> Sequence[Callable[[grpc.aio.Server, Admit], None]]:
        ours = self._observation.services
        return (*ours, self._replicas.mesh.register) if self._replicas is not None else ours

    def _fleet(self) -> Sequence[Placed]:
        if self._replicas is not None:
            return self._replicas.fleet()
        return [Placed(status, "") for status in self._xds.statuses()]

    def _statuses(self) -> list[EnvoyStatus]:
        return [placed.status for placed in self._fleet()]

    def _on_own_envoys(self) -> None:
        if self._replicas is not None:
            self._replicas.mesh.changed()

    # --- telling ---

    def note(self, kind: str, subject: str, message: str, data: Mapping[str, Any] = NOTHING) -> None:
        """Something has happened: an event, a metric and a line in the log."""
        self._show(kind, subject, message, data)
        if self._replicas is not None:
            self._replicas.mesh.event(kind, subject, message, data)

    def _show(self, kind: str, subject: str, message: str, data: Mapping[str, Any] = NOTHING) -> None:
        self._events.append(kind, subject, message, data)
        self._metrics.count_event(kind)
        write = log.warning if is_warning(kind) else log.info
        write(message, kind=kind, subject=subject)

    @property
    def _plan(self) -> Plan:
        return self._planner.plan

    def _sight(self) -> Sight:
        facts = self._facts.facts()
        topologies, reports = list(facts.topologies.values()), list(facts.reports.values())
        floor, outage = bool(self._plan.floor), bool(facts.vitals_outage)
        published = self._planner.first.open
        return Sight(self.nodes(), self.envoys(), topologies, floor, published, reports, outage)
