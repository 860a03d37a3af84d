"""The xDS server, tested by xDS clients: bad requests, slow readers, two Envoys with one id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2

from controlplane.config.settings import Settings
from controlplane.model.plan import Plan
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS
from controlplane.xds.server import XdsServer
from controlplane.xds.snapshot_cache import SnapshotCache
from tests.support.controlplane.running_xds import RecordedEvents, make_xds_server, run_xds_server
from tests.support.controlplane.xds_server import make_node_plan, make_plan
from tests.support.waiting import wait_until

Events = list[tuple[str, str, str]]

METHOD = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"


@pytest.fixture
def event_log() -> RecordedEvents:
    return RecordedEvents()


@pytest.fixture
def events(event_log: RecordedEvents) -> Events:
    return event_log.recorded


@pytest.fixture
async def server(event_log: RecordedEvents) -> AsyncIterator[XdsServer]:
    settings = Settings.model_validate({"xds": {"listen": "127.0.0.1:0"}})
    async with run_xds_server(make_xds_server(settings, event_log)) as server:
        yield server


@contextlib.asynccontextmanager
async def stub(server: XdsServer) -> AsyncIterator[ads_pb2_grpc.AggregatedDiscoveryServiceStub]:
    options = (("grpc.use_local_subchannel_pool", 1),)  # else two stubs share one connection
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        yield ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel)


def first_request(node_id: str, kind: str = ENDPOINTS.url) -> discovery_pb2.DiscoveryRequest:
    request = discovery_pb2.DiscoveryRequest(type_url=kind, resource_names=["tidb"])
    request.node.id = node_id
    return request


def large_plan(weight: int) -> Plan:
    return make_plan(
        *(
            make_node_plan(f"tidb-{index}:4000", f"10.1.{index // 250}.{index % 250}:4000", weight=weight)
            for index in range(7000)
        )
    )


async def test_slow_reader_skips_intermediate_versions(server: XdsServer) -> None:
    async with stub(server) as client:
        call = client.StreamAggregatedResources()
        await call.write(first_request("slow"))
        rounds = 60
        for weight in range(1, rounds + 1):  # about 200 kB each: far more than the transport buffers
            server.publish(large_plan(weight))
            await asyncio.sleep(0.025)
        weights: list[int] = []
        while not weights or weights[-1] != rounds:
            response = await asyncio.wait_for(call.read(), 10)
            (resource,) = response.resources
            (group,) = endpoint_pb2.ClusterLoadAssignment.FromString(resource.value).endpoints
            weights.append(group.lb_endpoints[0].load_balancing_weight.value)
        assert weights == sorted(set(weights))
        assert len(weights) < rounds / 2, weights
        call.cancel()


@pytest.mark.parametrize("is_malformed", [False, True])
async def test_stream_with_an_unread_response_ends(server: XdsServer, is_malformed: bool) -> None:
    """gRPC cannot end a call while a write is pending, so the server waits for the end of the write."""
    server.publish(large_plan(1))
    # The client's flow-control window is smaller than the response: the write is pending until a read.
    options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(first_request("slow").SerializeToString())
        await wait_until(lambda: bool(server.statuses()))
        if is_malformed:
            await call.write(b"\xff\xff\xff")
        else:
            await call.done_writing()
        async with asyncio.timeout(10):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            code = await call.code()
        assert code is (grpc.StatusCode.INVALID_ARGUMENT if is_malformed else grpc.StatusCode.OK)
    assert server.statuses()[0].connected_since is None


async def test_rejects_request_without_node_id(server: XdsServer) -> None:
    server.publish(make_plan())
    async with stub(server) as client:
        call = client.StreamAggregatedResources()
        await call.write(discovery_pb2.DiscoveryRequest(type_url=CLUSTER.url))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "node.id" in str(error.value.details())
    assert server.statuses() == []


@pytest.mark.parametrize("valid_requests", [0, 1])
async def test_malformed_request_ends_only_its_stream(
    server: XdsServer, events: Events, valid_requests: int
) -> None:
    server.publish(make_plan())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(METHOD)()
        for _ in range(valid_requests):
            await call.write(first_request("envoy-1").SerializeToString())
            await call.read()
        await call.write(b"\xff\xff\xff")
        assert await asyncio.wait_for(call.code(), 5) == grpc.StatusCode.INVALID_ARGUMENT
    assert [kind for kind, _, _ in events] == ["envoy.connected", "envoy.disconnected"][: 2 * valid_requests]


async def test_ignores_unknown_resource_types(server: XdsServer) -> None:
    server.publish(make_plan())
    async with stub(server) as client:
        call = client.StreamAggregatedResources()
        await call.write(first_request("envoy-1", "type.googleapis.com/envoy.service.runtime.v3.Runtime"))
        await call.write(discovery_pb2.DiscoveryRequest(type_url=CLUSTER.url))
        response = await asyncio.wait_for(call.read(), 5)
        assert response.type_url == CLUSTER.url
        call.cancel()


async def test_newest_of_two_streams_with_one_id_counts(server: XdsServer, events: Events) -> None:
    server.publish(make_plan())
    async with stub(server) as client, stub(server) as other:
        call = client.StreamAggregatedResources()
        await call.write(first_request("twin"))
        await wait_until(lambda: len(server.statuses()) == 1)
        first_address = server.statuses()[0].address
        second_call = other.DeltaAggregatedResources()
        request = discovery_pb2.DeltaDiscoveryRequest(type_url=ENDPOINTS.url)
        request.node.id = "twin"
        await second_call.write(request)
        await wait_until(lambda: server.statuses()[0].address != first_address)
        assert [kind for kind, _, _ in events] == ["envoy.connected", "envoy.duplicate"]
        assert first_address in events[1][2]
        second_call.cancel()
        await wait_until(lambda: server.statuses()[0].address == first_address)
        assert server.statuses()[0].connected_since is not None
        call.cancel()
        await wait_until(lambda: server.statuses()[0].connected_since is None)
    assert [kind for kind, _, _ in events][2:] == ["envoy.disconnected"]


async def test_pushes_first_change_at_once_and_burst_together(server: XdsServer) -> None:
    async with stub(server) as client:
        call = client.StreamAggregatedResources()
        await call.write(first_request("envoy-1"))
        await wait_until(lambda: bool(server.statuses()))
        for weight in range(1, 40):
            server.publish(make_plan(make_node_plan("a:4000", "10.0.0.1:4000", weight=weight)))
        weights: list[int] = []
        while not weights or weights[-1] != 39:
            (resource,) = (await asyncio.wait_for(call.read(), 5)).resources
            (group,) = endpoint_pb2.ClusterLoadAssignment.FromString(resource.value).endpoints
            weights.append(group.lb_endpoints[0].load_balancing_weight.value)
        assert weights == [1, 39]
        call.cancel()


async def test_publish_at_once_is_pushed_on_return(server: XdsServer) -> None:
    """`GET /v1/envoys` must not show an Envoy as up to date before it has acknowledged a drain."""
    async with stub(server) as client:
        call = client.StreamAggregatedResources()
        await call.write(first_request("envoy-1"))
        await wait_until(lambda: bool(server.statuses()))
        server.publish(make_plan(make_node_plan("a:4000", "10.0.0.1:4000", weight=1)))
        assert server.is_pushed
        # The next version is delayed as part of a burst.
        server.publish(make_plan(make_node_plan("a:4000", "10.0.0.1:4000", weight=2)))
        assert not server.is_pushed  # no Envoy has received this version yet
        delayed_version = server.statuses()[0].published_version
        server.publish(make_plan(make_node_plan("a:4000", "10.0.0.1:4000", weight=3)), at_once=True)
        assert server.is_pushed
        assert server.statuses()[0].published_version != delayed_version
        assert server.statuses()[0].acked_version != server.statuses()[0].published_version
        assert not server.statuses()[0].has_acknowledged_endpoints
        call.cancel()


async def test_failed_push_keeps_the_old_snapshot_and_is_retried(
    server: XdsServer, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an unexpected node")

    async with stub(server) as client:
        call = client.StreamAggregatedResources()
        await call.write(first_request("envoy-1"))
        server.publish(make_plan(make_node_plan("a:4000", "10.0.0.1:4000", weight=1)), stamp=(1, 1))
        await asyncio.wait_for(call.read(), 5)
        old_version = server.statuses()[0].published_version
        with monkeypatch.context() as patch:
            patch.setattr("controlplane.xds.snapshot_cache.build_load_assignment", fail)
            server.publish(
                make_plan(make_node_plan("a:4000", "10.0.0.1:4000", weight=2)), at_once=True, stamp=(1, 2)
            )
            await wait_until(lambda: server._retry_seconds > 0.1)  # the first retry has failed, too
            assert not server.is_pushed
            assert server.stamp == (1, 1)
            assert server.statuses()[0].published_version == old_version
        (resource,) = (await asyncio.wait_for(call.read(), 5)).resources
        (group,) = endpoint_pb2.ClusterLoadAssignment.FromString(resource.value).endpoints
        assert group.lb_endpoints[0].load_balancing_weight.value == 2
        assert server.is_pushed
        assert server.stamp == (1, 2)
        call.cancel()
    pushes = [(kind, message) for kind, _, message in events if kind.startswith("xds.")]
    assert [kind for kind, _ in pushes] == ["xds.push_failed", "xds.push_recovered"]
    assert "an unexpected node" in pushes[0][1]


async def test_plan_is_pushed_only_once(server: XdsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []

    def build(*args: Any) -> SnapshotCache:
        built.append(args)
        return SnapshotCache(*args)

    monkeypatch.setattr("controlplane.xds.server.SnapshotCache", build)
    for count in (1, 2, 3):
        server.publish(make_plan(), at_once=True)
        await asyncio.sleep(0.03)
        assert len(built) == count


async def test_envoy_that_closes_its_stream_is_disconnected(server: XdsServer, events: Events) -> None:
    server.publish(make_plan())
    async with stub(server) as client:
        call = client.StreamAggregatedResources()
        await call.write(first_request("polite"))
        await asyncio.wait_for(call.read(), 5)
        await call.done_writing()
        assert await asyncio.wait_for(call.read(), 5) is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK
    assert [kind for kind, _, _ in events] == ["envoy.connected", "envoy.disconnected"]
