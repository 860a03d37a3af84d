"""Prometheus metrics of the control plane. Gauges are read from the engine at each scrape, so none is stale.

The label sets are bounded by nodes and Envoys; clients, users and statements are never labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from controlplane.metrics.envoy_module import module_metric_families
from controlplane.metrics.nodes import node_metric_families
from controlplane.model.nodes import Source, State, Topology
from controlplane.model.plan import EdsHealth, Plan
from controlplane.model.traffic import ModuleReport
from controlplane.model.views import EnvoyView, NodeView


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The state that a scrape exports."""

    nodes: Sequence[NodeView]
    envoys: Sequence[EnvoyView]
    topologies: Sequence[Topology]
    is_panic_threshold_active: bool
    is_published: bool
    module_reports: Iterable[ModuleReport] = ()
    has_node_metrics_outage: bool = False


class Metrics:
    """The Prometheus registry, with the counters that the engine increments."""

    def __init__(self, take_snapshot: Callable[[], MetricsSnapshot]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineGauges(take_snapshot))
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.state_changes = Counter(
            "tidevoy_node_state_changes_total",
            "State changes of the node, by new state.",
            ["node", "state"],
            registry=self.registry,
        )
        self.events = Counter("tidevoy_events_total", "Events by kind.", ["kind"], registry=self.registry)
        for kind in ("envoy.denied", "xds.certificates_rejected"):
            self.events.labels(kind)  # exported as 0, or an alert on an increase would miss the first event
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

    def count_event(self, kind: str) -> None:
        """Count one event of this kind."""
        self.events.labels(kind).inc()

    def count_state_changes(self, before: Plan, after: Plan) -> None:
        """Count the state changes from one plan to the next.

        Removes the series of forgotten nodes, so that the label sets stay bounded by the current nodes.
        """
        for address, planned in after.nodes.items():
            past = before.nodes.get(address)
            if past is None or past.state is not planned.state:
                self.state_changes.labels(address, planned.state.value).inc()
        for address in before.nodes.keys() - after.nodes.keys():
            for state in State:
                with suppress(KeyError):
                    self.state_changes.remove(address, state.value)


class _EngineGauges(Collector):
    def __init__(self, take_snapshot: Callable[[], MetricsSnapshot]) -> None:
        self._take_snapshot = take_snapshot

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        snapshot = self._take_snapshot()
        yield from _node_families(snapshot.nodes)
        yield from node_metric_families(snapshot.nodes)
        yield from _envoy_families(snapshot.envoys)
        yield from _source_families(snapshot.topologies)
        yield from module_metric_families(snapshot.module_reports)
        yield _gauge(
            "tidevoy_panic_threshold_active",
            "1 while nodes stay in service although they fail their checks (panic threshold).",
            snapshot.is_panic_threshold_active,
        )
        yield _gauge(
            "tidevoy_node_metrics_outage",
            "1 while node metrics are unavailable from every node.",
            snapshot.has_node_metrics_outage,
        )
        yield _gauge(
            "tidevoy_plan_published",
            "1 once a plan has been published since the start.",
            snapshot.is_published,
        )


def _node_families(nodes: Sequence[NodeView]) -> Iterator[Metric]:
    by_state = GaugeMetricFamily("tidevoy_nodes", "Nodes by state.", labels=["state"])
    for state in State:
        by_state.add_metric([state.value], sum(view.plan.state is state for view in nodes))
    yield by_state
    in_service = GaugeMetricFamily(
        "tidevoy_node_in_service", "1 while the node gets new sessions.", labels=["node"]
    )
    weight = GaugeMetricFamily("tidevoy_node_weight", "Weight of the node in EDS.", labels=["node"])
    capacity = GaugeMetricFamily("tidevoy_node_capacity", "Configured weight of the node.", labels=["node"])
    sessions = GaugeMetricFamily(
        "tidevoy_node_sessions", "Sessions of all Envoys on the node.", labels=["node"]
    )
    connections = GaugeMetricFamily(
        "tidevoy_node_connections", "Client connections as the node itself counts them.", labels=["node"]
    )
    rebalance = GaugeMetricFamily(
        "tidevoy_node_rebalance_sessions",
        "Sessions that are requested to migrate from the node to others in this round.",
        labels=["node"],
    )
    for view in nodes:
        label = [view.plan.node.address]
        rebalance.add_metric(label, view.rebalancing_sessions)
        in_service.add_metric(label, view.plan.eds_health is EdsHealth.HEALTHY)
        weight.add_metric(label, view.plan.weight)
        capacity.add_metric(label, view.weight)
        if view.sessions is not None:
            sessions.add_metric(label, view.sessions)
        if view.connections is not None:
            connections.add_metric(label, view.connections)
    yield from (in_service, weight, capacity, sessions, connections, rebalance)


def _envoy_families(envoys: Sequence[EnvoyView]) -> Iterator[Metric]:
    connected = GaugeMetricFamily(
        "tidevoy_envoy_connected", "1 while the Envoy's xDS stream is open.", labels=["envoy"]
    )
    current = GaugeMetricFamily(
        "tidevoy_envoy_up_to_date",
        "1 while the Envoy has acknowledged the latest published version.",
        labels=["envoy"],
    )
    nacks = CounterMetricFamily("tidevoy_envoy_nacks", "Updates that the Envoy rejected.", labels=["envoy"])
    sessions = GaugeMetricFamily("tidevoy_envoy_sessions", "Sessions on the Envoy.", labels=["envoy"])
    certificate = GaugeMetricFamily(
        "tidevoy_envoy_certificate_expiry_timestamp_seconds",
        "Unix time at which the client certificate of the Envoy expires.",
        labels=["envoy"],
    )
    for view in envoys:
        status = view.status
        connected.add_metric([status.id], status.connected_since is not None)
        current.add_metric([status.id], status.acked_version == status.published_version != "")
        nacks.add_metric([status.id], status.nacks)
        if view.sessions is not None:
            sessions.add_metric([status.id], view.sessions)
        if status.certificate_expires_at is not None:
            certificate.add_metric([status.id], status.certificate_expires_at)
    yield from (connected, current, nacks, sessions, certificate)


def _source_families(topologies: Sequence[Topology]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "tidevoy_source_up", "1 while the node source is complete and available.", labels=["source"]
    )
    problems = GaugeMetricFamily(
        "tidevoy_source_problems",
        "Invalid entries of the source, which are ignored.",
        labels=["source"],
    )
    other_keyspace = GaugeMetricFamily(
        "tidevoy_source_other_keyspace_nodes",
        "Nodes of other keyspaces, which get no sessions.",
        labels=["source"],
    )
    by_source = {topology.source: topology for topology in topologies}
    for source in Source:
        topology = by_source.get(source)
        if topology is None:
            continue
        up.add_metric([source.value], topology.is_complete and not topology.outage)
        problems.add_metric([source.value], len(topology.problems))
        other_keyspace.add_metric([source.value], len(topology.other_keyspace))
    yield from (up, problems, other_keyspace)


def _gauge(name: str, documentation: str, value: bool) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)
