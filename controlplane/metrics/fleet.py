"""Prometheus metrics of nodes, of Envoys and of the sources of nodes. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from controlplane.model.nodes import Source, State, Topology
from controlplane.model.plan import EdsHealth
from controlplane.model.views import EnvoyView, LimitView, NodeView, RuleView

T = TypeVar("T")
_GaugeTable: TypeAlias = Mapping[str, tuple[str, Callable[[T], float | None]]]
"""Last part of a metric's name -> (documentation, function that returns the value; None: no series)."""

_NODE_GAUGES: _GaugeTable[NodeView] = {
    "in_service": (
        "1 while the node gets new sessions.",
        lambda view: view.plan.eds_health is EdsHealth.HEALTHY,
    ),
    "weight": ("Weight of the node in EDS.", lambda view: view.plan.weight),
    "capacity": ("Configured weight of the node.", lambda view: view.weight),
    "sessions": ("Sessions of all Envoys on the node.", lambda view: view.sessions),
    "connections": ("Client connections as the node itself counts them.", lambda view: view.connections),
    "rebalance_sessions": (
        "Sessions that are requested to migrate from the node to others in this round.",
        lambda view: view.rebalancing_sessions,
    ),
    "cpu_ratio": ("CPU usage of the node, as a ratio of its quota.", lambda view: _ratio(view, "cpu")),
    "memory_ratio": (
        "Memory usage of the node, as a ratio of its quota.",
        lambda view: _ratio(view, "memory"),
    ),
    "pd_failure_ratio": (
        "Failed requests of the node to PD per successful one, over two minutes.",
        lambda view: _ratio(view, "pd_failures"),
    ),
    "tikv_failure_ratio": (
        "Failures of the node's requests to TiKV per request, over two minutes.",
        lambda view: _ratio(view, "tikv_failures"),
    ),
}
_ENVOY_GAUGES: _GaugeTable[EnvoyView] = {
    "connected": (
        "1 while the Envoy's xDS stream is open.",
        lambda view: view.status.connected_since is not None,
    ),
    "up_to_date": (
        "1 while the Envoy has acknowledged the latest published version.",
        lambda view: view.status.acked_version == view.status.published_version != "",
    ),
    "sessions": ("Sessions on the Envoy.", lambda view: view.sessions),
    "certificate_expiry_timestamp_seconds": (
        "Unix time at which the client certificate of the Envoy expires.",
        lambda view: view.status.certificate_expires_at,
    ),
}
_SOURCE_GAUGES: _GaugeTable[Topology] = {
    "up": (
        "1 while the node source is complete and available.",
        lambda topology: topology.is_complete and not topology.outage,
    ),
    "problems": (
        "Invalid entries of the source, which are ignored.",
        lambda topology: len(topology.problems),
    ),
    "other_keyspace_nodes": (
        "Nodes of other keyspaces, which get no sessions.",
        lambda topology: len(topology.other_keyspace),
    ),
}


def node_metric_families(nodes: Sequence[NodeView]) -> Iterator[Metric]:
    by_state = GaugeMetricFamily("tidevoy_nodes", "Nodes by state.", labels=["state"])
    for state in State:
        by_state.add_metric([state.value], sum(view.plan.state is state for view in nodes))
    yield by_state
    views = [(view.plan.node.address, view) for view in nodes]
    yield from _gauges("node", _NODE_GAUGES, views)
    share = GaugeMetricFamily(
        "tidevoy_node_factor_share",
        "Factor from 0 to 1 by which health, memory or CPU reduces the node's share of the sessions.",
        labels=["node", "factor"],
    )
    for address, view in views:
        for name, factor in view.plan.factors.items():
            share.add_metric([address, name], factor.share)
    yield share


def envoy_metric_families(envoys: Sequence[EnvoyView]) -> Iterator[Metric]:
    yield from _gauges("envoy", _ENVOY_GAUGES, [(view.status.id, view) for view in envoys])
    nacks = CounterMetricFamily("tidevoy_envoy_nacks", "Updates that the Envoy rejected.", labels=["envoy"])
    for view in envoys:
        nacks.add_metric([view.status.id], view.status.nacks)
    yield nacks


def limit_metric_families(limits: Sequence[LimitView]) -> Iterator[Metric]:
    labels = ["envoy", "rule"]
    maximum = GaugeMetricFamily(
        "tidevoy_limit_max_connections", "Client connections that the rule allows.", labels=["rule"]
    )
    connections = GaugeMetricFamily(
        "tidevoy_limit_connections", "Client connections to the Envoy that the rule counts.", labels=labels
    )
    quota = GaugeMetricFamily(
        "tidevoy_limit_quota",
        "Client connections that the rule allows to the Envoy at present.",
        labels=labels,
    )
    refusals = CounterMetricFamily(
        "tidevoy_limit_refusals",
        "Client connections that the Envoy refused because of the rule.",
        labels=labels,
    )
    for limit in limits:
        name = limit.rule.name
        if limit.rule.max_connections:
            maximum.add_metric([name], limit.rule.max_connections)
        for envoy in limit.envoys:
            connections.add_metric([envoy.envoy, name], envoy.connections)
            refusals.add_metric([envoy.envoy, name], envoy.refused)
            if envoy.quota is not None:
                quota.add_metric([envoy.envoy, name], envoy.quota)
    yield from (maximum, connections, quota, refusals)


def rule_metric_families(rules: Sequence[RuleView]) -> Iterator[Metric]:
    hits = CounterMetricFamily(
        "tidevoy_rule_hits",
        "Statements at the Envoy to which the rule applied; dry_run: without effect.",
        labels=["envoy", "rule", "dry_run"],
    )
    for view in rules:
        for envoy, count in view.envoys.items():
            hits.add_metric([envoy, view.rule.name, "false"], count.hits)
            hits.add_metric([envoy, view.rule.name, "true"], count.dry_run_hits)
    yield hits


def source_metric_families(topologies: Sequence[Topology]) -> Iterator[Metric]:
    by_source = {topology.source: topology for topology in topologies}
    entries = [(source.value, by_source[source]) for source in Source if source in by_source]
    yield from _gauges("source", _SOURCE_GAUGES, entries)


def _gauges(label: str, table: _GaugeTable[T], entries: Iterable[tuple[str, T]]) -> Iterator[Metric]:
    """Yield the gauges of a table. `label` is their only label and a part of their names."""
    for name, (documentation, value_of) in table.items():
        gauge = GaugeMetricFamily(f"tidevoy_{label}_{name}", documentation, labels=[label])
        for label_value, item in entries:
            value = value_of(item)
            if value is not None:
                gauge.add_metric([label_value], value)
        yield gauge


def _ratio(view: NodeView, name: str) -> float | None:
    metric = getattr(view.metrics, name, None)
    return metric.value if metric is not None else None
