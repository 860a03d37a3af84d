"""Replicas that follow each other: what one is told, all know, and nothing old passes for new."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

import grpc
import pytest
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2
from envoy.service.load_stats.v3 import lrs_pb2, lrs_pb2_grpc

from controlplane.config.settings import Settings
from controlplane.model.plan import Plan
from controlplane.replicas import peer_feed_pb2, peer_feed_server
from controlplane.xds.resource_type import ENDPOINTS
from tests.support.controlplane.peer_sync import FakeReplica, connect_all, run_replicas
from tests.support.controlplane.telemetry_messages import (
    metric_family,
    module_info_family,
    open_metrics_stream,
    sessions_family,
)
from tests.support.controlplane.xds_server import make_node_plan, make_plan
from tests.support.waiting import assert_never, wait_until

NODE = "10.0.0.1:4000"
SETTINGS = Settings.model_validate({"xds": {"listen": "127.0.0.1:0"}})
ALONE = (("grpc.use_local_subchannel_pool", 1),)


@contextlib.asynccontextmanager
async def envoy(at: FakeReplica, name: str = "envoy-1") -> AsyncIterator[Any]:
    """A stream of an Envoy that asks for endpoints, and acknowledges nothing by itself."""
    async with grpc.aio.insecure_channel(at.address, options=ALONE) as channel:
        call = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel).StreamAggregatedResources()
        request = discovery_pb2.DiscoveryRequest(type_url=ENDPOINTS.url, resource_names=["tidb"])
        request.node.id = name
        await call.write(request)
        await wait_until(lambda: any(each.id == name for each in at.xds.statuses()))
        yield call


@contextlib.asynccontextmanager
async def reporting(at: FakeReplica, name: str = "envoy-1") -> AsyncIterator[Any]:
    """A stream of load reports that has begun."""
    async with grpc.aio.insecure_channel(at.address, options=ALONE) as channel:
        call = lrs_pb2_grpc.LoadReportingServiceStub(channel).StreamLoadStats()
        first = lrs_pb2.LoadStatsRequest()
        first.node.id = name
        await call.write(first)
        await call.read()
        yield call


def load(count: int) -> lrs_pb2.LoadStatsRequest:
    report = lrs_pb2.LoadStatsRequest()
    locality = report.cluster_stats.add(cluster_name="tidb").upstream_locality_stats.add()
    stats = locality.upstream_endpoint_stats.add(total_requests_in_progress=count)
    stats.address.socket_address.address = "10.0.0.1"
    stats.address.socket_address.port_value = 4000
    return report


async def all_see(all_: Iterable[FakeReplica], condition: Callable[[FakeReplica], bool]) -> None:
    """Returns when each of them has once been as it is to be."""
    for one in all_:
        await wait_until(partial(condition, one))


def connected(at: FakeReplica) -> float:
    """Since when the Envoy is connected, by that replica's clock."""
    since = at.require_envoy().status.connected_since
    assert since is not None
    return since


async def test_all_replicas_know_an_envoy_that_is_connected_to_one() -> None:
    async with run_replicas(SETTINGS, "a", "b", "c", clock_errors={"b": 5000.0, "c": -70.0}) as all_:
        a, b, c = all_
        async with envoy(a) as call:
            await all_see(all_, lambda each: each.sees_envoy_at("a"))
            a.xds.publish(make_plan(make_node_plan(NODE, NODE)), stamp=(7, 42))
            response = await call.read()
            await all_see((b, c), lambda each: each.require_envoy().stamp == (7, 42))
            assert not any(each.require_envoy().status.eds_acked for each in (b, c))
            await call.write(
                discovery_pb2.DiscoveryRequest(
                    type_url=ENDPOINTS.url,
                    resource_names=["tidb"],
                    version_info=response.version_info,
                    response_nonce=response.nonce,
                )
            )
            await all_see((b, c), lambda each: each.require_envoy().status.eds_acked)
            for each in (b, c):
                assert connected(each) - connected(a) == pytest.approx(each.clock() - a.clock(), abs=0.5)
            since = connected(b)
            await assert_never(lambda: connected(b) != since, 2.2)  # it is told every second
        await all_see(all_, lambda each: each.require_envoy().status.connected_since is None)
        assert {each.require_envoy().replica for each in all_} == {"a"}


async def test_reports_and_counts_reach_all_replicas_as_they_came() -> None:
    async with run_replicas(SETTINGS, "a", "b", clock_errors={"b": -1000.0}) as (a, b):
        a.known = b.known = frozenset({NODE})
        async with reporting(a) as loads:
            await loads.write(load(3))
            await wait_until(lambda: bool(a.loads) and bool(b.loads))
            assert a.loads[0].sessions == b.loads[0].sessions == {NODE: 3}
            assert b.loads[0].at - a.loads[0].at == pytest.approx(-1000.0, abs=0.5)
        async with open_metrics_stream(a.xds.port) as metrics:
            await metrics.send(
                metric_family("tidevoy.logins", 9, node=NODE), module_info_family(), envoy="envoy-1"
            )
            await metrics.send(
                metric_family("tidevoy.logins", 10, node=NODE), sessions_family(2, NODE), module_info_family()
            )
            await wait_until(lambda: len(a.reports) == len(b.reports) == 2)
        for here, there in zip(a.reports, b.reports, strict=True):
            assert (here.envoy, here.version, here.is_first) == (there.envoy, there.version, there.is_first)
            assert dict(here.nodes) == dict(there.nodes)
        ours, theirs = (each.reports[1].session_counts for each in (a, b))
        assert ours is not None
        assert theirs is not None
        assert ours.sessions == theirs.sessions == {NODE: 2}
        assert theirs.counting_since - ours.counting_since == pytest.approx(-1000.0, abs=0.5)


async def test_a_replica_that_comes_later_takes_no_part_of_a_flush_for_the_whole() -> None:
    async with run_replicas(SETTINGS, "a") as (a,), open_metrics_stream(a.xds.port) as metrics:
        late = FakeReplica("late", SETTINGS)
        a.known = late.known = frozenset({NODE})
        await metrics.send(metric_family("tidevoy.logins", 9, node=NODE), envoy="envoy-1")
        await wait_until(lambda: len(a.metrics_streams) == 1)  # else `late` may get it, too
        await late.start()
        try:
            connect_all(a, late)
            await late.wait_connected_to(a)
            await metrics.send(
                sessions_family(2, NODE), module_info_family()
            )  # the end of the flush that has begun before
            await wait_until(lambda: len(a.reports) == 1)
            await metrics.send(metric_family("tidevoy.logins", 10, node=NODE))
            await metrics.send(sessions_family(2, NODE), module_info_family())
            await wait_until(lambda: len(a.reports) == 2 and len(late.reports) == 1)
            (told,) = late.reports
            assert (told.envoy, told.is_first, told.nodes[NODE].logins) == ("envoy-1", True, 10)
        finally:
            await late.stop()


async def test_events_that_others_cannot_know_of_are_told_once() -> None:
    async with run_replicas(SETTINGS, "a", "b", "c") as (a, b, c):
        audited = {"who": "ops", "outcome": "done"}
        a.peer_sync.send_event("audit.node_drain", NODE, "ops drained it", audited)
        a.peer_sync.send_event("node.state", NODE, "it is draining", {})
        await all_see((b, c), lambda each: bool(each.peer_events))
        async with envoy(a):
            await all_see((b, c), lambda each: len(each.peer_events) == 2)
            for each in (b, c):
                assert each.peer_events[0] == ("audit.node_drain", NODE, "ops drained it", audited)
                assert each.peer_events[1][:2] == ("envoy.connected", "envoy-1")
            await assert_never(lambda: bool(a.peer_events), 0.2)


async def test_an_envoy_that_goes_from_one_replica_to_another_is_no_duplicate() -> None:
    async with run_replicas(SETTINGS, "a", "b", "c") as all_:
        a, b, c = all_
        async with envoy(a):
            await all_see((b, c), lambda each: each.sees_envoy_at("a"))
            async with envoy(b):
                await all_see(all_, lambda each: each.require_envoy().replica == "b")
                # So nobody relies on it meanwhile.
                assert {each.require_envoy().status.streams for each in all_} == {2}
                await a.stop()
                await all_see((b, c), lambda each: each.sees_envoy_at("b"))
        assert not any(
            event[0] == "envoy.duplicate" for each in all_ for event in (*each.events, *each.peer_events)
        )


async def test_envoys_of_a_replica_that_is_gone_are_not_connected_and_come_back_with_it() -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b):
        async with envoy(a):
            await wait_until(lambda: b.sees_envoy_at("a"))
            await a.stop()
            await wait_until(lambda: b.require_envoy().status.connected_since is None)
            assert b.require_envoy().status.streams == 0
            assert "a" in b.peer_sync.unreachable()
        again = FakeReplica("a", SETTINGS)
        await again.start()
        try:
            connect_all(again, b)
            await b.wait_connected_to(again)
            async with envoy(again):
                await wait_until(lambda: b.sees_envoy_at("a"))
        finally:
            await again.stop()


async def test_one_without_envoys_that_hangs_may_lose_its_registration_and_then_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("controlplane.replicas.peer_sync._CHECK_INTERVAL_SECONDS", 0.05)
    async with run_replicas(SETTINGS, "a", "b") as (a, b):
        await a.stop_sync()
        b.peer_sync.set_peers({})
        await asyncio.sleep(0.3)  # it looks several times meanwhile for what is not needed any more
        await a.stop()
        again = FakeReplica("a", SETTINGS)
        await again.start()
        try:
            connect_all(again, b)
            async with envoy(again):
                await wait_until(lambda: b.sees_envoy_at("a"))
        finally:
            await again.stop()


async def test_a_replica_is_followed_until_it_is_neither_registered_nor_heard() -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b):
        async with envoy(a):
            await wait_until(lambda: b.sees_envoy_at("a"))
            since = connected(b)
            b.peer_sync.set_peers({"b": b.address})  # as when etcd loses all registrations for a moment
            await assert_never(lambda: connected(b) != since, 0.3)
            connect_all(a, b)
            await assert_never(lambda: connected(b) != since, 0.3)
            b.peer_sync.set_peers({"b": b.address})
            await a.stop()
        await wait_until(lambda: b.require_envoy().status.connected_since is None)
        assert b.peer_sync.unreachable() == {}
        again = FakeReplica("a", SETTINGS)
        await again.start()
        try:
            connect_all(again, b)
            assert "a" in b.peer_sync.unreachable()
            await b.wait_connected_to(again)
        finally:
            await again.stop()


async def test_a_replica_that_moved_is_followed_there() -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b), envoy(a):
        await wait_until(lambda: b.sees_envoy_at("a"))
        moved = FakeReplica("a", SETTINGS)
        await moved.start()
        try:
            b.peer_sync.set_peers({"a": moved.address, "b": b.address})
            moved.peer_sync.set_peers({"b": b.address})
            await wait_until(lambda: b.require_envoy().status.connected_since is None)
            await b.wait_connected_to(moved)
            async with envoy(moved, "envoy-2"):
                await wait_until(lambda: b.sees_envoy_at("a", "envoy-2"))
        finally:
            await moved.stop()


async def test_who_is_silent_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.replicas.peer_feed_client._SILENCE_TIMEOUT_SECONDS", 0.3)

    async def silent(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.write(peer_feed_pb2.Bulletin().SerializeToString())
        await asyncio.Event().wait()

    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(silent)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                peer_feed_server.SERVICE_NAME, {peer_feed_server.FOLLOW_METHOD: handler}
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with run_replicas(SETTINGS, "b") as (b,):
            b.peer_sync.set_peers({"mute": f"127.0.0.1:{port}"})
            await wait_until(lambda: "told nothing for" in b.peer_sync.unreachable().get("mute", ""))
    finally:
        await server.stop(None)


async def test_what_cannot_be_taken_in_ends_the_feed_and_nothing_else() -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b):
        a.peer_sync.send_event("envoy.odd", "e", "m", {})
        await wait_until(lambda: len(b.peer_events) == 1)

        def refuses(_: object) -> None:
            raise RuntimeError("this one is too much")

        b.on_load = refuses
        async with reporting(a) as loads:
            await loads.write(load(3))
            await wait_until(lambda: "too much" in b.peer_sync.unreachable().get("a", ""))
            await b.wait_connected_to(a)


async def test_nobody_follows_from_elsewhere_without_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_replicas(SETTINGS, "a") as (a,):
        monkeypatch.setattr("controlplane.replicas.peer_sync.peer", lambda _: "10.0.0.9:1")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await first_bulletin(grpc.aio.insecure_channel(a.address, options=ALONE))
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "shows no certificate" in (refused.value.details() or "")


async def test_a_follower_that_stops_reading_is_cut_off_and_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("controlplane.replicas.peer_feed_server._MAX_QUEUED_BYTES", 1 << 20)
    async with (
        run_replicas(SETTINGS, "a") as (a,),
        grpc.aio.insecure_channel(a.address, options=ALONE) as channel,
    ):
        call = follow(channel)
        await call.read()
        for _ in range(64):
            a.peer_sync.send_event("envoy.long", "e", "m" * (1 << 18), {})
            await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await to_the_end(call)
        assert cut.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await follow(channel).read()


def follow(channel: grpc.aio.Channel) -> Any:
    open_feed = channel.unary_stream(f"/{peer_feed_server.SERVICE_NAME}/{peer_feed_server.FOLLOW_METHOD}")
    return open_feed(peer_feed_pb2.FollowRequest(name="x").SerializeToString())


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def first_bulletin(channel: grpc.aio.Channel) -> bytes:
    async with channel:
        data: bytes = await follow(channel).read()
        return data


async def test_nothing_is_published_without_a_stamp_but_a_fleet_is_told() -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b), envoy(a):
        await wait_until(lambda: b.sees_envoy_at("a"))
        assert b.require_envoy().stamp is None
        a.xds.publish(Plan(), at_once=True, stamp=(1, 1))
        await wait_until(lambda: b.require_envoy().stamp == (1, 1))
        a.xds.publish(make_plan(make_node_plan(NODE, NODE)), at_once=True, stamp=(1, 2))
        a.xds.publish(make_plan(make_node_plan(NODE, NODE, weight=7)), stamp=(1, 3))
        assert a.xds.stamp == (1, 2)  # that one waits for what follows in a moment
        await wait_until(lambda: b.require_envoy().stamp == (1, 3))
