"""All observers, and what they put into the facts: the half of the engine that only writes facts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import grpc

from controlplane.clock import Clock
from controlplane.config.settings import Settings, policy
from controlplane.decide.node_sources import present
from controlplane.events.event_messages import (
    hindrance_events,
    module_refusal,
    topology_events,
    vitals_events,
)
from controlplane.grpc_auth import Admit
from controlplane.model.facts import EnvoyLoad
from controlplane.model.health import Health
from controlplane.model.intents import Intents
from controlplane.model.node_metrics import Vitals
from controlplane.model.nodes import CLUSTER_NAME, Place, Resolution, Source, Topology
from controlplane.model.plan import Plan
from controlplane.model.traffic import ModuleReport
from controlplane.observe.discovery import static_nodes
from controlplane.observe.discovery.dns import Resolver
from controlplane.observe.discovery.pd_discovery import PdObserver
from controlplane.observe.envoy_reports.load_reports import LoadReports
from controlplane.observe.envoy_reports.metrics_service import MetricsService, Tap
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from controlplane.observe.fact_store import FactStore
from controlplane.observe.health.check_targets import host_names, targets
from controlplane.observe.health.health_checker import HealthChecker
from controlplane.observe.node_metrics.observer import VitalsObserver


class Feed(Tap, Protocol):
    """Who is told of everything that Envoys send."""

    def load(self, envoy: str, at: float, report: bytes) -> None:
        """A load report."""


class Observation:
    """What is looked at, and what was seen. `wake` is called when a fact may change the plan."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        tell: Callable[..., None],
        wake: Callable[[], None],
        feed: Feed | None = None,
    ) -> None:
        """`tell` gets what `event_messages.Told` has, `feed` all that Envoys send, as it came."""
        self._settings = settings
        self._policy = policy(settings)
        self._tell, self._wake = tell, wake
        self.store = FactStore(clock())
        self.awaited: frozenset[Place] = frozenset()  # places of which it is to be known that they are left
        self._known: frozenset[str] = frozenset()  # addresses of all nodes
        self._look = True  # what is to be observed may have changed
        self._resolver = Resolver(self._on_resolution)
        self._health = HealthChecker(
            settings.health,
            self._on_health,
            clock,
            proxy_protocol=settings.backend.proxy_protocol != "off",
        )
        self._vitals = VitalsObserver(settings, self._on_vitals, clock)
        self._loads = LoadReports(
            self.on_load,
            clock,
            interval=lambda: self._settings.balance.report_interval,
            cluster=CLUSTER_NAME,
            tap=feed.load if feed is not None else _nobody,
        )
        self._telemetry = MetricsService(self.on_report, clock, known=lambda: self._known, tap=feed)

    @property
    def services(self) -> Sequence[Callable[[grpc.aio.Server, Admit], None]]:
        """What Envoys send their reports to; to be added to a gRPC server."""
        return (self._loads.register, self._telemetry.register)

    def new_stream(self, joined: str) -> TelemetryStream:
        """What takes in the messages of an Envoy's module that come by way of another control plane."""
        return self._telemetry.stream(joined)

    async def run(self) -> None:
        """Observe until cancelled."""
        pd = PdObserver(self._settings.pd, self._on_topology) if self._settings.pd.urls else None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._resolver.run())
            tasks.create_task(self._health.run())
            tasks.create_task(self._vitals.run())
            if pd is not None:
                tasks.create_task(pd.run())

    def configure(self, settings: Settings) -> None:
        """Take over changed settings."""
        self._settings, self._policy = settings, policy(settings)
        self._health.configure(settings.health, proxy_protocol=settings.backend.proxy_protocol != "off")
        self._vitals.configure(settings)

    def look_at_given(self, intents: Intents) -> None:
        """Nodes that need no observing: those of the configuration and those added by hand."""
        self.store.put_topology(static_nodes.configured(self._settings.nodes))
        self.store.put_topology(static_nodes.added(intents.added, self._policy.default_weight))
        if not self._settings.pd.urls:
            self.store.put_topology(Topology(Source.PD, complete=True))
        self._look = True
        self._wake()

    def look_where_needed(self, plan: Plan, intents: Intents, known_before: Collection[str]) -> None:
        """Names are resolved and nodes are checked exactly as long as there is a use for it."""
        if not self._look and plan.nodes.keys() == known_before:
            return
        self._look = False
        facts = self.store.facts()
        named = present(facts, intents)
        known = {a: node for a, node in named.items() if a not in intents.removed}
        known |= {a: planned.node for a, planned in plan.nodes.items()}
        hosts = host_names(known.values())
        self._resolver.watch(hosts)
        self.store.keep_hosts(hosts)
        looked_at = targets(known.values(), plan, facts)
        self._health.watch(looked_at)
        self._vitals.watch(looked_at)
        self.store.keep_nodes(known)
        self._known = frozenset(known)

    # --- facts come in; those of Envoys may also be handed on by another control plane ---

    def on_load(self, load: EnvoyLoad) -> None:
        """An Envoy's load report."""
        if self.store.put_load(load, self.awaited):
            self._wake()

    def on_report(self, report: ModuleReport, *, is_told: bool = False) -> None:
        """What the module in an Envoy told. `is_told`: somebody else tells of what it refused."""
        for refusal in self.store.put_report(report):
            if not is_told:
                self._tell(*module_refusal(report.envoy, refusal))
        if self.store.put_census(report, self.awaited):
            self._wake()

    def on_answer(self) -> None:
        """An Envoy has asked for something or acknowledged it."""
        if self.awaited:
            self._wake()  # from now on its silence tells something of the nodes that are being left

    def _on_topology(self, topology: Topology) -> None:
        before = self.store.put_topology(topology)
        for told in topology_events(before, topology):
            self._tell(*told)
        self._look = True
        self._wake()

    def _on_resolution(self, resolution: Resolution) -> None:
        if self.store.put_resolution(resolution):
            self._look = True
            self._wake()

    def _on_health(self, address: str, health: Health) -> None:
        before = self.store.health(address)
        if self.store.put_health(address, health, self._policy):
            self._wake()
        for told in hindrance_events(address, before, health):
            self._tell(*told)

    def _on_vitals(self, vitals: Mapping[str, Vitals], outage: str) -> None:
        for told in vitals_events(self.store.put_vitals(vitals, outage), outage):
            self._tell(*told)


def _nobody(envoy: str, at: float, report: bytes) -> None:
    """There is nobody to be told."""
