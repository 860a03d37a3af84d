"""A real Envoy with groups of nodes, zones and backup nodes."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from controlplane.model.plan import EdsHealth, NodePlan
from sandbox.ports import Ports
from tests.support.controlplane.xds_server import (
    StartEnvoy,
    XdsRig,
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_rig,
)
from tests.support.fake_servers import FakeServer, refusing_port
from tests.support.waiting import wait_until


@pytest.fixture(params=[False, True], ids=["sotw", "delta"])
def delta(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def node_plan(name: str, endpoint: str, **fields: Any) -> NodePlan:
    return replace(
        make_node_plan(f"{name}:4000", endpoint, fields.pop("eds_health", EdsHealth.HEALTHY)), **fields
    )


def group(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "listen": f"127.0.0.1:{port}", "labels": {"use": name}}


async def changed_or_removed(parts: XdsRig) -> int:
    """Return how many listeners and clusters were changed or removed."""
    counters = await parts.envoy.stats(
        "^(listener_manager.listener|cluster_manager.cluster)_(modified|removed)$"
    )
    assert len(counters) == 4
    return sum(counters.values())


async def nodes_of(parts: XdsRig, count: int) -> Counter[str]:
    """Return the nodes of `count` new connections."""
    return Counter([(await parts.connect()).node for _ in range(count)])


async def test_groups_are_added_and_removed_without_ending_sessions(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    first, second = group("olap", ports.allocate()), group("fast", ports.allocate())
    olap, fast = (int(group_["listen"].rpartition(":")[2]) for group_ in (first, second))
    async with (
        run_echo_servers("a", "b", "c") as (a, b, c),
        run_xds_rig(ports, envoy_process, delta=delta) as parts,
    ):
        nodes = make_plan(
            node_plan("a", a.endpoint),
            node_plan("b", b.endpoint, group="olap"),
            node_plan("c", c.endpoint, group="fast"),
        )
        await parts.publish(nodes)
        session = await parts.wait_for_session()
        parts.server.configure(parts.with_settings({"groups": [first]}))
        assert (await parts.wait_for_session(port=olap)).node == "b"
        olap_session = parts.sessions[-1]
        assert await nodes_of(parts, 4) == {"a": 4}
        # Also after a restart of the control plane, which knows only what the Envoy reports.
        parts.settings = parts.with_settings({"groups": [first, second]})
        await parts.restart_server(nodes)
        assert (await parts.wait_for_session(port=fast)).node == "c"
        await wait_until(parts.is_acked)
        assert parts.status.stale_resources == ()
        # The port of a removed group stays, without nodes.
        parts.server.configure(parts.with_settings({"groups": [second]}))
        await wait_until(lambda: parts.status.stale_resources == ("cluster", "listener"))
        await wait_until(parts.is_acked)
        assert (await parts.connect(port=olap)).node == ""
        assert (await parts.connect(port=fast)).node == "c"
        assert await session.is_alive()
        assert await olap_session.is_alive()
        assert await changed_or_removed(parts) == 0


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
            run_xds_rig(ports, envoy_process, delta=delta, settings={"groups": groups}) as parts,
        ):
            parts.server.publish(
                make_plan(node_plan("a", a.endpoint), node_plan("b", b.endpoint, group="olap"))
            )
            session = await parts.wait_for_session()
            assert (await parts.wait_for_session(port=olap_port)).node == "b"
            nack = parts.status.last_nack
            assert nack is not None
            assert "sql-a-taken" in nack.message
            assert (parts.status.nacks, "envoy.filter_fallback" in parts.event_kinds()) == (1, False)
            assert not parts.is_acked()
            assert await session.is_alive()
            assert await changed_or_removed(parts) == 0


async def test_envoy_of_one_group_serves_only_that_group(ports: Ports, envoy_process: StartEnvoy) -> None:
    group_port = ports.allocate()
    groups = [group("olap", group_port)]
    async with (
        run_echo_servers("a", "b") as (a, b),
        run_xds_rig(ports, envoy_process, settings={"groups": groups}, group="olap") as parts,
    ):
        await parts.publish(make_plan(node_plan("a", a.endpoint), node_plan("b", b.endpoint, group="olap")))
        assert (await parts.wait_for_session()).node == "b"
        assert await nodes_of(parts, 4) == {"b": 4}
        with pytest.raises(ConnectionRefusedError):
            await parts.connect(port=group_port)
        session = parts.sessions[0]
        parts.server.configure(parts.with_settings({"groups": []}))
        await wait_until(lambda: parts.status.problem.startswith("its listener has no nodes"))
        await wait_until(lambda: parts.status.eds_acked)
        assert (await parts.connect()).node == ""
        assert await session.is_alive()


async def test_envoy_of_unknown_group_waits_for_the_group(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with (
        run_echo_servers("b") as (b,),
        run_xds_rig(ports, envoy_process, delta=delta, group="olap") as parts,
    ):
        parts.server.publish(make_plan(node_plan("b", b.endpoint, group="olap")))
        await wait_until(lambda: "envoy.problem" in parts.event_kinds())
        problem = "it gets no configuration, because no group in the settings is named olap"
        assert parts.status.problem == problem
        assert (parts.status.group, parts.is_acked()) == ("olap", False)
        with pytest.raises(ConnectionRefusedError):
            await parts.connect()
        parts.server.configure(parts.with_settings({"groups": [group("olap", ports.allocate())]}))
        assert (await parts.wait_for_session()).node == "b"
        assert parts.status.problem == ""


def local_node(peer: FakeServer, name: str, **fields: Any) -> NodePlan:
    return node_plan(name, peer.endpoint, zone="a", local_weight=100, **fields)


async def test_envoy_prefers_local_then_remote_then_backup_nodes(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        run_echo_servers("near", "far", "backup") as (near, far, backup),
        run_xds_rig(ports, envoy_process, zone="a") as parts,
    ):
        with refusing_port() as dead:
            remote = node_plan("far", far.endpoint, zone="b")
            backup_node = node_plan("backup", backup.endpoint, backup=True)
            # One node of twelve is enough for the zone.
            unhealthy = [
                local_node(near, f"unhealthy-{n}", eds_health=EdsHealth.UNHEALTHY) for n in range(11)
            ]
            unhealthy = [replace(plan, endpoint=f"127.0.0.2:{n + 1}") for n, plan in enumerate(unhealthy)]
            await parts.publish(make_plan(local_node(near, "near"), *unhealthy, remote, backup_node))
            await parts.wait_for_session()
            assert parts.status.zone == "a"
            assert await nodes_of(parts, 30) == {"near": 30}
            # An overloaded zone uses all nodes but no backup nodes.
            await parts.publish(
                replace(
                    make_plan(local_node(near, "near"), remote, backup_node),
                    overloaded_zones=frozenset({("", "a")}),
                )
            )
            assert set(await nodes_of(parts, 30)) == {"near", "far"}
            local_session = parts.sessions[0]
            # The nodes of the zone are dead, but not detected as such: remote nodes get the clients.
            await parts.publish(
                make_plan(node_plan("near", dead, zone="a", local_weight=100), remote, backup_node)
            )
            assert await nodes_of(parts, 30) == {"far": 30}
            draining = replace(remote, eds_health=EdsHealth.DRAINING, weight=0)
            await parts.publish(make_plan(draining, backup_node))
            assert await nodes_of(parts, 10) == {"backup": 10}
            await parts.publish(make_plan(remote, backup_node))
            assert await nodes_of(parts, 10) == {"far": 10}
            assert await local_session.is_alive()
            assert await changed_or_removed(parts) == 0
