"""A real Envoy's metrics service stream: what it sends, and that a control plane takes it in.

Stock Envoy has no module here. Its access log for statistics (`envoy.access_loggers.stats`) can count under
any name with any tags, so it counts as the module does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from controlplane.observe.envoy_reports.counters import NodeCounters
from controlplane.observe.envoy_reports.series_cache import SeriesCache
from controlplane.observe.envoy_reports.telemetry_pb2 import MetricFamily, StreamMetricsMessage
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream, parse_message
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from tests.support.controlplane.engine import run_engine, settings, wait_for_state
from tests.support.fake_servers import GREETING_PAYLOAD, FakeServer, mysql_packet, run_fake_server, send_parts
from tests.support.waiting import wait_until

StartEnvoy = Callable[[str], Awaitable[EnvoyProcess]]
_SINK = "type.googleapis.com/envoy.config.metrics.v3.MetricsServiceConfig"
_STATS_LOG = "type.googleapis.com/envoy.extensions.access_loggers.stats.v3.Config"
_TCP_PROXY = "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy"


def bootstrap(tmp_path: Path, xds_port: int, **sink: Any) -> dict[str, Any]:
    """What `tidevoy bootstrap` prints, with the sink of an Envoy that has the module, and quick flushes."""
    text = render_bootstrap(
        settings(tmp_path), control_planes=[f"127.0.0.1:{xds_port}"], node_id="envoy-1", admin="127.0.0.1:0"
    )
    made: dict[str, Any] = yaml.safe_load(text)
    config = {
        "@type": _SINK,
        "transport_api_version": "V3",
        "emit_tags_as_labels": True,
        "grpc_service": {"envoy_grpc": {"cluster_name": "tidevoy_control_plane"}},
        **sink,
    }
    made["stats_flush_interval"] = "0.2s"
    made["stats_sinks"] = [{"name": "envoy.stat_sinks.metrics_service", "typed_config": config}]
    return made


def add_listener(made: dict[str, Any], port: int, node: str) -> None:
    """A listener before one node that counts its connections as logins."""
    host, _, node_port = node.rpartition(":")
    tags = [{"name": "node", "value_format": "%UPSTREAM_HOST%"}]
    counters = [
        {"stat": {"name": "logins", "tags": tags}, "value_fixed": 1},
        {"stat": {"name": "module_info"}, "value_fixed": 1},  # with which a module is known
    ]
    log = {"@type": _STATS_LOG, "stat_prefix": "tidevoy", "counters": counters}
    proxy = {
        "@type": _TCP_PROXY,
        "stat_prefix": "sql",
        "cluster": "node",
        "access_log": [{"name": "envoy.access_loggers.stats", "typed_config": log}],
    }
    address = {"address": host, "port_value": int(node_port)}
    resources = made["static_resources"]
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


async def visit(envoy: EnvoyProcess, port: int) -> None:
    """A connection through Envoy that is greeted and ends."""
    await wait_until(envoy.is_live)
    async with asyncio.timeout(15):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            await reader.readexactly(5)


@pytest.fixture
async def node() -> AsyncIterator[FakeServer]:
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as peer:
        yield peer


async def test_a_control_plane_takes_in_what_a_real_envoy_counts(
    tmp_path: Path, ports: Ports, node: FakeServer, envoy_process: StartEnvoy
) -> None:
    port = ports.allocate()
    async with run_engine(settings(tmp_path, nodes=[{"address": node.endpoint}])) as engine:
        await wait_for_state(engine, node.endpoint, "active")
        made = bootstrap(tmp_path, engine.xds_port)
        add_listener(made, port, node.endpoint)
        envoy = await envoy_process(yaml.safe_dump(made))

        def logins() -> int:
            traffic = engine.node(node.endpoint).traffic
            return traffic.logins if traffic is not None else 0

        for count in (1, 2, 3):
            await visit(envoy, port)
            await wait_until(lambda expected=count: logins() == expected)  # type: ignore[misc]
        (view,) = engine.envoys()
        assert view.status.id == "envoy-1"
        assert view.traffic is not None
        assert view.traffic.logins == 3
        labels = {"envoy": "envoy-1", "node": node.endpoint}
        assert engine.registry.get_sample_value("tidevoy_logins_total", labels) == 3
        assert engine.registry.get_sample_value("tidevoy_telemetry_dropped_total", {"envoy": "envoy-1"}) == 0

        await envoy.stop()
        assert logins() == 3  # as long as it may come back
        envoy = await envoy_process(yaml.safe_dump(made))
        await visit(envoy, port)
        await wait_until(lambda: logins() == 1)


class Recorder:
    """A metrics service that keeps what it gets."""

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
        kept: list[bytes] = []
        self.streams.append(kept)
        async for message in messages:
            kept.append(message)
        return b""


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    one = Recorder()
    await one.start()
    yield one
    await one.stop()


@pytest.mark.parametrize("batch", [0, 20])
async def test_what_a_real_envoy_sends(
    tmp_path: Path, recorder: Recorder, envoy_process: StartEnvoy, batch: int
) -> None:
    await envoy_process(yaml.safe_dump(bootstrap(tmp_path, recorder.port, batch_size=batch)))
    await wait_until(lambda: bool(recorder.streams) and len(recorder.streams[0]) > 20)
    (stream,) = recorder.streams
    readings = [parse_message(message, "") for message in stream]
    times = [
        {
            MetricFamily.FromString(family).metric[0].timestamp_ms / 1000
            for family in StreamMetricsMessage.FromString(message).envoy_metrics
        }
        for message in stream
    ]
    assert {len(each) for each in times} == {1}  # all that is of one flush tells the same
    assert [*map(min, times)] == sorted(map(min, times))
    assert min(times[-1]) == pytest.approx(time.time(), abs=10)
    assert [reading.envoy for reading in readings[:20]] == ["envoy-1"] + [""] * 19
    assert {reading.unreadable_count for reading in readings} == {0}
    if batch:
        assert {len(reading.series) for reading in readings[:2]} == {batch}
    for first, second in itertools.pairwise(
        one.value for each in readings for one in each.series if one.name == "cluster.upstream_cx_total"
    ):
        assert second >= first  # counted from the start on, not from flush to flush
    clusters = [one for each in readings for one in each.series if one.name.startswith("cluster.upstream_")]
    assert clusters
    assert {one.labels["envoy.cluster_name"] for one in clusters} == {"tidevoy_control_plane"}
    # A flush begins with its counters, so none comes behind a gauge of the same flush.
    kinds = [
        (bool(metric.counter), family.name, tuple(metric.label))
        for message in stream
        for serialised in StreamMetricsMessage.FromString(message).envoy_metrics
        for family in (MetricFamily.FromString(serialised),)
        for metric in family.metric
        if metric.counter or metric.gauge
    ]
    assert kinds[0][0]
    flushes = 0
    for is_counter, block in itertools.groupby(kinds, lambda kind: kind[0]):
        series = [*block]
        flushes += is_counter
        assert len(set(series)) == len(series)  # two flushes in one block would tell some twice
    assert flushes >= 2
    # Each has the form by which it is known again.
    recall, tally = SeriesCache(), NodeCounters()
    tally.set_value("a", 0, 0.0)
    for one in (one for each in readings for one in each.series):
        recall.add(one.serialised_family, one.value, "a", 0)
    families = [each for message in stream for each in StreamMetricsMessage.FromString(message).envoy_metrics]
    for serialised in recall.apply_known(families, tally):
        (metric,) = MetricFamily.FromString(serialised).metric
        assert (metric.counter, metric.gauge) == (b"", b"")  # a histogram
    plane = TelemetryStream(lambda: frozenset())
    assert {plane.receive(message, 1.0) for message in stream} == {None}
    assert plane.envoy == "envoy-1"
