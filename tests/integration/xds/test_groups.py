"""A real Envoy with groups of nodes, zones and nodes that stand in."""

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


def named(name: str, endpoint: str, **place: Any) -> NodePlan:
    return replace(
        make_node_plan(f"{name}:4000", endpoint, place.pop("eds_health", EdsHealth.HEALTHY)), **place
    )


def group(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "listen": f"127.0.0.1:{port}", "labels": {"use": name}}


async def disturbed(parts: XdsRig) -> int:
    """How many listeners and clusters were changed or taken away."""
    changed = await parts.envoy.stats(
        "^(listener_manager.listener|cluster_manager.cluster)_(modified|removed)$"
    )
    assert len(changed) == 4
    return sum(changed.values())


async def nodes_of(parts: XdsRig, count: int) -> Counter[str]:
    """The nodes of so many new connections."""
    return Counter([(await parts.connect()).node for _ in range(count)])


async def test_groups_come_to_an_envoy_that_runs_and_go_and_no_session_notices(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    first, second = group("olap", ports.allocate()), group("fast", ports.allocate())
    olap, fast = (int(each["listen"].rpartition(":")[2]) for each in (first, second))
    async with (
        run_echo_servers("a", "b", "c") as (a, b, c),
        run_xds_rig(ports, envoy_process, delta=delta) as parts,
    ):
        nodes = make_plan(
            named("a", a.endpoint),
            named("b", b.endpoint, group="olap"),
            named("c", c.endpoint, group="fast"),
        )
        await parts.publish(nodes)
        session = await parts.wait_for_session()
        parts.server.configure(parts.with_settings({"groups": [first]}))
        assert (await parts.wait_for_session(port=olap)).node == "b"
        analyst = parts.sessions[-1]
        assert await nodes_of(parts, 4) == {"a": 4}
        # Also by a control plane that knows of the Envoy only what it says itself.
        parts.settings = parts.with_settings({"groups": [first, second]})
        await parts.restart_server(nodes)
        assert (await parts.wait_for_session(port=fast)).node == "c"
        await wait_until(parts.is_acked)
        assert parts.status.stale_resources == ()
        # Of a group that is no more the port stays, and leads nowhere.
        parts.server.configure(parts.with_settings({"groups": [second]}))
        await wait_until(lambda: parts.status.stale_resources == ("cluster", "listener"))
        await wait_until(parts.is_acked)
        assert (await parts.connect(port=olap)).node == ""
        assert (await parts.connect(port=fast)).node == "c"
        assert await session.is_alive()
        assert await analyst.is_alive()
        assert await disturbed(parts) == 0


async def test_a_port_that_cannot_be_opened_keeps_no_other_group_waiting(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    later = ports.allocate()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        groups = [group("a-taken", taken.getsockname()[1]), group("olap", later)]
        async with (
            run_echo_servers("a", "b") as (a, b),
            run_xds_rig(ports, envoy_process, delta=delta, settings={"groups": groups}) as parts,
        ):
            parts.server.publish(make_plan(named("a", a.endpoint), named("b", b.endpoint, group="olap")))
            session = await parts.wait_for_session()
            assert (await parts.wait_for_session(port=later)).node == "b"
            nack = parts.status.last_nack
            assert nack is not None
            assert "sql-a-taken" in nack.message
            assert (parts.status.nacks, "envoy.filter_fallback" in parts.event_kinds()) == (1, False)
            assert not parts.is_acked()
            assert await session.is_alive()
            assert await disturbed(parts) == 0


async def test_an_envoy_of_one_group_serves_that_alone(ports: Ports, envoy_process: StartEnvoy) -> None:
    other = ports.allocate()
    groups = [group("olap", other)]
    async with (
        run_echo_servers("a", "b") as (a, b),
        run_xds_rig(ports, envoy_process, settings={"groups": groups}, group="olap") as parts,
    ):
        await parts.publish(make_plan(named("a", a.endpoint), named("b", b.endpoint, group="olap")))
        assert (await parts.wait_for_session()).node == "b"
        assert await nodes_of(parts, 4) == {"b": 4}
        with pytest.raises(ConnectionRefusedError):
            await parts.connect(port=other)
        session = parts.sessions[0]
        parts.server.configure(parts.with_settings({"groups": []}))
        await wait_until(lambda: parts.status.problem.startswith("what it has leads nowhere"))
        await wait_until(lambda: parts.status.eds_acked)
        assert (await parts.connect()).node == ""
        assert await session.is_alive()


async def test_an_envoy_of_an_unknown_group_gets_nothing_until_there_is_one(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with (
        run_echo_servers("b") as (b,),
        run_xds_rig(ports, envoy_process, delta=delta, group="olap") as parts,
    ):
        parts.server.publish(make_plan(named("b", b.endpoint, group="olap")))
        await wait_until(lambda: "envoy.problem" in parts.event_kinds())
        assert parts.status.problem == "it gets nothing, because no group of the settings has the name olap"
        assert (parts.status.group, parts.is_acked()) == ("olap", False)
        with pytest.raises(ConnectionRefusedError):
            await parts.connect()
        parts.server.configure(parts.with_settings({"groups": [group("olap", ports.allocate())]}))
        assert (await parts.wait_for_session()).node == "b"
        assert parts.status.problem == ""


def here(peer: FakeServer, name: str, **place: Any) -> NodePlan:
    return named(name, peer.endpoint, zone="a", local_weight=100, **place)


async def test_an_envoy_keeps_to_its_zone_and_then_to_all_and_at_last_to_those_that_stand_in(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        run_echo_servers("near", "far", "backup") as (near, far, backup),
        run_xds_rig(ports, envoy_process, zone="a") as parts,
    ):
        with refusing_port() as dead:
            away = named("far", far.endpoint, zone="b")
            spare = named("backup", backup.endpoint, backup=True)
            # One node of twelve is enough for the zone.
            gone = [here(near, f"gone-{n}", eds_health=EdsHealth.UNHEALTHY) for n in range(11)]
            gone = [replace(each, endpoint=f"127.0.0.2:{n + 1}") for n, each in enumerate(gone)]
            await parts.publish(make_plan(here(near, "near"), *gone, away, spare))
            await parts.wait_for_session()
            assert parts.status.zone == "a"
            assert await nodes_of(parts, 30) == {"near": 30}
            # A full zone shares out to all, which is no reason to use those that stand in.
            await parts.publish(
                replace(make_plan(here(near, "near"), away, spare), overloaded_zones=frozenset({("", "a")}))
            )
            assert set(await nodes_of(parts, 30)) == {"near", "far"}
            local = parts.sessions[0]
            # Its nodes are dead and nobody has noticed: those elsewhere take their clients.
            await parts.publish(make_plan(named("near", dead, zone="a", local_weight=100), away, spare))
            assert await nodes_of(parts, 30) == {"far": 30}
            down = replace(away, eds_health=EdsHealth.DRAINING, weight=0)
            await parts.publish(make_plan(down, spare))
            assert await nodes_of(parts, 10) == {"backup": 10}
            await parts.publish(make_plan(away, spare))
            assert await nodes_of(parts, 10) == {"far": 10}
            assert await local.is_alive()
            assert await disturbed(parts) == 0
