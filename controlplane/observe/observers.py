"""Runs all observers, which store facts in the fact store."""

from __future__ import annotations

import asyncio

from controlplane.clock import Clock
from controlplane.config.own_tls import ClientTls
from controlplane.config.settings import Settings, build_policy
from controlplane.decide.node_sources import merged_nodes
from controlplane.events.event_log import EventLog
from controlplane.model.intents import Intents
from controlplane.model.nodes import Source, Topology
from controlplane.model.plan import Plan
from controlplane.observe.discovery import static_nodes
from controlplane.observe.discovery.dns import Resolver
from controlplane.observe.discovery.pd_discovery import PdObserver
from controlplane.observe.envoy_reports.load_reports import LoadReportService
from controlplane.observe.envoy_reports.metrics_service import MetricsService, ReportForwarder
from controlplane.observe.envoy_reports.statement_reports import StatementReportService
from controlplane.observe.fact_store import FactStore
from controlplane.observe.health.check_targets import build_check_targets, host_names
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.health_checker import HealthChecker
from controlplane.observe.node_metrics.observer import NodeMetricsObserver
from controlplane.observe.statements.collector import StatementCollector


class Observers:
    """Owns the observers.

    `load_reports`, `module_metrics` and `statement_reports` are gRPC services for the xDS port. `statements`
    are the statistics of statements, which no decision uses.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        facts: FactStore,
        events: EventLog,
        forwarder: ReportForwarder | None = None,
    ) -> None:
        """`forwarder` sends Envoys' reports to other replicas. Raises ConfigError for unusable TLS files."""
        self._settings = settings
        self._facts = facts
        self._loaded_intents: Intents | None = None  # intents whose nodes are stored; None: store again
        self._targets_key: object = None  # identifies the input of the current targets
        self._resolver = Resolver(facts.put_resolution)
        status, ca = settings.health.status, settings.balance.prometheus.ca
        self._status_tls: ReloadingClientContext | None = None
        self._prometheus_tls: ReloadingClientContext | None = None
        if status.tls:
            self._status_tls = ReloadingClientContext(
                status.client_tls, ("health", "status", "client_tls"), clock, events.emit
            )
        if ca is not None:
            self._prometheus_tls = ReloadingClientContext(
                ClientTls(ca=ca), ("balance", "prometheus"), clock, events.emit
            )
        self._health = HealthChecker(
            settings.health,
            facts.put_health,
            clock,
            tls=self._status_tls,
            proxy_protocol=settings.backend.proxy_protocol != "off",
        )
        self._node_metrics = NodeMetricsObserver(
            settings, facts.put_node_metrics, clock, self._status_tls, self._prometheus_tls
        )
        self.load_reports = LoadReportService(
            facts.put_load,
            clock,
            interval=lambda: self._settings.balance.report_interval,
            forwarder=forwarder,
        )
        self.module_metrics = MetricsService(
            facts.put_module_report,
            clock,
            known_nodes=lambda: facts.known_addresses,
            forwarder=forwarder,
        )
        self.statements = StatementCollector(settings.statements, clock)
        self.statement_reports = StatementReportService(
            self.statements.put, clock, envoy_of=facts.envoy_of_process, forwarder=forwarder
        )

    async def run(self) -> None:
        """Observe until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._resolver.run())
            tasks.create_task(self._health.run())
            tasks.create_task(self._node_metrics.run())
            for tls in (self._status_tls, self._prometheus_tls):
                if tls is not None:
                    tasks.create_task(tls.watch())
            if self._settings.pd.urls:
                tasks.create_task(PdObserver(self._settings.pd, self._facts.put_topology).run())

    def configure(self, settings: Settings) -> None:
        self._settings = settings
        self._loaded_intents = None
        self._health.configure(settings.health, proxy_protocol=settings.backend.proxy_protocol != "off")
        self._node_metrics.configure(settings)
        self.statements.configure(settings.statements)

    def load_static_nodes(self, intents: Intents) -> None:
        """Store the nodes from the configuration and from the API, if they may have changed."""
        if intents is self._loaded_intents:
            return
        self._loaded_intents = intents
        default_weight = build_policy(self._settings).default_weight
        self._facts.put_topology(static_nodes.from_config(self._settings.nodes))
        self._facts.put_topology(static_nodes.from_api(intents.added, default_weight))
        if not self._settings.pd.urls:
            self._facts.put_topology(Topology(Source.PD, is_complete=True))

    def update_targets(self, plan: Plan, intents: Intents) -> None:
        """Start and stop DNS lookups, checks and metrics so that they match the nodes in use."""
        targets_key = (self._facts.discovery_serial, plan.nodes.keys())
        if targets_key == self._targets_key:
            return
        self._targets_key = targets_key
        facts = self._facts.view()
        nodes = {a: node for a, node in merged_nodes(facts, intents).items() if a not in intents.removed}
        nodes |= {a: planned.node for a, planned in plan.nodes.items()}
        hosts = host_names(nodes.values())
        self._resolver.set_hosts(hosts)
        self._facts.retain_hosts(hosts)
        check_targets = build_check_targets(nodes.values(), plan, facts)
        self._health.set_targets(check_targets)
        self._node_metrics.set_targets(check_targets)
        self._facts.retain_nodes(nodes)
