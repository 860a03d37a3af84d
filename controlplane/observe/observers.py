"""Runs all observers and stores what they report in the fact store."""

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
    """Receives everything that Envoys send, as it came."""

    def load(self, envoy: str, at: float, report: bytes) -> None:
        """Receive a serialized load report that was made at that time."""


class Observers:
    """Owns the observers and the fact store; calls `wake` when a fact may change the plan."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        emit: Callable[..., None],
        wake: Callable[[], None],
        report_sink: ReportSink | None = None,
    ) -> None:
        """`emit` gets the fields of an `EventDraft`, `report_sink` all that Envoys send, as it came."""
        self._settings = settings
        self._policy = build_policy(settings)
        self._emit, self._wake = emit, wake
        self.fact_store = FactStore(clock())
        self.awaiting_empty: frozenset[NodeKey] = frozenset()  # nodes that drain until they have no session
        self._known_addresses: frozenset[str] = frozenset()  # addresses of all nodes
        self._are_targets_stale = True  # the hosts and nodes to observe may have changed
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
        """Return the functions that add the report services to a gRPC server."""
        return (self._load_reports.register, self._metrics_service.register)

    def new_telemetry_stream(self, resumed_envoy: str) -> TelemetryStream:
        """Return a parser for the messages of an Envoy's module that another replica forwards."""
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
        """Apply changed settings."""
        self._settings, self._policy = settings, build_policy(settings)
        self._health.configure(settings.health, proxy_protocol=settings.backend.proxy_protocol != "off")
        self._node_metrics.configure(settings)

    def load_static_nodes(self, intents: Intents) -> None:
        """Store the nodes of the configuration and those that were added by hand."""
        self.fact_store.put_topology(static_nodes.from_config(self._settings.nodes))
        self.fact_store.put_topology(static_nodes.from_api(intents.added, self._policy.default_weight))
        if not self._settings.pd.urls:
            self.fact_store.put_topology(Topology(Source.PD, is_complete=True))
        self._are_targets_stale = True
        self._wake()

    def update_targets(self, plan: Plan, intents: Intents, previous_addresses: Collection[str]) -> None:
        """Start and stop name resolution and checks so that they match the nodes in use."""
        if not self._are_targets_stale and plan.nodes.keys() == previous_addresses:
            return
        self._are_targets_stale = False
        facts = self.fact_store.view()
        merged = merged_nodes(facts, intents)
        nodes = {a: node for a, node in merged.items() if a not in intents.removed}
        nodes |= {a: planned.node for a, planned in plan.nodes.items()}
        hosts = host_names(nodes.values())
        self._resolver.set_hosts(hosts)
        self.fact_store.retain_hosts(hosts)
        check_targets = build_check_targets(nodes.values(), plan, facts)
        self._health.set_targets(check_targets)
        self._node_metrics.set_targets(check_targets)
        self.fact_store.retain_nodes(nodes)
        self._known_addresses = frozenset(nodes)

    # --- callbacks for new facts; another replica may forward those of Envoys ---

    def on_load_report(self, load: EnvoyLoad) -> None:
        """Store an Envoy's load report."""
        if self.fact_store.put_load(load, self.awaiting_empty):
            self._wake()

    def on_module_report(self, report: ModuleReport, *, is_already_reported: bool = False) -> None:
        """Store a report of an Envoy's module.

        `is_already_reported`: another replica emits the events for rejected configurations.
        """
        for rejection in self.fact_store.put_module_report(report):
            if not is_already_reported:
                self._emit(*module_config_rejected(report.envoy, rejection))
        if self.fact_store.put_session_counts(report, self.awaiting_empty):
            self._wake()

    def on_xds_request(self) -> None:
        """Recompute the plan after a request or an acknowledgement of an Envoy, if nodes are draining."""
        if self.awaiting_empty:
            self._wake()  # from now on, a report of this Envoy without sessions proves that a node is empty

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
    """Ignore a load report: there is no sink."""
