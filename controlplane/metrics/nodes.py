"""What nodes tell of their load and health, and what that takes of their share, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from controlplane.model.views import NodeView

_RATIO_DOCS = {
    "cpu": "CPU that the node uses, of what it may use.",
    "memory": "Memory that the node uses, of what it may use.",
    "pd_failures": "Requests of the node to PD that failed, by those that did not, in two minutes.",
    "tikv_failures": "Failures of the node's requests to TiKV, by requests, in two minutes.",
}


def node_metric_families(nodes: Sequence[NodeView]) -> Iterator[Metric]:
    """Ratios of each node, as last read, and its factors that are not simply 1."""
    for name, documentation in _RATIO_DOCS.items():
        metric_part = name.replace("failures", "failure")
        ratio = GaugeMetricFamily(f"tidevoy_node_{metric_part}_ratio", documentation, labels=["node"])
        for view in nodes:
            value = getattr(view.metrics, name) if view.metrics is not None else None
            if value is not None:
                ratio.add_metric([view.plan.node.address], value.value)
        yield ratio
    share = GaugeMetricFamily(
        "tidevoy_node_factor_share",
        "What health, memory or CPU leaves of the node's share of the sessions.",
        labels=["node", "factor"],
    )
    for view in nodes:
        for name, factor in view.plan.factors.items():
            share.add_metric([view.plan.node.address, name], factor.share)
    yield share
