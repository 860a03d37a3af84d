"""The loop that joins observers, decisions and the publisher; the only place that knows all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from controlplane import intents as wishes
from controlplane import logs, views
from controlplane.cancellation import uninterrupted
from controlplane.clock import Clock, steady_clock
from controlplane.config import Settings, policy
from controlplane.decide import plan as decide
from controlplane.decide.explain import Explanation, explain
from controlplane.decide.merge import named_by_others, present
from controlplane.decide.occupancy import awaited
from controlplane.departures import Departures
from controlplane.errors import ConfigError, NeedsModule, NodeExists, StateUnavailable, UnknownNode
from controlplane.events import EventLog
from controlplane.facts import FactStore
from controlplane.first_publish import FirstPublish
from controlplane.metrics import Metrics, Sight
from controlplane.model import (
    NOTHING,
    EnvoyLoad,
    EnvoyView,
    Event,
    Facts,
    Health,
    Intents,
    NodePlan,
    NodeView,
    OnDeadline,
    Place,
    Plan,
    Problem,
    Reloaded,
    Resolution,
    Source,
    State,
    Topology,
)
from controlplane.narrate import (
    departed,
    hindrance_events,
    intent_events,
    is_warning,
    module_refusal,
    node_events,
    rebalance_events,
    reload_message,
    topology_events,
    vitals_events,
)
from controlplane.observe import static
from controlplane.observe.dns import Resolver
from controlplane.observe.health import HealthChecker
from controlplane.observe.load import LoadReports
from controlplane.observe.metrics_service import MetricsService
from controlplane.observe.pd import PdObserver
from controlplane.observe.targets import host_names, targets
from controlplane.observe.vitals import VitalsObserver
from controlplane.plan_keeper import PlanKeeper
from controlplane.publish.resources import CLUSTER_NAME
from controlplane.publish.server import XdsServer
from controlplane.removals import finished
from controlplane.restore import intents_until, plan_until
from controlplane.settings.file import settle
from controlplane.state import SavedPlan, StateDirectory
from controlplane.traffic import ModuleReport
from controlplane.vitals import Vitals

log = structlog.get_logger("tidevoy.engine")

# Time itself changes plans (graces, slow start): a decision is made at least this often, in seconds. Where
# one takes long it is so many times as long instead, but not longer than until there are new counts.
_TICK, _TICK_FACTOR = 1.0, 100.0
# After a decision the loop rests this many times as long as the decision took, so that a flood of facts
# costs at most a third of a core; and this long at least, so that facts that come together are used together.
_REST_FACTOR, _REST_AT_LEAST = 2.0, 0.002


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
        self._policy = policy(settings)
        self._facts = FactStore(self._clock())
        self._plan = Plan()
        self._intents = Intents()
        self._departures = Departures()
        self._events = EventLog(self._clock)
        self._metrics = Metrics(self._sight)
        self._state = StateDirectory(settings.state_dir)
        self._keeper = PlanKeeper(
            self._state, self._saved_plan, self._metrics.saves_failed, first=self._finish_removals
        )
        self._resolver = Resolver(self._on_resolution)
        self._health = HealthChecker(
            settings.health,
            self._on_health,
            self._clock,
            proxy_protocol=settings.backend.proxy_protocol != "off",
        )
        self._vitals = VitalsObserver(settings, self._on_vitals, self._clock)
        self._loads = LoadReports(
            self._on_load,
            self._clock,
            interval=lambda: self.settings.balance.report_interval,
            cluster=CLUSTER_NAME,
        )
        self._known: frozenset[str] = frozenset()  # addresses of all nodes
        self._telemetry = MetricsService(self._on_report, self._clock, known=lambda: self._known)
        self._xds = XdsServer(
            settings,
            self._clock,
            on_event=self._tell,
            on_answer=self._on_answer,
            services=[self._loads.register, self._telemetry.register],
        )
        self._wake = asyncio.Event()
        self._started = asyncio.Event()
        self._changing = asyncio.Lock()
        self._publish = FirstPublish()
        self._look = True  # what is to be observed may have changed
        self._awaited: frozenset[Place] = frozenset()
        self._closed: frozenset[str] = frozenset()

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
        async with self._state.held():
            await self._restore()
            self._observe_given_nodes()
            pd = PdObserver(self.settings.pd, self._on_topology) if self.settings.pd.urls else None
            try:
                await self._xds.start()
                self._decide()
                self._started.set()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._resolver.run())
                    tasks.create_task(self._health.run())
                    tasks.create_task(self._vitals.run())
                    if pd is not None:
                        tasks.create_task(pd.run())
                    tasks.create_task(self._keep_deciding())
                    tasks.create_task(self._keeper.run())
            finally:
                self._events.close()
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
        departure = self._departures.of(planned, facts, now)
        return views.node_view(planned, facts, self._intents, departure, self._plan.rebalance, now)

    def explain(self, addresses: Iterable[str] | None = None) -> Mapping[str, Explanation]:
        """Why nodes have the share of new sessions that they have, by address; of all by default."""
        return explain(self._plan, self._facts.facts(), self._policy, self._clock(), addresses)

    def problems(self) -> list[Problem]:
        """Entries of sources that could not be used."""
        return views.problems(self._facts.facts())

    def excluded(self) -> list[str]:
        """Addresses that an operator removed and that are kept out, whoever names them."""
        return sorted(self._intents.removed.keys() - self._plan.nodes.keys())

    def foreign(self) -> Mapping[str, str]:
        """Nodes of other keyspaces: address -> keyspace. Never routed to."""
        return views.foreign(self._facts.facts())

    def envoys(self) -> list[EnvoyView]:
        """The fleet, by id."""
        return views.envoy_views(self._xds.statuses(), self._facts.facts())

    def unready(self) -> list[str]:
        """Why this control plane is not ready, one sentence each; empty when it is."""
        if not self._started.is_set():
            return ["the control plane is starting"]
        return views.unready(self._plan, self._facts.facts(), published=self._publish.open)

    def events(self, after: int | None = None) -> AsyncIterator[Event]:
        """Events as they happen; first those kept that are newer than the id `after`, when it is given."""
        return self._events.follow(after)

    # --- operators' intents; each returns when the intent is on disk ---

    async def add(
        self,
        address: str,
        *,
        status_address: str | None = None,
        weight: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> NodeView:
        """Add a node by hand, or take its removal back. NodeExists."""
        async with self._changing:
            known = self._plan.nodes.get(address)
            if known is not None and address not in self._intents.removed and known.state is not State.GONE:
                raise NodeExists(address, known.node.source.value)
            if named_by_others(address, self._facts.facts()) and address in self._intents.removed:
                wanted = wishes.readmit(self._intents, address, weight=weight, labels=labels)
            else:
                wanted = wishes.add(
                    self._intents, address, status_address=status_address, weight=weight, labels=labels or {}
                )
            await self._intend(wanted)
        return self.node(address)

    async def remove(self, address: str, *, force: bool = False) -> NodeView:
        """Drain a node and then forget it; `force`: end its sessions at once. UnknownNode, NeedsModule."""
        async with self._changing:
            before = self.node(address)
            wanted = wishes.remove(self._intents, address, self._clock())
            if force:
                self._demand_module("ending sessions", "remove the node without force: its sessions may move")
                wanted = wishes.drain(wanted, address, self._clock(), 0.0, OnDeadline.CLOSE)
            await self._intend(wanted)
        return self._since(before)

    async def drain(
        self, address: str, *, deadline_seconds: float = 600.0, on_deadline: OnDeadline = OnDeadline.KEEP
    ) -> NodeView:
        """Keep new sessions off a node, and let its own move. Idempotent. UnknownNode, NeedsModule."""
        async with self._changing:
            before = self.node(address)
            if on_deadline is OnDeadline.CLOSE:
                self._demand_module("ending sessions at the deadline", "drain with on_deadline: keep")
            await self._intend(
                wishes.drain(self._intents, address, self._clock(), deadline_seconds, on_deadline)
            )
        return self._since(before)

    def _demand_module(self, what: str, instead: str) -> None:
        """NeedsModule when an Envoy that is connected serves, or is to serve, without the module."""
        if without := views.without_module(self._xds.statuses()):
            raise NeedsModule(what, without, instead)

    async def undrain(self, address: str) -> NodeView:
        """Take a drain back. Idempotent. UnknownNode."""
        async with self._changing:
            before = self.node(address)
            await self._intend(wishes.undrain(self._intents, address))
        return self._since(before)

    async def amend(
        self, address: str, *, weight: int | None = None, labels: Mapping[str, str] | None = None
    ) -> NodeView:
        """Change a node's capacity or labels. UnknownNode."""
        async with self._changing:
            before = self.node(address)
            await self._intend(wishes.amend(self._intents, address, weight=weight, labels=labels))
        return self._since(before)

    async def reload(self) -> Reloaded:
        """Read the configuration again. ConfigError, and then the old one stays in force."""
        if self._load_settings is None:
            return Reloaded()
        async with self._changing:
            try:
                wanted = await asyncio.to_thread(self._load_settings)
            except ConfigError as error:
                self._metrics.reloads.labels("rejected").inc()
                self._tell("config.rejected", "config", f"the old configuration stays in force: {error}")
                raise
            self.settings, changed = settle(self.settings, wanted)
            logs.set_level(self.settings.log.level)
            self._policy = policy(self.settings)
            self._health.configure(
                self.settings.health, proxy_protocol=self.settings.backend.proxy_protocol != "off"
            )
            self._vitals.configure(self.settings)
            self._xds.configure(self.settings)
            self._observe_given_nodes()
            self._decide()
        self._metrics.reloads.labels("applied").inc()
        self._tell("config.reloaded", "config", reload_message(changed))
        return changed

    # --- facts come in ---

    def _on_topology(self, topology: Topology) -> None:
        before = self._facts.put_topology(topology)
        for told in topology_events(before, topology):
            self._tell(*told)
        self._look = True
        self._wake.set()

    def _on_resolution(self, resolution: Resolution) -> None:
        if self._facts.put_resolution(resolution):
            self._look = True
            self._wake.set()

    def _on_health(self, address: str, health: Health) -> None:
        before = self._facts.health(address)
        if self._facts.put_health(address, health, self._policy):
            self._wake.set()
        for told in hindrance_events(address, before, health):
            self._tell(*told)

    def _on_vitals(self, vitals: Mapping[str, Vitals], outage: str) -> None:
        for told in vitals_events(self._facts.put_vitals(vitals, outage), outage):
            self._tell(*told)

    def _on_load(self, load: EnvoyLoad) -> None:
        if self._facts.put_load(load, self._awaited):
            self._wake.set()

    def _on_report(self, report: ModuleReport) -> None:
        for refusal in self._facts.put_report(report):
            self._tell(*module_refusal(report.envoy, refusal))
        if self._facts.put_census(report, self._awaited):
            self._wake.set()

    def _on_answer(self) -> None:
        if self._awaited:
            self._wake.set()  # from now on its silence tells something of the nodes that are being left

    def _observe_given_nodes(self) -> None:
        """Nodes that need no observing: those of the configuration and those added by hand."""
        self._facts.put_topology(static.configured(self.settings.nodes))
        self._facts.put_topology(static.added(self._intents.added, self._policy.default_weight))
        if not self.settings.pd.urls:
            self._facts.put_topology(Topology(Source.PD, complete=True))
        self._look = True
        self._wake.set()

    # --- the decision ---

    async def _keep_deciding(self) -> None:
        loop, took = asyncio.get_running_loop(), 0.0
        while True:
            tick = max(_TICK, min(_TICK_FACTOR * took, self._policy.report_interval))
            with suppress(TimeoutError):
                async with asyncio.timeout(tick):  # `wait_for` may swallow a cancellation in Python 3.11
                    await self._wake.wait()
            self._wake.clear()
            start = loop.time()
            self._decide()
            took = loop.time() - start
            await asyncio.sleep(max(_REST_AT_LEAST, _REST_FACTOR * took))

    def _decide(self, *, at_once: bool = False) -> None:
        """One pass from facts to a plan, and everything that follows from a change of it.

        `at_once`: a change is pushed without waiting for others, so that who asked for it can rely on it.
        """
        now = self._clock()
        self._facts.put_fleet(
            self._xds.statuses(),
            now,
            self._policy.envoy_memory,
            self._closed,
            is_published=self._xds.is_pushed,
        )
        before = self._plan
        facts = self._facts.facts()
        with self._metrics.plan_seconds.time():
            self._plan = decide.plan(before, facts, self._intents, self._policy, now)
        self._awaited = awaited(self._plan)
        self._closed = frozenset(a for a, p in self._plan.nodes.items() if p.closed_since is not None)
        changed = self._plan != before
        if changed:
            self._metrics.count_changes(before, self._plan)
            for told in (*node_events(before, self._plan), *rebalance_events(before, self._plan)):
                self._tell(*told)
            self._keeper.changed()
        for address, departure in self._departures.follow(self._plan, facts, now):
            self._tell(*departed(address, departure))
        if self._look or self._plan.nodes.keys() != before.nodes.keys():
            self._look_where_needed()
        if self._publish.opens(self._plan, facts, self._policy, now) or (changed and self._publish.open):
            self._xds.publish(self._plan, at_once=at_once)

    def _look_where_needed(self) -> None:
        """Names are resolved and nodes are checked exactly as long as there is a use for it."""
        self._look = False
        facts = self._facts.facts()
        named = present(facts, self._intents)
        known = {a: node for a, node in named.items() if a not in self._intents.removed}
        known |= {a: planned.node for a, planned in self._plan.nodes.items()}
        hosts = host_names(known.values())
        self._resolver.watch(hosts)
        self._facts.keep_hosts(hosts)
        looked_at = targets(known.values(), self._plan, facts)
        self._health.watch(looked_at)
        self._vitals.watch(looked_at)
        self._facts.keep_nodes(known)
        self._known = frozenset(known)

    # --- what is kept on disk ---

    async def _restore(self) -> None:
        stored = await self._state.load()
        for damage in stored.damages:
            self._tell("state.damaged", str(self.settings.state_dir), damage)
        now = self._clock()
        self._intents = intents_until(stored.intents, now)
        if stored.plan is not None:
            self._publish.waive()
            self._plan = plan_until(stored.plan.plan, now)
            for envoy in stored.plan.envoys:
                # Seen now: that we were away does not tell that it was.
                self._facts.see_envoy(envoy, now)

    async def _intend(self, intents: Intents, *, by_operator: bool = True) -> None:
        """Make new intents durable, then act on them. StateUnavailable, and then nothing has changed.

        Also when the caller is cancelled: what is on disk and what is in force are never two things.
        """
        await uninterrupted(self._take_over(intents, by_operator))

    async def _take_over(self, intents: Intents, by_operator: bool) -> None:
        await self._state.save_intents(intents)
        before, self._intents = self._intents, intents
        if by_operator:
            for told in intent_events(before, intents):
                self._tell(*told)
        self._observe_given_nodes()
        self._decide(at_once=True)

    async def _finish_removals(self) -> None:
        """Forget what was asked for nodes that have left. What cannot be written is tried again later."""
        async with self._changing:
            wanted = finished(self._intents, self._plan, self._facts.facts())
            if wanted == self._intents:
                return
            try:
                await self._intend(wanted, by_operator=False)
            except StateUnavailable as error:
                log.warning("a finished removal could not be recorded", error=str(error))

    def _saved_plan(self) -> SavedPlan | None:
        if not self._publish.open:
            return None  # else it would be published at the next start, for all that is missing in it
        return SavedPlan(self._plan, dict(self._facts.facts().envoys))

    # --- telling ---

    def _tell(self, kind: str, subject: str, message: str, data: Mapping[str, Any] = NOTHING) -> None:
        self._events.append(kind, subject, message, data)
        self._metrics.count_event(kind)
        write = log.warning if is_warning(kind) else log.info
        write(message, kind=kind, subject=subject)

    def _since(self, before: NodeView) -> NodeView:
        """A node after a change; as it was before when the change let it be forgotten."""
        address = before.plan.node.address
        return self.node(address) if address in self._plan.nodes else before

    def _sight(self) -> Sight:
        facts = self._facts.facts()
        topologies, reports = list(facts.topologies.values()), list(facts.reports.values())
        floor, outage = bool(self._plan.floor), bool(facts.vitals_outage)
        return Sight(self.nodes(), self.envoys(), topologies, floor, self._publish.open, reports, outage)
