"""Replicas that follow each other's feeds share all facts, and stale data never counts as new."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
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
from controlplane.replicas.peer_sync import PeerSync
from controlplane.xds.resource_type import ENDPOINTS
from tests.support.controlplane.peer_sync import FakeReplica, connect_all, run_replicas
from tests.support.controlplane.statement_reports import (
    announced_process,
    deliver_report,
    digest_of,
    executions,
    report_message,
    row,
)
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
UNSHARED_CONNECTION_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


@contextlib.asynccontextmanager
async def open_envoy_stream(replica: FakeReplica, name: str = "envoy-1") -> AsyncIterator[Any]:
    """Open an Envoy's stream that subscribes to endpoints; the caller must send acknowledgements."""
    async with grpc.aio.insecure_channel(replica.address, options=UNSHARED_CONNECTION_OPTIONS) as channel:
        call = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel).StreamAggregatedResources()
        request = discovery_pb2.DiscoveryRequest(type_url=ENDPOINTS.url, resource_names=["tidb"])
        request.node.id = name
        await call.write(request)
        await wait_until(lambda: any(status.id == name for status in replica.xds.statuses()))
        yield call


@contextlib.asynccontextmanager
async def open_load_report_stream(replica: FakeReplica, name: str = "envoy-1") -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(replica.address, options=UNSHARED_CONNECTION_OPTIONS) as channel:
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


async def wait_for_all(replicas: Iterable[FakeReplica], condition: Callable[[FakeReplica], bool]) -> None:
    """Wait for one replica after the other until the condition is true for it."""
    for replica in replicas:
        await wait_until(partial(condition, replica))


def connected_since(replica: FakeReplica) -> float:
    """Return the time when the Envoy connected, by the replica's clock."""
    since = replica.require_envoy().status.connected_since
    assert since is not None
    return since


async def test_all_replicas_know_an_envoy_of_one_replica() -> None:
    async with run_replicas(SETTINGS, "a", "b", "c", clock_errors={"b": 5000.0, "c": -70.0}) as replicas:
        a, b, c = replicas
        async with open_envoy_stream(a) as call:
            await wait_for_all(replicas, lambda replica: replica.sees_envoy_at("a"))
            a.xds.publish(make_plan(make_node_plan(NODE, NODE)), stamp=(7, 42))
            response = await call.read()
            await wait_for_all((b, c), lambda replica: replica.require_envoy().stamp == (7, 42))
            assert not any(replica.require_envoy().status.has_acknowledged_endpoints for replica in (b, c))
            await call.write(
                discovery_pb2.DiscoveryRequest(
                    type_url=ENDPOINTS.url,
                    resource_names=["tidb"],
                    version_info=response.version_info,
                    response_nonce=response.nonce,
                )
            )
            await wait_for_all(
                (b, c), lambda replica: replica.require_envoy().status.has_acknowledged_endpoints
            )
            for replica in (b, c):
                assert connected_since(replica) - connected_since(a) == pytest.approx(
                    replica.clock() - a.clock(), abs=0.5
                )
            since = connected_since(b)
            await assert_never(lambda: connected_since(b) != since, 2.2)  # `a` sends its Envoys every second
        await wait_for_all(replicas, lambda replica: replica.require_envoy().status.connected_since is None)
        assert {replica.require_envoy().replica for replica in replicas} == {"a"}


async def test_reports_reach_all_replicas_unchanged() -> None:
    async with run_replicas(SETTINGS, "a", "b", clock_errors={"b": -1000.0}) as (a, b):
        a.known_nodes = b.known_nodes = frozenset({NODE})
        async with open_load_report_stream(a) as loads:
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
        for own, remote in zip(a.reports, b.reports, strict=True):
            assert (own.envoy, own.version, own.is_first) == (remote.envoy, remote.version, remote.is_first)
            assert dict(own.nodes) == dict(remote.nodes)
        ours, theirs = (replica.reports[1].session_counts for replica in (a, b))
        assert ours is not None
        assert theirs is not None
        assert ours.sessions == theirs.sessions == {NODE: 2}
        assert theirs.oldest_count_at - ours.oldest_count_at == pytest.approx(-1000.0, abs=0.5)


async def test_statements_reach_all_replicas_and_count_once() -> None:
    async with (
        run_replicas(SETTINGS, "a", "b", clock_errors={"b": -1000.0}) as (a, b),
        announced_process(a.xds.port),
    ):
        await wait_for_all((a, b), lambda replica: bool(replica.reports))
        for sequence in (1, 2):
            await deliver_report(a.xds.port, report_message(row(1), sequence=sequence))
        await wait_until(lambda: executions(b.statements.window(600)) == {digest_of(1): 2})
        # The Envoy reconnects to `b`, and sends its last report again.
        await deliver_report(b.xds.port, report_message(row(1), sequence=2))
        await deliver_report(b.xds.port, report_message(row(1), sequence=3))
        await wait_for_all(
            (a, b), lambda replica: executions(replica.statements.window(600)) == {digest_of(1): 3}
        )


async def test_outages_of_replicas_are_remembered() -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b):
        await b.stop()
        await wait_until(lambda: "b" in a.peer_sync.unreachable())
        (outage,) = [one for one in a.peer_sync.outages() if one.until is None]
        assert outage.replica == "b"
        await b.start()
        connect_all(a, b)
        await a.wait_connected_to(b)
        ended = a.peer_sync.outages()[-1]
        assert (ended.replica, ended.since) == ("b", outage.since)
        assert ended.until is not None
        assert ended.until >= ended.since
        await b.stop()
        await wait_until(lambda: "b" in a.peer_sync.unreachable())
        (outage,) = [one for one in a.peer_sync.outages() if one.until is None]
        a.set_peers()  # the registration of `b` has expired
        ended = a.peer_sync.outages()[-1]
        assert (ended.replica, ended.since) == ("b", outage.since)
        assert ended.until is not None


async def test_late_follower_ignores_a_partial_flush() -> None:
    async with run_replicas(SETTINGS, "a") as (a,), open_metrics_stream(a.xds.port) as metrics:
        late = FakeReplica("late", SETTINGS)
        a.known_nodes = late.known_nodes = frozenset({NODE})
        await metrics.send(metric_family("tidevoy.logins", 9, node=NODE), envoy="envoy-1")
        await wait_until(lambda: len(a.metrics_streams) == 1)  # so that `late` does not get this message
        await late.start()
        try:
            connect_all(a, late)
            await late.wait_connected_to(a)
            # This is the end of a flush that began before `late` joined.
            await metrics.send(sessions_family(2, NODE), module_info_family())
            await wait_until(lambda: len(a.reports) == 1)
            await metrics.send(metric_family("tidevoy.logins", 10, node=NODE))
            await metrics.send(sessions_family(2, NODE), module_info_family())
            await wait_until(lambda: len(a.reports) == 2 and len(late.reports) == 1)
            (report,) = late.reports
            assert (report.envoy, report.is_first, report.nodes[NODE].logins) == ("envoy-1", True, 10)
        finally:
            await late.stop()


async def test_shared_events_are_sent_once() -> None:
    async with run_replicas(SETTINGS, "a", "b", "c") as (a, b, c):
        audited = {"who": "ops", "outcome": "done"}
        a.peer_feed.send_event("audit.node_drain", NODE, "ops drained it", audited)
        a.peer_feed.send_event("node.state", NODE, "it is draining", {})
        await wait_for_all((b, c), lambda replica: bool(replica.peer_events))
        async with open_envoy_stream(a):
            await wait_for_all((b, c), lambda replica: len(replica.peer_events) == 2)
            for replica in (b, c):
                assert replica.peer_events[0] == ("audit.node_drain", NODE, "ops drained it", audited)
                assert replica.peer_events[1][:2] == ("envoy.connected", "envoy-1")
            await assert_never(lambda: bool(a.peer_events), 0.2)


async def test_envoy_that_changes_replicas_is_not_a_duplicate() -> None:
    async with run_replicas(SETTINGS, "a", "b", "c") as replicas:
        a, b, c = replicas
        async with open_envoy_stream(a):
            await wait_for_all((b, c), lambda replica: replica.sees_envoy_at("a"))
            async with open_envoy_stream(b):
                await wait_for_all(replicas, lambda replica: replica.require_envoy().replica == "b")
                # While the Envoy has two streams, no replica relies on its acknowledgements.
                assert {replica.require_envoy().status.streams for replica in replicas} == {2}
                await a.stop()
                await wait_for_all((b, c), lambda replica: replica.sees_envoy_at("b"))
        assert not any(
            event[0] == "envoy.duplicate"
            for replica in replicas
            for event in (*replica.events, *replica.peer_events)
        )


async def test_envoys_of_a_stopped_replica_disconnect_and_return_with_it() -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b):
        async with open_envoy_stream(a):
            await wait_until(lambda: b.sees_envoy_at("a"))
            await a.stop()
            await wait_until(lambda: b.require_envoy().status.connected_since is None)
            assert b.require_envoy().status.streams == 0
            assert "a" in b.peer_sync.unreachable()
        restarted = FakeReplica("a", SETTINGS)
        await restarted.start()
        try:
            connect_all(restarted, b)
            await b.wait_connected_to(restarted)
            async with open_envoy_stream(restarted):
                await wait_until(lambda: b.sees_envoy_at("a"))
        finally:
            await restarted.stop()


async def test_hung_replica_without_envoys_can_lose_its_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("controlplane.replicas.peer_sync._CHECK_INTERVAL_SECONDS", 0.05)
    checks = Counter[PeerSync]()
    report_unreachable = PeerSync._report_unreachable

    def count_check(peer_sync: PeerSync, now: float) -> None:
        """Do the last step of a periodic check, and count the check."""
        report_unreachable(peer_sync, now)
        checks[peer_sync] += 1

    monkeypatch.setattr(PeerSync, "_report_unreachable", count_check)
    async with run_replicas(SETTINGS, "a", "b") as (a, b):
        await a.stop_sync()
        b.set_peers()
        # A check forgets a replica without Envoys if it is neither registered nor reachable. `a` is still
        # reachable.
        checked = checks[b.peer_sync]
        await wait_until(lambda: checks[b.peer_sync] >= checked + 3)
        await a.stop()
        restarted = FakeReplica("a", SETTINGS)
        await restarted.start()
        try:
            connect_all(restarted, b)
            async with open_envoy_stream(restarted):
                await wait_until(lambda: b.sees_envoy_at("a"))
        finally:
            await restarted.stop()


async def test_replica_is_followed_until_unregistered_and_unreachable() -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b):
        async with open_envoy_stream(a):
            await wait_until(lambda: b.sees_envoy_at("a"))
            since = connected_since(b)
            b.set_peers(b)  # as if etcd had lost all registrations for a moment
            await assert_never(lambda: connected_since(b) != since, 0.3)
            connect_all(a, b)
            await assert_never(lambda: connected_since(b) != since, 0.3)
            b.set_peers(b)
            await a.stop()
        await wait_until(lambda: b.require_envoy().status.connected_since is None)
        assert b.peer_sync.unreachable() == {}
        restarted = FakeReplica("a", SETTINGS)
        await restarted.start()
        try:
            connect_all(restarted, b)
            assert "a" in b.peer_sync.unreachable()
            await b.wait_connected_to(restarted)
        finally:
            await restarted.stop()


async def test_replica_is_followed_at_its_new_address() -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b), open_envoy_stream(a):
        await wait_until(lambda: b.sees_envoy_at("a"))
        moved = FakeReplica("a", SETTINGS)
        await moved.start()
        try:
            b.set_peers(moved, b)
            moved.set_peers(b)
            await wait_until(lambda: b.require_envoy().status.connected_since is None)
            await b.wait_connected_to(moved)
            async with open_envoy_stream(moved, "envoy-2"):
                await wait_until(lambda: b.sees_envoy_at("a", "envoy-2"))
        finally:
            await moved.stop()


async def test_silent_replica_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.replicas.peer_feed_client._RECEIVE_TIMEOUT_SECONDS", 0.3)

    async def send_one_batch(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.write(peer_feed_pb2.MessageBatch().SerializeToString())
        await asyncio.Event().wait()

    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(send_one_batch)
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
            b.set_peer_addresses({"silent": f"127.0.0.1:{port}"})
            await wait_until(lambda: "sent nothing for" in b.peer_sync.unreachable().get("silent", ""))
    finally:
        await server.stop(None)


async def test_failing_message_ends_only_the_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b):
        a.peer_feed.send_event("envoy.odd", "e", "m", {})
        await wait_until(lambda: len(b.peer_events) == 1)

        def fail(_: object) -> None:
            raise RuntimeError("unexpected report")

        monkeypatch.setattr(b.facts, "put_load", fail)
        async with open_load_report_stream(a) as loads:
            await loads.write(load(3))
            await wait_until(lambda: "unexpected report" in b.peer_sync.unreachable().get("a", ""))
            await b.wait_connected_to(a)


async def test_remote_follower_without_certificate_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_replicas(SETTINGS, "a") as (a,):
        monkeypatch.setattr("controlplane.replicas.peer_authorization.peer_address", lambda _: "10.0.0.9:1")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_first_batch(grpc.aio.insecure_channel(a.address, options=UNSHARED_CONNECTION_OPTIONS))
        assert error.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "presents no certificate" in (error.value.details() or "")


async def test_slow_follower_is_ended_and_can_follow_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("controlplane.replicas.peer_feed_server._MAX_QUEUED_BYTES", 1 << 20)
    async with (
        run_replicas(SETTINGS, "a") as (a,),
        grpc.aio.insecure_channel(a.address, options=UNSHARED_CONNECTION_OPTIONS) as channel,
    ):
        call = follow(channel)
        await call.read()
        for _ in range(64):
            a.peer_feed.send_event("envoy.long", "e", "m" * (1 << 18), {})
            await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_to_end(call)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await follow(channel).read()


def follow(channel: grpc.aio.Channel) -> Any:
    open_feed = channel.unary_stream(f"/{peer_feed_server.SERVICE_NAME}/{peer_feed_server.FOLLOW_METHOD}")
    return open_feed(peer_feed_pb2.FollowRequest(name="x").SerializeToString())


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def read_first_batch(channel: grpc.aio.Channel) -> bytes:
    async with channel:
        data: bytes = await follow(channel).read()
        return data


async def test_fleet_without_stamp_is_sent() -> None:
    async with run_replicas(SETTINGS, "a", "b") as (a, b), open_envoy_stream(a):
        await wait_until(lambda: b.sees_envoy_at("a"))
        assert b.require_envoy().stamp is None
        a.xds.publish(Plan(), at_once=True, stamp=(1, 1))
        await wait_until(lambda: b.require_envoy().stamp == (1, 1))
        a.xds.publish(make_plan(make_node_plan(NODE, NODE)), at_once=True, stamp=(1, 2))
        a.xds.publish(make_plan(make_node_plan(NODE, NODE, weight=7)), stamp=(1, 3))
        assert a.xds.stamp == (1, 2)  # the last change is still delayed (debounce)
        await wait_until(lambda: b.require_envoy().stamp == (1, 3))
