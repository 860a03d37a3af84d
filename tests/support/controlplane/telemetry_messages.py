"""Hand-made messages of Envoy's metrics service, and a stream that sends them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from controlplane.observe.envoy_reports.telemetry_pb2 import (
    LabelPair,
    MetricFamily,
    StreamMetricsMessage,
    Value,
)


def metric_family(
    name: str, value: float, *, gauge: bool = False, cluster: str | None = None, **labels: str
) -> bytes:
    """Build one series as Envoy sends it. Append `_` to a label that is a Python keyword.

    `cluster` is the tag that Envoy adds to its own stats of a cluster.
    """
    if cluster is not None:
        labels["envoy.cluster_name"] = cluster
    family = MetricFamily(name=name)
    metric = family.metric.add()
    for label, text in labels.items():
        metric.label.append(LabelPair(name=label.rstrip("_"), value=text).SerializeToString())
    setattr(metric, "gauge" if gauge else "counter", Value(value=value).SerializeToString())
    return bytes(family.SerializeToString())


def metrics_message(*families: bytes, envoy: str = "") -> bytes:
    """Build a message with these series. With `envoy`, it is the first message of that Envoy's stream."""
    message = StreamMetricsMessage(envoy_metrics=families)
    if envoy:
        message.identifier.node.id = envoy
    return bytes(message.SerializeToString())


def all_families(node: str) -> list[bytes]:
    """Build series of every family, as reported by a module that has served sessions on `node`."""
    return [
        metric_family("tidevoy.module_info", 1, gauge=True, version="0.1.0"),
        metric_family("tidevoy.sessions", 3, gauge=True, node=node, state="idle"),
        metric_family("tidevoy.sessions", 2, gauge=True, node=node, state="transaction"),
        metric_family("tidevoy.sessions_pinned", 2, gauge=True, node=node, reason="transaction"),
        metric_family("tidevoy.logins", 9, node=node),
        metric_family("tidevoy.login_failures", 4, node=node, reason="denied"),
        metric_family("tidevoy.login_failures", 1, node="", reason="bad_packet"),
        metric_family("tidevoy.connect_failures", 5, node=node, reason="tls"),
        metric_family("tidevoy.commands", 100, node=node, kind="query"),
        metric_family("tidevoy.command_seconds_bucket", 50, node=node, le="0.001"),
        metric_family("tidevoy.command_seconds_bucket", 100, node=node, le="+Inf"),
        metric_family("tidevoy.command_microseconds", 2_500_000, node=node),
        metric_family("tidevoy.errors", 6, node=node, class_="deadlock"),
        metric_family("tidevoy.bytes", 700, node=node, direction="to_node"),
        metric_family("tidevoy.migrations", 8, node=node, result="moved", reason="ok"),
        metric_family("tidevoy.migrations", 3, node=node, result="stayed", reason="slow"),
        metric_family("tidevoy.migration_seconds_bucket", 6, node=node, le="0.01"),
        metric_family("tidevoy.migration_seconds_bucket", 8, node=node, le="+Inf"),
        metric_family("tidevoy.migration_microseconds", 40_000, node=node),
    ]


def sessions_family(count: int, node: str, state: str = "idle") -> bytes:
    """Build the count of a node's sessions in one state."""
    return metric_family("tidevoy.sessions", count, gauge=True, node=node, state=state)


def with_timestamp(serialised: bytes, at: float) -> bytes:
    """Return the series with a changed flush time: `at` is Unix time by the Envoy's clock."""
    family = MetricFamily.FromString(serialised)
    family.metric[0].timestamp_ms = round(at * 1000)
    return bytes(family.SerializeToString())


def module_info_family(instance: str | None = None) -> bytes:
    """Build the series `module_info`, which a module sends once per flush. Old modules send no `instance`."""
    labels = {} if instance is None else {"instance": instance}
    return metric_family("tidevoy.module_info", 1, gauge=True, version="0.1.0", **labels)


class MetricsStream:
    """An open metrics stream."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, *families: bytes, envoy: str = "") -> None:
        await self.call.write(metrics_message(*families, envoy=envoy))


@contextlib.asynccontextmanager
async def open_metrics_stream(port: int) -> AsyncIterator[MetricsStream]:
    """Open a stream to the control plane on this port, as an Envoy's stats sink does."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield MetricsStream(channel.stream_unary("/envoy.service.metrics.v3.MetricsService/StreamMetrics")())
