"""All observers, and what they put into the facts: the half of the engine that only writes facts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import grpc

from controlplane.clock import Clock
from controlplane.config.settings import Settings, build_policy
from controlplane.decide.node_sources import merged_nodes
from controlplane.events.event_messages import (
    migration_blocker_events,
    module_config_rejected,
    node_metrics_events,
    topology_events,
)
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.model.facts import EnvoyLoad
from controlplane.model.health import Health
from controlplane.model.intents import Intents
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.nodes import CLUSTER_NAME, NodeKey, Resolution, Source, Topology
from controlplane.model.plan import Plan
from controlplane.model.traffic import ModuleReport
from controlplane.observe.discovery import static_nodes
from controlplane.observe.discovery.dns import Resolver
from controlplane.observe.discovery.pd_discovery import PdObserver
from controlplane.observe.envoy_reports.load_reports import LoadReportService
from controlplane.observe.envoy_reports.metrics_service import MetricsService, TelemetrySink
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from controlplane.observe.fact_store import FactStore
from controlplane.observe.health.check_targets import build_check_targets, host_names
from controlplane.observe.health.health_checker import HealthChecker
from controlplane.observe.node_metrics.observer import NodeMetricsObserver


class ReportSink(TelemetrySink, Protocol):
    """Who is told of everything that Envoys send."""

    def load(self, envoy: str, at: float, report: bytes) -> None:
        """A load report."""


class Observers:
    """What is looked at, and what was seen. `wake` is called when a fact may change the plan."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        emit: Callable[..., None],
        wake: Callable[[], None],
        report_sink: ReportSink | None = None,
    ) -> None:
        """`tell` gets what `event_messages.Told` has, `feed` all that Envoys send, as it came."""
        self._settings = settings
        self._policy = build_policy(settings)
        self._emit, self._wake = emit, wake
        self.fact_store = FactStore(clock())
        self.awaiting_empty: frozenset[NodeKey] = (
            frozenset()
        )  # places of which it is to be known that they are left
        self._known_addresses: frozenset[str] = frozenset()  # addresses of all nodes
        self._are_targets_stale = True  # what is to be observed may have changed
        self._resolver = Resolver(self._on_resolution)
        self._health = HealthChecker(
            settings.health,
            self._on_health,
            clock,
            proxy_protocol=settings.backend.proxy_protocol != "off",
        )
        self._node_metrics = NodeMetricsObserver(settings, self._on_node_metrics, clock)
        self._load_reports = LoadReportService(
            self.on_load_report,
            clock,
            interval=lambda: self._settings.balance.report_interval,
            cluster=CLUSTER_NAME,
            sink=report_sink.load if report_sink is not None else _discard_load_report,
        )
        self._metrics_service = MetricsService(
            self.on_module_report, clock, known_nodes=lambda: self._known_addresses, sink=report_sink
        )

    @property
    def grpc_services(self) -> Sequence[Callable[[grpc.aio.Server, AuthorizeEnvoy], None]]:
        """What Envoys send their reports to; to be added to a gRPC server."""
        return (self._load_reports.register, self._metrics_service.register)

    def new_telemetry_stream(self, resumed_envoy: str) -> TelemetryStream:
        """What takes in the messages of an Envoy's module that come by way of another control plane."""
        return self._metrics_service.new_stream(resumed_envoy)

    async def run(self) -> None:
        """Observe until cancelled."""
        pd = PdObserver(self._settings.pd, self._on_topology) if self._settings.pd.urls else None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._resolver.run())
            tasks.create_task(self._health.run())
            tasks.create_task(self._node_metrics.run())
            if pd is not None:
                tasks.create_task(pd.run())

    def configure(self, settings: Settings) -> None:
        """Take over changed settings."""
        self._settings, self._policy = settings, build_policy(settings)
        self._health.configure(settings.health, proxy_protocol=settings.backend.proxy_protocol != "off")
        self._node_metrics.configure(settings)

    def load_static_nodes(self, intents: Intents) -> None:
        """Nodes that need no observing: those of the configuration and those added by hand."""
        self.fact_store.put_topology(static_nodes.from_config(self._settings.nodes))
        self.fact_store.put_topology(static_nodes.from_api(intents.added, self._policy.default_weight))
        if not self._settings.pd.urls:
            self.fact_store.put_topology(Topology(Source.PD, is_complete=True))
        self._are_targets_stale = True
        self._wake()

    def update_targets(self, plan: Plan, intents: Intents, previous_addresses: Collection[str]) -> None:
        """Names are resolved and nodes are checked exactly as long as there is a use for it."""
        if not self._are_targets_stale and plan.nodes.keys() == previous_addresses:
            return
        self._are_targets_stale = False
        facts = self.fact_store.view()
        merged = merged_nodes(facts, intents)
        known = {a: node for a, node in merged.items() if a not in intents.removed}
        known |= {a: planned.node for a, planned in plan.nodes.items()}
        hosts = host_names(known.values())
        self._resolver.set_hosts(hosts)
        self.fact_store.retain_hosts(hosts)
        check_targets = build_check_targets(known.values(), plan, facts)
        self._health.set_targets(check_targets)
        self._node_metrics.set_targets(check_targets)
        self.fact_store.retain_nodes(known)
        self._known_addresses = frozenset(known)

    # --- facts come in; those of Envoys may also be handed on by another control plane ---

    def on_load_report(self, load: EnvoyLoad) -> None:
        """An Envoy's load report."""
        if self.fact_store.put_load(load, self.awaiting_empty):
            self._wake()

    def on_module_report(self, report: ModuleReport, *, is_already_reported: bool = False) -> None:
        """What the module in an Envoy told. `is_told`: somebody else tells of what it refused."""
        for rejection in self.fact_store.put_module_report(report):
            if not is_already_reported:
                self._emit(*module_config_rejected(report.envoy, rejection))
        if self.fact_store.put_session_counts(report, self.awaiting_empty):
            self._wake()

    def on_xds_request(self) -> None:
        """An Envoy has asked for something or acknowledged it."""
        if self.awaiting_empty:
            self._wake()  # from now on its silence tells something of the nodes that are being left

    def _on_topology(self, topology: Topology) -> None:
        before = self.fact_store.put_topology(topology)
        for draft in topology_events(before, topology):
            self._emit(*draft)
        self._are_targets_stale = True
        self._wake()

    def _on_resolution(self, resolution: Resolution) -> None:
        if self.fact_store.put_resolution(resolution):
            self._are_targets_stale = True
            self._wake()

    def _on_health(self, address: str, health: Health) -> None:
        before = self.fact_store.health(address)
        if self.fact_store.put_health(address, health, self._policy):
            self._wake()
        for draft in migration_blocker_events(address, before, health):
            self._emit(*draft)

    def _on_node_metrics(self, metrics: Mapping[str, NodeMetrics], outage: str) -> None:
        for draft in node_metrics_events(self.fact_store.put_node_metrics(metrics, outage), outage):
            self._emit(*draft)


def _discard_load_report(envoy: str, at: float, report: bytes) -> None:
    """There is nobody to be told."""
