"""The metrics service stream of a real Envoy: what it sends, and how a control plane processes it.

The Envoy in these tests has no module. Its stats access logger (`envoy.access_loggers.stats`) creates
counters with the names and tags of the module's counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from controlplane.observe.envoy_reports.counters import NodeCounters
from controlplane.observe.envoy_reports.series_cache import SeriesCache
from controlplane.observe.envoy_reports.telemetry_pb2 import (
    LabelPair,
    MetricFamily,
    StreamMetricsMessage,
    Value,
)
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.engine import run_engine, settings, wait_for_state
from tests.support.fake_servers import GREETING_PAYLOAD, FakeServer, mysql_packet, run_fake_server, send_parts
from tests.support.waiting import wait_until

_SINK = "type.googleapis.com/envoy.config.metrics.v3.MetricsServiceConfig"
_STATS_LOG = "type.googleapis.com/envoy.extensions.access_loggers.stats.v3.Config"
_TCP_PROXY = "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy"


def bootstrap(tmp_path: Path, xds_port: int, **sink: Any) -> dict[str, Any]:
    """Return the output of `tidevoy bootstrap` with the stats sink for the module, and with fast flushes."""
    text = render_bootstrap(
        settings(tmp_path), control_planes=[f"127.0.0.1:{xds_port}"], node_id="envoy-1", admin="127.0.0.1:0"
    )
    config: dict[str, Any] = yaml.safe_load(text)
    sink_config = {
        "@type": _SINK,
        "transport_api_version": "V3",
        "emit_tags_as_labels": True,
        "grpc_service": {"envoy_grpc": {"cluster_name": "tidevoy_control_plane"}},
        **sink,
    }
    config["stats_flush_interval"] = "0.2s"
    config["stats_sinks"] = [{"name": "envoy.stat_sinks.metrics_service", "typed_config": sink_config}]
    return config


def add_listener(config: dict[str, Any], port: int, node: str) -> None:
    """Add a listener that forwards to one node and counts connections as logins."""
    host, _, node_port = node.rpartition(":")
    tags = [{"name": "node", "value_format": "%UPSTREAM_HOST%"}]
    counters = [
        {"stat": {"name": "logins", "tags": tags}, "value_fixed": 1},
        {
            "stat": {"name": "module_info"},
            "value_fixed": 1,
        },  # so that this Envoy counts as one with the module
    ]
    log = {"@type": _STATS_LOG, "stat_prefix": "tidevoy", "counters": counters}
    proxy = {
        "@type": _TCP_PROXY,
        "stat_prefix": "sql",
        "cluster": "node",
        "access_log": [{"name": "envoy.access_loggers.stats", "typed_config": log}],
    }
    address = {"address": host, "port_value": int(node_port)}
    resources = config["static_resources"]
    resources["clusters"].append(
        {
            "name": "node",
            "type": "STATIC",
            "load_assignment": {
                "cluster_name": "node",
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"socket_address": address}}}]}],
            },
        }
    )
    resources["listeners"] = [
        {
            "name": "counted",
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
            "filter_chains": [
                {"filters": [{"name": "envoy.filters.network.tcp_proxy", "typed_config": proxy}]}
            ],
        }
    ]


async def connect_once(envoy: EnvoyProcess, port: int) -> None:
    """Connect through Envoy, wait for the greeting, and disconnect."""
    await wait_until(envoy.is_live)
    async with asyncio.timeout(15):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            await reader.readexactly(5)


@pytest.fixture
async def node() -> AsyncIterator[FakeServer]:
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as peer:
        yield peer


async def test_counters_of_a_real_envoy_reach_the_engine(
    tmp_path: Path, ports: Ports, node: FakeServer, envoy_process: StartEnvoy
) -> None:
    port = ports.allocate()
    async with run_engine(settings(tmp_path, nodes=[{"address": node.endpoint}])) as engine:
        await wait_for_state(engine, node.endpoint, "active")
        config = bootstrap(tmp_path, engine.xds_port)
        add_listener(config, port, node.endpoint)
        envoy = await envoy_process(yaml.safe_dump(config))

        def logins() -> int:
            traffic = engine.cluster.node(node.endpoint).traffic
            return traffic.logins if traffic is not None else 0

        for count in (1, 2, 3):
            await connect_once(envoy, port)
            await wait_until(lambda expected=count: logins() == expected)  # type: ignore[misc]
        (view,) = engine.cluster.envoys()
        assert view.status.id == "envoy-1"
        assert view.traffic is not None
        assert view.traffic.logins == 3
        labels = {"envoy": "envoy-1", "node": node.endpoint}
        assert engine.registry.get_sample_value("tidevoy_logins_total", labels) == 3
        assert engine.registry.get_sample_value("tidevoy_telemetry_dropped_total", {"envoy": "envoy-1"}) == 0

        await envoy.stop()
        assert logins() == 3  # kept, because the Envoy may return
        envoy = await envoy_process(yaml.safe_dump(config))
        await connect_once(envoy, port)
        await wait_until(lambda: logins() == 1)


class MetricsRecorder:
    """A metrics service that records all messages."""

    def __init__(self) -> None:
        self.port = 0
        self.streams: list[list[bytes]] = []

    async def start(self) -> None:
        self._server = grpc.aio.server()
        handler = grpc.stream_unary_rpc_method_handler(self._stream)
        service = "envoy.service.metrics.v3.MetricsService"
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"StreamMetrics": handler}),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def _stream(self, messages: AsyncIterator[bytes], _: object) -> bytes:
        recorded: list[bytes] = []
        self.streams.append(recorded)
        async for message in messages:
            recorded.append(message)
        return b""


@pytest.fixture
async def recorder() -> AsyncIterator[MetricsRecorder]:
    recorder = MetricsRecorder()
    await recorder.start()
    yield recorder
    await recorder.stop()


@pytest.mark.parametrize("batch_size", [0, 20])
async def test_stream_of_a_real_envoy_has_the_expected_layout(
    tmp_path: Path, recorder: MetricsRecorder, envoy_process: StartEnvoy, batch_size: int
) -> None:
    await envoy_process(yaml.safe_dump(bootstrap(tmp_path, recorder.port, batch_size=batch_size)))
    await wait_until(lambda: bool(recorder.streams) and len(recorder.streams[0]) > 20)
    (stream,) = recorder.streams
    messages = [StreamMetricsMessage.FromString(message) for message in stream]
    times = [
        {MetricFamily.FromString(family).metric[0].timestamp_ms / 1000 for family in message.envoy_metrics}
        for message in messages
    ]
    assert {len(timestamps) for timestamps in times} == {1}  # all series of a message have the same timestamp
    assert [*map(min, times)] == sorted(map(min, times))
    assert min(times[-1]) == pytest.approx(time.time(), abs=10)
    assert [message.identifier.node.id for message in messages[:20]] == ["envoy-1"] + [""] * 19
    if batch_size:
        assert {len(message.envoy_metrics) for message in messages[:2]} == {batch_size}
    families = [family for message in messages for family in message.envoy_metrics]
    all_series = [
        (family.name, Value.FromString(metric.counter or metric.gauge).value, metric, serialised)
        for serialised in families
        for family in (MetricFamily.FromString(serialised),)
        for metric in family.metric
    ]
    connections = [value for name, value, _, _ in all_series if name == "cluster.upstream_cx_total"]
    assert connections == sorted(connections)  # counted since the start, not per flush
    label_sets = {
        tuple((pair.name, pair.value) for pair in map(LabelPair.FromString, metric.label))
        for name, _, metric, _ in all_series
        if name.startswith("cluster.upstream_")
    }
    assert {value for labels in label_sets for name, value in labels if name == "envoy.cluster_name"} == {
        "tidevoy_control_plane"
    }
    assert all("envoy.cluster_name" in dict(labels) for labels in label_sets)
    # A flush begins with its counters, so no counter follows a gauge of the same flush.
    kinds = [
        (bool(metric.counter), name, tuple(metric.label))
        for name, _, metric, _ in all_series
        if metric.counter or metric.gauge
    ]
    assert kinds[0][0]
    flushes = 0
    for is_counter, block in itertools.groupby(kinds, lambda kind: kind[0]):
        series = [*block]
        flushes += is_counter
        assert len(set(series)) == len(series)  # two flushes in one block would contain duplicates
    assert flushes >= 2
    # Every series has the byte layout that the series cache expects.
    cache, node_counters = SeriesCache(), NodeCounters()
    node_counters.set_value("a", 0, 0.0)
    for _, value, _, serialised in all_series:
        cache.add(serialised, value, "a", 0)
    for serialised in cache.apply_known(families, node_counters):
        (metric,) = MetricFamily.FromString(serialised).metric
        assert (metric.counter, metric.gauge) == (b"", b"")  # a histogram
    telemetry_stream = TelemetryStream(lambda: frozenset())
    assert {telemetry_stream.receive(message, 1.0) for message in stream} == {None}
    assert telemetry_stream.envoy == "envoy-1"
