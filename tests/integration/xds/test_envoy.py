"""A real Envoy applies what is published in both protocol variants, without ending sessions."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter

import pytest

from controlplane.model.plan import EdsHealth
from sandbox.ports import Ports
from tests.support.controlplane.xds_server import (
    StartEnvoy,
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_rig,
)
from tests.support.fake_servers import refusing_port
from tests.support.waiting import wait_until


@pytest.fixture(params=[False, True], ids=["sotw", "delta"])
def delta(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_first_configuration_arrives_within_a_second(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process, delta=delta) as parts:
        await wait_until(lambda: "envoy.connected" in parts.event_kinds())
        assert parts.status.acked_version == ""
        started_at = time.monotonic()
        parts.server.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        await wait_until(parts.is_acked)
        session = await parts.wait_for_session()
        assert time.monotonic() - started_at < 1.0
        assert session.node == "a"
        assert (parts.status.id, parts.status.version, parts.status.filter) == ("envoy-1", "1.40.0", "none")
        assert await parts.envoy.is_live()


async def test_weight_drain_and_removal_apply_without_ending_sessions(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a", "b") as (a, b), run_xds_rig(ports, envoy_process, delta=delta) as parts:
        other = make_node_plan("b:4000", b.endpoint)
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint), other))
        await parts.wait_for_session()
        while not any(session.node == "a" for session in parts.sessions):
            await parts.connect()

        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=7), other))
        assert (await parts.envoy.hosts("tidb"))[a.endpoint]["weight"] == 7
        for eds_health in (EdsHealth.DRAINING, EdsHealth.HEALTHY, EdsHealth.UNHEALTHY):
            await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, eds_health, 0), other))
            host = (await parts.envoy.hosts("tidb"))[a.endpoint]
            assert host["health_status"]["eds_health_status"] == eds_health.value
        assert {(await parts.connect()).node for _ in range(10)} == {"b"}
        await parts.publish(make_plan(other))
        assert a.endpoint not in await parts.envoy.hosts("tidb")
        assert {(await parts.connect()).node for _ in range(10)} == {"b"}

        assert all([await session.is_alive() for session in parts.sessions])


async def test_draining_node_gets_no_session_after_ack(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a", "b") as (a, b), run_xds_rig(ports, envoy_process, delta=delta) as parts:
        other = make_node_plan("b:4000", b.endpoint)
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint), other))
        await parts.wait_for_session()
        for _ in range(5):
            await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, EdsHealth.DRAINING, 0), other))
            assert {(await parts.connect()).node for _ in range(10)} == {"b"}
            await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint), other))


async def test_without_healthy_node_clients_get_no_node(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process) as parts:
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await parts.wait_for_session()
        for eds_health in (EdsHealth.DRAINING, EdsHealth.UNHEALTHY):
            await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, eds_health, 0)))
            assert (await parts.connect()).node == ""
        await parts.publish(make_plan())
        assert (await parts.connect()).node == ""
        assert await session.is_alive()


async def test_envoy_keeps_its_cluster(ports: Ports, envoy_process: StartEnvoy, delta: bool) -> None:
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process, delta=delta) as parts:
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await parts.wait_for_session()
        parts.server.configure(parts.with_settings({"backend": {"connect_timeout": 3}}))
        await wait_until(lambda: parts.status.stale_resources == ("cluster",))
        await wait_until(parts.is_acked)  # of everything that it may get
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=9)))
        dump = (await parts.envoy.get("/config_dump?resource=dynamic_active_clusters")).json()
        assert dump["configs"][0]["cluster"]["connect_timeout"] == "1s"
        assert (await parts.envoy.stats("^cluster_manager.cluster_modified$")) == {
            "cluster_manager.cluster_modified": 0
        }
        assert await session.is_alive()


async def test_burst_of_changes_ends_with_the_last(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process, delta=delta) as parts:
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        for index in range(200):
            parts.server.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=1 + index)))
            await asyncio.sleep(0.002)
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=77)))
        assert (await parts.envoy.hosts("tidb"))[a.endpoint]["weight"] == 77


async def test_balances_by_weight_alone(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with run_echo_servers("a", "b") as (a, b), run_xds_rig(ports, envoy_process) as parts:
        await parts.publish(
            make_plan(
                make_node_plan("a:4000", a.endpoint, weight=30),
                make_node_plan("b:4000", b.endpoint, weight=10),
            )
        )
        await parts.wait_for_session()
        counts = Counter([(await parts.connect()).node for _ in range(80)])
        assert 55 <= counts["a"] <= 65, counts


async def test_dead_node_fails_no_client_connection(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with run_echo_servers("a", "b") as (a, b), run_xds_rig(ports, envoy_process) as parts:
        with refusing_port() as dead:
            await parts.publish(
                make_plan(
                    make_node_plan("a:4000", a.endpoint),
                    make_node_plan("b:4000", b.endpoint),
                    make_node_plan("dead:4000", dead, weight=200),
                )
            )
            await parts.wait_for_session()
            nodes = Counter([(await parts.connect()).node for _ in range(100)])
        assert set(nodes) == {"a", "b"}
        failures = (await parts.envoy.stats("cluster.tidb.upstream_cx_connect_fail"))[
            "cluster.tidb.upstream_cx_connect_fail"
        ]
        assert 1 <= failures < 20  # ejected after a failure, not tried for each client


async def test_restarted_envoy_is_configured_within_two_seconds(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process, delta=delta) as parts:
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        await parts.wait_for_session()
        await parts.envoy.kill()
        await wait_until(lambda: "envoy.disconnected" in parts.event_kinds())
        assert parts.status.connected_since is None
        started_at = time.monotonic()
        await parts.envoy.launch()
        assert (await parts.wait_for_session()).node == "a"
        assert time.monotonic() - started_at < 2.0  # including the start of the process
        await wait_until(parts.is_acked)


async def test_restarted_control_plane_with_same_plan_changes_nothing(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process, delta=delta) as parts:
        plan = make_plan(make_node_plan("a:4000", a.endpoint))
        await parts.publish(plan)
        session = await parts.wait_for_session()
        listeners = await parts.envoy.stats("^listener_manager.listener_(added|modified|removed)$")
        clusters = await parts.envoy.stats("^cluster_manager.cluster_(added|modified|removed)$")
        version = parts.status.acked_version
        await parts.restart_server(plan)
        await wait_until(parts.is_acked)
        assert parts.status.acked_version == version
        assert parts.status.stale_resources == ()
        assert await parts.envoy.stats("^listener_manager.listener_(added|modified|removed)$") == listeners
        assert await parts.envoy.stats("^cluster_manager.cluster_(added|modified|removed)$") == clusters
        assert await session.is_alive()
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=9)))
        assert (await parts.envoy.hosts("tidb"))[a.endpoint]["weight"] == 9


async def test_control_plane_without_plan_removes_nothing(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process, delta=delta) as parts:
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await parts.wait_for_session()
        await parts.restart_server(None)
        assert parts.status.published_version == ""
        assert (await parts.connect()).node == "a"
        assert await session.is_alive()


async def test_envoy_keeps_its_listener(ports: Ports, envoy_process: StartEnvoy, delta: bool) -> None:
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process, delta=delta) as parts:
        plan = make_plan(make_node_plan("a:4000", a.endpoint))
        await parts.publish(plan)
        session = await parts.wait_for_session()
        parts.settings = parts.with_settings({"sql": {"idle_timeout": 77}})
        parts.server.configure(parts.settings)
        await wait_until(lambda: parts.status.stale_resources == ("listener",))
        await wait_until(parts.is_acked)  # of everything that it may get
        await parts.restart_server(plan)  # nor does a restarted control plane change it
        await wait_until(lambda: parts.status.stale_resources == ("listener",))
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=9)))
        stats = await parts.envoy.stats("^listener_manager.listener_modified$")
        assert stats == {"listener_manager.listener_modified": 0}
        assert await session.is_alive()


async def test_detects_silent_envoy_and_its_return(ports: Ports, envoy_process: StartEnvoy) -> None:
    """Its kernel still acknowledges packets and no connection ends: only keepalive detects it."""
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process) as parts:
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await parts.wait_for_session()
        parts.envoy.process.send_signal(signal.SIGSTOP)
        try:
            await wait_until(lambda: parts.event_kinds()[-1] == "envoy.disconnected", 20)
            assert parts.status.connected_since is None
        finally:
            parts.envoy.process.send_signal(signal.SIGCONT)
        await wait_until(lambda: parts.event_kinds()[-1] == "envoy.connected")
        await wait_until(parts.is_acked)
        assert await session.is_alive()
