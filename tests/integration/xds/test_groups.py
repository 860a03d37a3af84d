"""A real Envoy with groups of nodes, zones and backup nodes."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from controlplane.model.plan import EdsHealth, NodePlan
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import (
    XdsTestBed,
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_test_bed,
)
from tests.support.fake_servers import FakeServer, refusing_port
from tests.support.waiting import wait_until


def node_plan(name: str, endpoint: str, **fields: Any) -> NodePlan:
    return replace(
        make_node_plan(f"{name}:4000", endpoint, fields.pop("eds_health", EdsHealth.HEALTHY)), **fields
    )


def group(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "listen": f"127.0.0.1:{port}", "labels": {"use": name}}


async def changed_or_removed(test_bed: XdsTestBed) -> int:
    """Return how many listeners and clusters were changed or removed."""
    counters = await test_bed.envoy.stats(
        "^(listener_manager.listener|cluster_manager.cluster)_(modified|removed)$"
    )
    assert len(counters) == 4
    return sum(counters.values())


async def nodes_of(test_bed: XdsTestBed, count: int) -> Counter[str]:
    """Return the nodes of `count` new connections."""
    return Counter([(await test_bed.connect()).node for _ in range(count)])


async def test_groups_are_added_and_removed_without_ending_sessions(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    first, second = group("olap", ports.allocate()), group("fast", ports.allocate())
    olap, fast = (int(group_["listen"].rpartition(":")[2]) for group_ in (first, second))
    async with (
        run_echo_servers("a", "b", "c") as (a, b, c),
        run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed,
    ):
        nodes = make_plan(
            node_plan("a", a.endpoint),
            node_plan("b", b.endpoint, group="olap"),
            node_plan("c", c.endpoint, group="fast"),
        )
        await test_bed.publish(nodes)
        session = await test_bed.wait_for_session()
        test_bed.server.configure(test_bed.with_settings({"groups": [first]}))
        assert (await test_bed.wait_for_session(port=olap)).node == "b"
        olap_session = test_bed.sessions[-1]
        assert await nodes_of(test_bed, 4) == {"a": 4}
        # A restarted control plane knows only what the Envoy reports, and can still add a group.
        test_bed.settings = test_bed.with_settings({"groups": [first, second]})
        await test_bed.restart_server(nodes)
        assert (await test_bed.wait_for_session(port=fast)).node == "c"
        await wait_until(test_bed.is_acked)
        assert test_bed.status.stale_resources == ()
        # The port of a removed group stays, without nodes.
        test_bed.server.configure(test_bed.with_settings({"groups": [second]}))
        await wait_until(lambda: test_bed.status.stale_resources == ("cluster", "listener"))
        await wait_until(test_bed.is_acked)
        assert (await test_bed.connect(port=olap)).node == ""
        assert (await test_bed.connect(port=fast)).node == "c"
        assert await session.is_alive()
        assert await olap_session.is_alive()
        assert await changed_or_removed(test_bed) == 0


async def test_unusable_port_does_not_block_other_groups(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    olap_port = ports.allocate()
    with socket.socket() as used_port:
        used_port.bind(("127.0.0.1", 0))
        used_port.listen()
        groups = [group("a-taken", used_port.getsockname()[1]), group("olap", olap_port)]
        async with (
            run_echo_servers("a", "b") as (a, b),
            run_xds_test_bed(ports, envoy_process, delta=delta, settings={"groups": groups}) as test_bed,
        ):
            test_bed.server.publish(
                make_plan(node_plan("a", a.endpoint), node_plan("b", b.endpoint, group="olap"))
            )
            session = await test_bed.wait_for_session()
            assert (await test_bed.wait_for_session(port=olap_port)).node == "b"
            nack = test_bed.status.last_nack
            assert nack is not None
            assert "sql-a-taken" in nack.message
            assert (test_bed.status.nacks, "envoy.filter_fallback" in test_bed.event_kinds()) == (1, False)
            assert not test_bed.is_acked()
            assert await session.is_alive()
            assert await changed_or_removed(test_bed) == 0


async def test_envoy_of_one_group_serves_only_that_group(ports: Ports, envoy_process: StartEnvoy) -> None:
    group_port = ports.allocate()
    groups = [group("olap", group_port)]
    async with (
        run_echo_servers("a", "b") as (a, b),
        run_xds_test_bed(ports, envoy_process, settings={"groups": groups}, group="olap") as test_bed,
    ):
        await test_bed.publish(
            make_plan(node_plan("a", a.endpoint), node_plan("b", b.endpoint, group="olap"))
        )
        assert (await test_bed.wait_for_session()).node == "b"
        assert await nodes_of(test_bed, 4) == {"b": 4}
        with pytest.raises(ConnectionRefusedError):
            await test_bed.connect(port=group_port)
        session = test_bed.sessions[0]
        test_bed.server.configure(test_bed.with_settings({"groups": []}))
        await wait_until(lambda: test_bed.status.problem.startswith("its listener has no nodes"))
        await wait_until(lambda: test_bed.status.has_acknowledged_endpoints)
        assert (await test_bed.connect()).node == ""
        assert await session.is_alive()


async def test_envoy_of_unknown_group_waits_for_the_group(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with (
        run_echo_servers("b") as (b,),
        run_xds_test_bed(ports, envoy_process, delta=delta, group="olap") as test_bed,
    ):
        test_bed.server.publish(make_plan(node_plan("b", b.endpoint, group="olap")))
        await wait_until(lambda: "envoy.problem" in test_bed.event_kinds())
        problem = "it gets no configuration, because no group in the settings is named olap"
        assert test_bed.status.problem == problem
        assert (test_bed.status.group, test_bed.is_acked()) == ("olap", False)
        with pytest.raises(ConnectionRefusedError):
            await test_bed.connect()
        test_bed.server.configure(test_bed.with_settings({"groups": [group("olap", ports.allocate())]}))
        assert (await test_bed.wait_for_session()).node == "b"
        assert test_bed.status.problem == ""


def local_node(peer: FakeServer, name: str, **fields: Any) -> NodePlan:
    return node_plan(name, peer.endpoint, zone="a", local_weight=100, **fields)


async def test_envoy_prefers_local_then_remote_then_backup_nodes(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        run_echo_servers("near", "far", "backup") as (near, far, backup),
        run_xds_test_bed(ports, envoy_process, zone="a") as test_bed,
    ):
        with refusing_port() as dead:
            remote = node_plan("far", far.endpoint, zone="b")
            backup_node = node_plan("backup", backup.endpoint, backup=True)
            # One healthy node of twelve is enough to serve the zone.
            unhealthy = [
                local_node(near, f"unhealthy-{n}", eds_health=EdsHealth.UNHEALTHY) for n in range(11)
            ]
            unhealthy = [replace(plan, endpoint=f"127.0.0.2:{n + 1}") for n, plan in enumerate(unhealthy)]
            await test_bed.publish(make_plan(local_node(near, "near"), *unhealthy, remote, backup_node))
            await test_bed.wait_for_session()
            assert test_bed.status.zone == "a"
            assert await nodes_of(test_bed, 30) == {"near": 30}
            # An overloaded zone uses all nodes but no backup nodes.
            await test_bed.publish(
                replace(
                    make_plan(local_node(near, "near"), remote, backup_node),
                    overloaded_zones=frozenset({("", "a")}),
                )
            )
            assert set(await nodes_of(test_bed, 30)) == {"near", "far"}
            local_session = test_bed.sessions[0]
            # The zone's only node is dead, but healthy in the plan. The remote node gets the clients.
            await test_bed.publish(
                make_plan(node_plan("near", dead, zone="a", local_weight=100), remote, backup_node)
            )
            assert await nodes_of(test_bed, 30) == {"far": 30}
            draining = replace(remote, eds_health=EdsHealth.DRAINING, weight=0)
            await test_bed.publish(make_plan(draining, backup_node))
            assert await nodes_of(test_bed, 10) == {"backup": 10}
            await test_bed.publish(make_plan(remote, backup_node))
            assert await nodes_of(test_bed, 10) == {"far": 10}
            assert await local_session.is_alive()
            assert await changed_or_removed(test_bed) == 0
