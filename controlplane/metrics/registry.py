"""Prometheus metrics of the control plane. Gauges are read from the engine at each scrape.

Labels are limited to nodes, Envoys, and a bounded number of digests; clients, users and texts of statements
are never labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from controlplane.metrics.envoy_module import module_metric_families
from controlplane.metrics.fleet import (
    envoy_metric_families,
    limit_metric_families,
    node_metric_families,
    rule_metric_families,
    source_metric_families,
)
from controlplane.metrics.statements import statement_metric_families
from controlplane.model.nodes import EMPTY_MAP, State, Topology
from controlplane.model.plan import Plan
from controlplane.model.statements import StatementCounts
from controlplane.model.traffic import ModuleReport
from controlplane.model.views import EnvoyView, LimitView, NodeView, RuleView


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The state that a scrape exports."""

    nodes: Sequence[NodeView]
    envoys: Sequence[EnvoyView]
    topologies: Sequence[Topology]
    is_panic_threshold_active: bool
    is_published: bool
    module_reports: Iterable[ModuleReport] = ()
    limits: Sequence[LimitView] = ()
    statements: Mapping[str, StatementCounts] = field(default_factory=lambda: EMPTY_MAP)  # by digest
    rules: Sequence[RuleView] = ()
    has_node_metrics_outage: bool = False


class Metrics(Collector):
    """The Prometheus registry, with the counters that the engine increments."""

    def __init__(self, take_snapshot: Callable[[], MetricsSnapshot]) -> None:
        self.registry = CollectorRegistry()
        self._take_snapshot = take_snapshot
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.state_changes = Counter(
            "tidevoy_node_state_changes_total",
            "State changes of the node, by new state.",
            ["node", "state"],
            registry=self.registry,
        )
        self.plan_duration = Histogram(
            "tidevoy_plan_duration_seconds",
            "Time to compute the plan for all nodes once.",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
            registry=self.registry,
        )
        self.reloads = Counter(
            "tidevoy_config_reloads_total",
            "Configuration reloads, by result.",
            ["result"],
            registry=self.registry,
        )
        self.failed_plan_saves = Counter(
            "tidevoy_plan_saves_failed_total", "Plans that could not be saved.", registry=self.registry
        )

    def count_state_changes(self, before: Plan, after: Plan) -> None:
        """Count the state changes from one plan to the next, and remove the series of forgotten nodes."""
        for address, planned in after.nodes.items():
            past = before.nodes.get(address)
            if past is None or past.state is not planned.state:
                self.state_changes.labels(address, planned.state.value).inc()
        for address in before.nodes.keys() - after.nodes.keys():
            for state in State:
                with suppress(KeyError):
                    self.state_changes.remove(address, state.value)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, and the counters that Envoys report."""
        snapshot = self._take_snapshot()
        yield from node_metric_families(snapshot.nodes)
        yield from envoy_metric_families(snapshot.envoys)
        yield from source_metric_families(snapshot.topologies)
        yield from module_metric_families(snapshot.module_reports)
        yield from limit_metric_families(snapshot.limits)
        yield from statement_metric_families(snapshot.statements)
        yield from rule_metric_families(snapshot.rules)
        yield GaugeMetricFamily(
            "tidevoy_panic_threshold_active",
            "1 while nodes stay in service although they fail their checks (panic threshold).",
            snapshot.is_panic_threshold_active,
        )
        yield GaugeMetricFamily(
            "tidevoy_node_metrics_outage",
            "1 while node metrics are unavailable from every node.",
            snapshot.has_node_metrics_outage,
        )
        yield GaugeMetricFamily(
            "tidevoy_plan_published",
            "1 once a plan has been published since the start.",
            snapshot.is_published,
        )
