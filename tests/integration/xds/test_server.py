"""The server with protocol clients: bad requests, slow readers, two Envoys with one id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2

from controlplane.clock import monotonic_unix_clock
from controlplane.config.settings import Settings
from controlplane.model.plan import Plan
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS
from controlplane.xds.server import XdsServer
from tests.support.controlplane.xds_server import make_node_plan, make_plan
from tests.support.waiting import wait_until

Events = list[tuple[str, str, str]]


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
async def server(events: Events) -> AsyncIterator[XdsServer]:
    settings = Settings.model_validate({"xds": {"listen": "127.0.0.1:0"}})
    server = XdsServer(settings, monotonic_unix_clock(), on_event=lambda *event: events.append(event))
    await server.start()
    yield server
    await server.stop()


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
    path = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(path)()
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
    """Otherwise `GET /v1/envoys` would show everything as acknowledged while the drain is not pushed yet."""
    async with stub(server) as client:
        call = client.StreamAggregatedResources()
        await call.write(first_request("envoy-1"))
        await wait_until(lambda: bool(server.statuses()))
        server.publish(make_plan(make_node_plan("a:4000", "10.0.0.1:4000", weight=1)))
        assert server.is_pushed
        server.publish(
            make_plan(make_node_plan("a:4000", "10.0.0.1:4000", weight=2))
        )  # delayed as part of a burst
        assert not server.is_pushed  # Envoys do not acknowledge this version yet
        delayed_version = server.statuses()[0].published_version
        server.publish(make_plan(make_node_plan("a:4000", "10.0.0.1:4000", weight=3)), at_once=True)
        assert server.is_pushed
        assert server.statuses()[0].published_version != delayed_version
        assert server.statuses()[0].acked_version != server.statuses()[0].published_version
        assert not server.statuses()[0].eds_acked
        call.cancel()


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
