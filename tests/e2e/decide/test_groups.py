"""Groups and zones through Envoys with the module: sessions stay in their group, and move within it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from sandbox.local_cluster import Stack
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import greets
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.packets import Command
from tests.support.e2e.cluster import another_envoy, client, cluster, code, configure
from tests.support.e2e.sql_load import where
from tests.support.module.bootstrap import found

ANALYSTS = 6
PLACES: tuple[dict[str, str], ...] = (
    {},
    {"use": "olap", "zone": "a"},
    {"use": "olap", "zone": "b"},
    {"use": "olap", "role": "backup"},
)


async def test_sessions_stay_in_their_group_and_near_while_they_can(
    tmp_path: Path, mariadb: MariaDb, ports: Ports
) -> None:
    arguments = SessionCertificate.make(tmp_path).arguments
    settings = {
        "balance": {"slow_start": 0, "policy": "location"},
        "drain": {"fleet_return": 0},
        "backup": {"labels": {"role": "backup"}},
    }
    start = cluster(tmp_path / "stack", mariadb, nodes=4, arguments=arguments, settings=settings)
    async with start as stack, AsyncExitStack() as opened:
        plain, near, far, spare = (node.address for node in stack.tidb)
        for node, labels in zip(stack.tidb, PLACES, strict=True):
            change = await stack.api.patch(f"/v1/nodes/{node.address}", json={"labels": labels})
            change.raise_for_status()
        # The group comes to an Envoy that serves already.
        olap = ports.take()
        await configure(stack, groups=[group(olap)])
        await stack.wait_until(lambda: greets(olap), "the group's port")
        assert {await where(stack.sql_port) for _ in range(6)} == {port_of(plain)}
        assert {await where(olap) for _ in range(12)} == {port_of(near), port_of(far)}

        start_another = another_envoy(stack, "envoy-2", module=found(), group="olap", zone="a")
        there = await opened.enter_async_context(start_another)
        clients = [await opened.enter_async_context(client(there)) for _ in range(ANALYSTS)]
        for each in clients:
            assert code(await each.enter()) == 0
        await shared_out(stack, {plain: 0, near: ANALYSTS, far: 0, spare: 0})
        # Who stands in takes sessions only when nobody else of the group is left.
        await drain(stack, near)
        await shared_out(stack, {plain: 0, near: 0, far: ANALYSTS, spare: 0})
        await drain(stack, far)
        await shared_out(stack, {plain: 0, near: 0, far: 0, spare: ANALYSTS})
        for each in clients:
            assert code(await each.command(Command.PING)) == 0
        (await stack.api.post(f"/v1/nodes/{near}/undrain")).raise_for_status()

        async def is_near_again() -> bool:
            return await where(there) == port_of(near)

        await stack.wait_until(is_near_again, "the node nearby to take sessions")


def group(port: int) -> dict[str, Any]:
    return {"name": "olap", "listen": f"127.0.0.1:{port}", "labels": {"use": "olap"}}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def drain(stack: Stack, address: str) -> None:
    (await stack.api.post(f"/v1/nodes/{address}/drain")).raise_for_status()


async def shared_out(stack: Stack, expected: Mapping[str, int]) -> None:
    """Wait until each node has so many sessions."""

    async def is_so() -> bool:
        return {address: node["sessions"] for address, node in (await stack.nodes()).items()} == expected

    await stack.wait_until(is_so, f"sessions as {dict(expected)}")
