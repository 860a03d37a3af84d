"""Groups and zones through Envoys with the module: sessions stay in their group, and move within it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import sends_mysql_greeting
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.e2e.cluster import (
    counting_client,
    error_code,
    reload_settings,
    run_another_envoy,
    run_cluster,
)
from tests.support.e2e.sql_load import find_serving_port
from tests.support.module.bootstrap import require_module

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
    arguments = SessionCertificate.load_or_create(tmp_path).arguments
    settings = {
        "balance": {"slow_start": 0, "policy": "location"},
        "drain": {"fleet_return": 0},
        "backup": {"labels": {"role": "backup"}},
    }
    start = run_cluster(tmp_path / "stack", mariadb, nodes=4, arguments=arguments, settings=settings)
    async with start as stack, AsyncExitStack() as opened:
        plain, near, far, spare = (node.address for node in stack.tidb)
        for node, labels in zip(stack.tidb, PLACES, strict=True):
            change = await stack.api.patch(f"/v1/nodes/{node.address}", json={"labels": labels})
            change.raise_for_status()
        # The group comes to an Envoy that serves already.
        olap = ports.allocate()
        await reload_settings(stack, groups=[group(olap)])
        await stack.wait_until(lambda: sends_mysql_greeting(olap), "the group's port")
        assert {await find_serving_port(stack.sql_port) for _ in range(6)} == {port_of(plain)}
        assert {await find_serving_port(olap) for _ in range(12)} == {port_of(near), port_of(far)}

        start_another = run_another_envoy(stack, "envoy-2", module=require_module(), group="olap", zone="a")
        there = await opened.enter_async_context(start_another)
        clients = [await opened.enter_async_context(counting_client(there)) for _ in range(ANALYSTS)]
        for each in clients:
            assert error_code(await each.log_in()) == 0
        await shared_out(stack, {plain: 0, near: ANALYSTS, far: 0, spare: 0})
        # Who stands in takes sessions only when nobody else of the group is left.
        await drain(stack, near)
        await shared_out(stack, {plain: 0, near: 0, far: ANALYSTS, spare: 0})
        await drain(stack, far)
        await shared_out(stack, {plain: 0, near: 0, far: 0, spare: ANALYSTS})
        for each in clients:
            assert error_code(await each.send_command(MySqlCommand.PING)) == 0
        (await stack.api.post(f"/v1/nodes/{near}/undrain")).raise_for_status()

        async def is_near_again() -> bool:
            return await find_serving_port(there) == port_of(near)

        await stack.wait_until(is_near_again, "the node nearby to take sessions")


def group(port: int) -> dict[str, Any]:
    return {"name": "olap", "listen": f"127.0.0.1:{port}", "labels": {"use": "olap"}}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def drain(stack: LocalCluster, address: str) -> None:
    (await stack.api.post(f"/v1/nodes/{address}/drain")).raise_for_status()


async def shared_out(stack: LocalCluster, expected: Mapping[str, int]) -> None:
    """Wait until each node has so many sessions."""

    async def is_so() -> bool:
        return {address: node["sessions"] for address, node in (await stack.nodes()).items()} == expected

    await stack.wait_until(is_so, f"sessions as {dict(expected)}")
