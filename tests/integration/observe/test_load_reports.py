"""Load reports of a real Envoy: their content, their times, and the connections that they omit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.load_stats.v3 import lrs_pb2

from controlplane.model.facts import EnvoyLoad
from controlplane.observe.envoy_reports.load_reports import LoadReportService
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.fake_servers import FakeServer, full_backlog, run_fake_server, send_parts
from tests.support.waiting import wait_until


async def authorize_any(context: grpc.aio.ServicerContext, envoy: str) -> None:
    """Authorize every Envoy."""


class LoadReportServer:
    """A gRPC server with only the load report service; records the reports that the service publishes."""

    def __init__(self) -> None:
        self.interval = 0.2
        self.all: list[EnvoyLoad] = []
        self._received = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    def publish(self, load: EnvoyLoad) -> None:
        self.all.append(load)
        self._received.set()

    async def start(self) -> None:
        self._server = grpc.aio.server()
        LoadReportService(self.publish, time.monotonic, interval=lambda: self.interval).register(
            self._server, authorize_any
        )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def next(self, count: int = 1, seconds: float = 15.0) -> list[EnvoyLoad]:
        """Wait for `count` more reports and return them."""
        known_count = len(self.all)
        async with asyncio.timeout(seconds):
            while len(self.all) < known_count + count:
                self._received.clear()
                await self._received.wait()
        return self.all[known_count:]

    async def next_full_interval(self) -> EnvoyLoad:
        """Wait for a report whose interval begins after this call, and return it."""
        return (await self.next(2))[-1]


@pytest.fixture
async def reports() -> AsyncIterator[LoadReportServer]:
    reports = LoadReportServer()
    await reports.start()
    yield reports
    await reports.stop()


class EnvoySite:
    """An Envoy with a listener and the cluster `tidb` for three fake servers, configured by files."""

    def __init__(self, directory: Path, peers: list[FakeServer], lrs_port: int, sql_port: int) -> None:
        self.directory = directory
        self.endpoints = [peer.endpoint for peer in peers]
        self.lrs_port = lrs_port
        self.sql_port = sql_port
        self.sessions: list[asyncio.StreamWriter] = []
        self._version = 0

    def publish_endpoints(
        self, states: dict[str, str], weight: int = 100, *, separate_priorities: bool = False
    ) -> None:
        """Write the endpoints with priority 0, or with the priorities 0, 1, 2 if `separate_priorities`."""
        members = [
            {
                "health_status": state,
                "load_balancing_weight": weight,
                "metadata": {"filter_metadata": {"tidevoy": {"state": state, "weight": weight}}},
                "endpoint": {"address": socket_address(endpoint)},
            }
            for endpoint, state in states.items()
        ]
        groups = [[member] for member in members] if separate_priorities else [members]
        localities = [{"priority": number, "lb_endpoints": group} for number, group in enumerate(groups)]
        assignment = {"cluster_name": "tidb", "endpoints": localities}
        self._write("eds.json", "envoy.config.endpoint.v3.ClusterLoadAssignment", assignment)

    def publish_cluster(self, connect_timeout: str) -> None:
        cluster = {
            "name": "tidb",
            "type": "EDS",
            "lb_policy": "ROUND_ROBIN",
            "connect_timeout": connect_timeout,
            "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
            "eds_cluster_config": {
                "eds_config": {"path_config_source": {"path": str(self.directory / "eds.json")}}
            },
        }
        self._write("cds.json", "envoy.config.cluster.v3.Cluster", cluster)

    def _write(self, name: str, kind: str, resource: dict[str, Any]) -> None:
        self._version += 1
        content = {
            "version_info": str(self._version),
            "resources": [{"@type": f"type.googleapis.com/{kind}", **resource}],
        }
        new = self.directory / f"{name}.new"
        new.write_text(json.dumps(content))
        new.rename(self.directory / name)

    def bootstrap(self) -> str:
        http2 = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        return json.dumps(
            {
                "node": {"id": "envoy-1", "cluster": "tidevoy"},
                "admin": {"address": socket_address("127.0.0.1:0", any_port=True)},
                "cluster_manager": {
                    "load_stats_config": {
                        "api_type": "GRPC",
                        "transport_api_version": "V3",
                        "grpc_services": [{"envoy_grpc": {"cluster_name": "control_plane"}}],
                    }
                },
                "dynamic_resources": {
                    "cds_config": {"path_config_source": {"path": str(self.directory / "cds.json")}}
                },
                "static_resources": {
                    "listeners": [
                        {
                            "name": "sql",
                            "address": socket_address(f"127.0.0.1:{self.sql_port}"),
                            "filter_chains": [
                                {
                                    "filters": [
                                        {
                                            "name": "tcp",
                                            "typed_config": {
                                                "@type": "type.googleapis.com/envoy.extensions.filters."
                                                "network.tcp_proxy.v3.TcpProxy",
                                                "stat_prefix": "sql",
                                                "cluster": "tidb",
                                            },
                                        }
                                    ]
                                }
                            ],
                        }
                    ],
                    "clusters": [
                        {
                            "name": "control_plane",
                            "type": "STATIC",
                            "typed_extension_protocol_options": {
                                http2: {
                                    "@type": f"type.googleapis.com/{http2}",
                                    "explicit_http_config": {"http2_protocol_options": {}},
                                }
                            },
                            "load_assignment": {
                                "cluster_name": "control_plane",
                                "endpoints": [
                                    {
                                        "lb_endpoints": [
                                            {
                                                "endpoint": {
                                                    "address": socket_address(f"127.0.0.1:{self.lrs_port}")
                                                }
                                            }
                                        ]
                                    }
                                ],
                            },
                        }
                    ],
                },
            }
        )

    async def open(self, count: int) -> None:
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.sql_port)
            self.sessions.append(writer)
            await reader.readexactly(5)  # the peer's greeting: the session is established

    def close(self) -> None:
        for writer in self.sessions:
            writer.transport.abort()
        self.sessions.clear()


def socket_address(endpoint: str, *, any_port: bool = False) -> dict[str, Any]:
    ip, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": ip, "port_value": 0 if any_port else int(port)}}


@pytest.fixture
async def site(
    reports: LoadReportServer, tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> AsyncIterator[EnvoySite]:
    async with contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(run_fake_server(send_parts(b"hello"))) for _ in range(3)]
        site = EnvoySite(tmp_path, peers, reports.port, ports.allocate())
        site.publish_endpoints(dict.fromkeys(site.endpoints, "HEALTHY"))
        site.publish_cluster("1s")
        envoy = await envoy_process(site.bootstrap())
        async with asyncio.timeout(10):
            while not await envoy.is_live():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        yield site
        site.close()


async def test_connections_are_reported_every_interval_even_if_none(
    reports: LoadReportServer, site: EnvoySite
) -> None:
    idle = await reports.next(3)
    assert [(dict(load.sessions), dict(load.new_sessions)) for load in idle] == [({}, {})] * 3
    assert {load.envoy for load in idle} == {"envoy-1"}
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(idle)]
    assert all(0.1 < gap < 1.0 for gap in gaps), gaps

    first_index = len(reports.all)
    await site.open(6)
    load = await reports.next_full_interval()
    assert load.sessions == dict.fromkeys(site.endpoints, 2)
    assert load.new_sessions == {}
    assert sum(sum(load.new_sessions.values()) for load in reports.all[first_index:]) == 6

    site.close()
    assert (await reports.next_full_interval()).sessions == {}


async def test_draining_unhealthy_and_reweighted_endpoints_are_reported(
    reports: LoadReportServer, site: EnvoySite
) -> None:
    await site.open(6)
    first, second, third = site.endpoints
    site.publish_endpoints({first: "DRAINING", second: "UNHEALTHY", third: "HEALTHY"}, weight=7)
    await reports.next_full_interval()
    assert (await reports.next_full_interval()).sessions == {first: 2, second: 2, third: 2}


async def test_endpoints_with_a_new_priority_are_reported(reports: LoadReportServer, site: EnvoySite) -> None:
    await site.open(6)
    first, second, third = site.endpoints
    for separate_priorities in (True, False):
        site.publish_endpoints(
            {third: "HEALTHY", first: "HEALTHY", second: "DRAINING"}, separate_priorities=separate_priorities
        )
        await reports.next_full_interval()
        assert (await reports.next_full_interval()).sessions == {first: 2, second: 2, third: 2}


async def test_removed_endpoint_with_connections_is_not_reported(
    reports: LoadReportServer, site: EnvoySite
) -> None:
    await site.open(6)
    _, second, third = site.endpoints
    site.publish_endpoints({second: "HEALTHY", third: "HEALTHY"})
    await reports.next_full_interval()
    assert (await reports.next_full_interval()).sessions == {second: 2, third: 2}
    site.publish_endpoints(dict.fromkeys(site.endpoints, "HEALTHY"))
    await reports.next_full_interval()
    assert (await reports.next_full_interval()).sessions == {second: 2, third: 2}
    assert all(not writer.is_closing() for writer in site.sessions)


async def test_cluster_update_resets_all_counts(reports: LoadReportServer, site: EnvoySite) -> None:
    await site.open(6)
    assert sum((await reports.next_full_interval()).sessions.values()) == 6
    site.publish_cluster("2s")
    await reports.next_full_interval()
    assert (await reports.next_full_interval()).sessions == {}
    await site.open(3)
    assert (await reports.next_full_interval()).sessions == dict.fromkeys(site.endpoints, 1)
    assert all(not writer.is_closing() for writer in site.sessions)


async def test_connecting_connection_is_not_counted(reports: LoadReportServer, site: EnvoySite) -> None:
    with full_backlog() as unreachable:
        site.publish_endpoints({unreachable: "HEALTHY"})
        await reports.next_full_interval()
        _, writer = await asyncio.open_connection("127.0.0.1", site.sql_port)
        site.sessions.append(writer)
        assert (await reports.next_full_interval()).sessions == {}


@pytest.mark.usefixtures("site")  # its Envoy sends the reports
async def test_new_interval_applies_to_a_running_stream(reports: LoadReportServer) -> None:
    await reports.next()
    reports.interval = 1.0
    # The response to one of these reports contains the new interval, which applies to later reports.
    *_, earlier, later = await reports.next(4)
    assert later.at - earlier.at > 0.7


@pytest.mark.usefixtures("site")
async def test_delayed_reports_keep_their_age(reports: LoadReportServer) -> None:
    """Otherwise an old count of zero could look newer than the time when another replica closed the node."""
    before = (await reports.next(3))[-1]
    time.sleep(2.0)  # noqa: ASYNC251 - the stall
    resumed_at = time.monotonic()
    delayed = await reports.next(5)
    assert time.monotonic() - resumed_at < 1.0  # the reports had already arrived
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise([before, *delayed])]
    assert all(0.1 < gap < 0.5 for gap in gaps), gaps
    await wait_until(lambda: time.monotonic() - reports.all[-1].at < 0.15)  # later reports are recent


async def test_first_report_after_a_reconnect_is_ignored(reports: LoadReportServer, site: EnvoySite) -> None:
    await site.open(6)
    assert sum((await reports.next_full_interval()).sessions.values()) == 6
    await reports.stop()
    site.close()
    await reports.start()
    load = (await reports.next())[0]
    assert load.sessions == {}  # the first report, which is ignored, still counts 6 sessions


async def test_only_tidb_clusters_count_and_their_localities_add_up() -> None:
    reports = LoadReportServer()
    await reports.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{reports.port}") as channel:
            stream = stream_of(channel)
            await stream.write(
                lrs_pb2.LoadStatsRequest(node=base_pb2.Node(id="e9"), cluster_stats=[stats("tidb", 9, 9)])
            )
            response = await stream.read()
            assert response.send_all_clusters
            assert response.report_endpoint_granularity
            assert response.load_reporting_interval.ToMilliseconds() == 200
            two_localities = stats("tidb", 2, 1)
            two_localities.upstream_locality_stats.append(stats("tidb", 3, 0).upstream_locality_stats[0])
            others = (stats("tidb-olap", 4, 3), stats("control_plane", 5, 5), stats("tidbits", 6, 6))
            await stream.write(lrs_pb2.LoadStatsRequest(cluster_stats=[two_localities, *others]))
            (load,) = await reports.next() if not reports.all else reports.all
    finally:
        await reports.stop()
    assert (load.envoy, dict(load.sessions), dict(load.new_sessions)) == (
        "e9",
        {"[fd00::1]:4000": 9},
        {"[fd00::1]:4000": 4},
    )


async def test_envoy_without_an_id_is_rejected_with_a_reason() -> None:
    reports = LoadReportServer()
    await reports.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{reports.port}") as channel:
            stream = stream_of(channel)
            await stream.write(lrs_pb2.LoadStatsRequest())
            with pytest.raises(grpc.aio.AioRpcError, match=r"the first message has no node\.id") as error:
                await stream.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        await reports.stop()
    assert reports.all == []


def stream_of(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(
        "/envoy.service.load_stats.v3.LoadReportingService/StreamLoadStats",
        request_serializer=lrs_pb2.LoadStatsRequest.SerializeToString,
        response_deserializer=lrs_pb2.LoadStatsResponse.FromString,
    )()


def stats(cluster: str, live: int, opened: int) -> Any:
    """Return stats of one cluster that has one locality with the endpoint [fd00::1]:4000."""
    message = lrs_pb2.LoadStatsRequest().cluster_stats.add(cluster_name=cluster)
    endpoint = message.upstream_locality_stats.add().upstream_endpoint_stats.add(
        total_requests_in_progress=live, total_issued_requests=opened
    )
    endpoint.address.socket_address.address = "fd00::1"
    endpoint.address.socket_address.port_value = 4000
    return message
