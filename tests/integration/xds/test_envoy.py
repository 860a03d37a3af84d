"""A real Envoy applies published plans with both variants of xDS, without ending sessions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from controlplane.model.plan import EdsHealth
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import (
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_test_bed,
)
from tests.support.fake_servers import refusing_port
from tests.support.suspension import suspended
from tests.support.waiting import wait_until


async def test_first_configuration_arrives_soon(ports: Ports, envoy_process: StartEnvoy, delta: bool) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed:
        await wait_until(lambda: "envoy.connected" in test_bed.event_kinds())
        assert test_bed.status.acked_version == ""
        started_at = time.monotonic()
        test_bed.server.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        await wait_until(test_bed.is_acked)
        session = await test_bed.wait_for_session()
        assert time.monotonic() - started_at < 5.0
        assert session.node == "a"
        assert (test_bed.status.id, test_bed.status.version, test_bed.status.filter) == (
            "envoy-1",
            "1.40.0",
            "none",
        )
        assert await test_bed.envoy.is_live()


async def test_weight_drain_and_removal_apply_without_ending_sessions(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with (
        run_echo_servers("a", "b") as (a, b),
        run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed,
    ):
        other = make_node_plan("b:4000", b.endpoint)
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint), other))
        await test_bed.wait_for_session()
        while not any(session.node == "a" for session in test_bed.sessions):
            await test_bed.connect()

        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=7), other))
        assert (await test_bed.envoy.hosts("tidb"))[a.endpoint]["weight"] == 7
        for eds_health in (EdsHealth.DRAINING, EdsHealth.HEALTHY, EdsHealth.UNHEALTHY):
            await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint, eds_health, 0), other))
            host = (await test_bed.envoy.hosts("tidb"))[a.endpoint]
            assert host["health_status"]["eds_health_status"] == eds_health.value
        assert {(await test_bed.connect()).node for _ in range(10)} == {"b"}
        await test_bed.publish(make_plan(other))
        assert a.endpoint not in await test_bed.envoy.hosts("tidb")
        assert {(await test_bed.connect()).node for _ in range(10)} == {"b"}

        assert all([await session.is_alive() for session in test_bed.sessions])


async def test_draining_node_gets_no_session_after_ack(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with (
        run_echo_servers("a", "b") as (a, b),
        run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed,
    ):
        other = make_node_plan("b:4000", b.endpoint)
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint), other))
        await test_bed.wait_for_session()
        for _ in range(5):
            await test_bed.publish(
                make_plan(make_node_plan("a:4000", a.endpoint, EdsHealth.DRAINING, 0), other)
            )
            assert {(await test_bed.connect()).node for _ in range(10)} == {"b"}
            await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint), other))


async def test_without_healthy_node_clients_get_no_node(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process) as test_bed:
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        for eds_health in (EdsHealth.DRAINING, EdsHealth.UNHEALTHY):
            await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint, eds_health, 0)))
            assert (await test_bed.connect()).node == ""
        await test_bed.publish(make_plan())
        assert (await test_bed.connect()).node == ""
        assert await session.is_alive()


async def test_envoy_keeps_its_cluster(ports: Ports, envoy_process: StartEnvoy, delta: bool) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed:
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        test_bed.server.configure(test_bed.with_settings({"backend": {"connect_timeout": 3}}))
        await wait_until(lambda: test_bed.status.stale_resources == ("cluster",))
        await wait_until(test_bed.is_acked)  # the changed cluster is not sent
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=9)))
        dump = (await test_bed.envoy.get("/config_dump?resource=dynamic_active_clusters")).json()
        assert dump["configs"][0]["cluster"]["connect_timeout"] == "1s"
        assert (await test_bed.envoy.stats("^cluster_manager.cluster_modified$")) == {
            "cluster_manager.cluster_modified": 0
        }
        assert await session.is_alive()


async def test_burst_of_changes_ends_with_the_last(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed:
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        for index in range(200):
            test_bed.server.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=1 + index)))
            await asyncio.sleep(0.002)
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=77)))
        assert (await test_bed.envoy.hosts("tidb"))[a.endpoint]["weight"] == 77


async def test_balances_by_weight_alone(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with run_echo_servers("a", "b") as (a, b), run_xds_test_bed(ports, envoy_process) as test_bed:
        await test_bed.publish(
            make_plan(
                make_node_plan("a:4000", a.endpoint, weight=30),
                make_node_plan("b:4000", b.endpoint, weight=10),
            )
        )
        await test_bed.wait_for_session()
        counts = Counter([(await test_bed.connect()).node for _ in range(80)])
        assert 55 <= counts["a"] <= 65, counts


async def test_dead_node_fails_no_client_connection(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with run_echo_servers("a", "b") as (a, b), run_xds_test_bed(ports, envoy_process) as test_bed:
        with refusing_port() as dead:
            await test_bed.publish(
                make_plan(
                    make_node_plan("a:4000", a.endpoint),
                    make_node_plan("b:4000", b.endpoint),
                    make_node_plan("dead:4000", dead, weight=200),
                )
            )
            await test_bed.wait_for_session()
            nodes = Counter([(await test_bed.connect()).node for _ in range(100)])
        assert set(nodes) == {"a", "b"}
        failures = (await test_bed.envoy.stats("cluster.tidb.upstream_cx_connect_fail"))[
            "cluster.tidb.upstream_cx_connect_fail"
        ]
        assert 1 <= failures < 20  # Envoy ejects the dead node after the first failures


async def test_restarted_envoy_is_configured_soon(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed:
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        await test_bed.wait_for_session()
        await test_bed.envoy.kill()
        await wait_until(lambda: "envoy.disconnected" in test_bed.event_kinds())
        assert test_bed.status.connected_since is None
        started_at = time.monotonic()
        await test_bed.envoy.launch()
        assert (await test_bed.wait_for_session()).node == "a"
        assert time.monotonic() - started_at < 10.0  # including the start of the process
        await wait_until(test_bed.is_acked)


async def test_restarted_control_plane_with_same_plan_changes_nothing(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed:
        plan = make_plan(make_node_plan("a:4000", a.endpoint))
        await test_bed.publish(plan)
        session = await test_bed.wait_for_session()
        listeners = await test_bed.envoy.stats("^listener_manager.listener_(added|modified|removed)$")
        clusters = await test_bed.envoy.stats("^cluster_manager.cluster_(added|modified|removed)$")
        version = test_bed.status.acked_version
        await test_bed.restart_server(plan)
        await wait_until(test_bed.is_acked)
        assert test_bed.status.acked_version == version
        assert test_bed.status.stale_resources == ()
        assert await test_bed.envoy.stats("^listener_manager.listener_(added|modified|removed)$") == listeners
        assert await test_bed.envoy.stats("^cluster_manager.cluster_(added|modified|removed)$") == clusters
        assert await session.is_alive()
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=9)))
        assert (await test_bed.envoy.hosts("tidb"))[a.endpoint]["weight"] == 9


async def test_control_plane_without_plan_removes_nothing(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed:
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        await test_bed.restart_server(None)
        assert test_bed.status.published_version == ""
        assert (await test_bed.connect()).node == "a"
        assert await session.is_alive()


async def test_envoy_keeps_its_listener(ports: Ports, envoy_process: StartEnvoy, delta: bool) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed:
        plan = make_plan(make_node_plan("a:4000", a.endpoint))
        await test_bed.publish(plan)
        session = await test_bed.wait_for_session()
        test_bed.settings = test_bed.with_settings({"sql": {"idle_timeout": 77}})
        test_bed.server.configure(test_bed.settings)
        await wait_until(lambda: test_bed.status.stale_resources == ("listener",))
        assert test_bed.status.stale_settings == ("sql.idle_timeout",)
        await wait_until(test_bed.is_acked)  # the changed listener is not sent
        await test_bed.restart_server(plan)  # a restarted control plane does not send it either
        await wait_until(lambda: test_bed.status.stale_resources == ("listener",))
        assert not test_bed.status.stale_settings  # it does not know the settings before its restart
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=9)))
        stats = await test_bed.envoy.stats("^listener_manager.listener_modified$")
        assert stats == {"listener_manager.listener_modified": 0}
        assert await session.is_alive()


async def test_detects_silent_envoy_and_its_return(ports: Ports, envoy_process: StartEnvoy) -> None:
    """Only gRPC keepalive detects the suspension: the kernel acknowledges packets, and no connection ends."""
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process) as test_bed:
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        async with suspended(test_bed.envoy.process.pid):
            await wait_until(lambda: test_bed.event_kinds()[-1] == "envoy.disconnected", 20)
            assert test_bed.status.connected_since is None
        await wait_until(lambda: test_bed.event_kinds()[-1] == "envoy.connected")
        await wait_until(test_bed.is_acked)
        assert await session.is_alive()
