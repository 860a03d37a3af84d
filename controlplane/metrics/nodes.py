"""Prometheus metrics of the nodes' load and health, and of how these reduce the nodes' shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from controlplane.model.views import NodeView

_RATIO_DOCS = {
    "cpu": "CPU usage of the node, as a ratio of its quota.",
    "memory": "Memory usage of the node, as a ratio of its quota.",
    "pd_failures": "Failed requests of the node to PD per successful one, over two minutes.",
    "tikv_failures": "Failures of the node's requests to TiKV per request, over two minutes.",
}


def node_metric_families(nodes: Sequence[NodeView]) -> Iterator[Metric]:
    """Yield the latest ratios of each node, and its factors other than 1."""
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
        "Factor from 0 to 1 by which health, memory or CPU reduces the node's share of the sessions.",
        labels=["node", "factor"],
    )
    for view in nodes:
        for name, factor in view.plan.factors.items():
            share.add_metric([view.plan.node.address, name], factor.share)
    yield share
