"""Groups and zones through Envoys with the module: sessions stay in their group and migrate within it."""

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
    reload_settings,
    run_another_envoy,
    run_cluster,
)
from tests.support.e2e.sql_load import node_port_of_new_session
from tests.support.module.bootstrap import require_module
from tests.support.tidb_sim_clients import error_code

ANALYSTS = 6
NODE_LABELS: tuple[dict[str, str], ...] = (
    {},
    {"use": "olap", "zone": "a"},
    {"use": "olap", "zone": "b"},
    {"use": "olap", "role": "backup"},
)


async def test_sessions_stay_in_their_group_and_zone_while_possible(
    tmp_path: Path, mariadb: MariaDb, ports: Ports
) -> None:
    arguments = SessionCertificate.load_or_create(tmp_path).arguments
    settings = {
        "balance": {"slow_start": 0, "policy": "location"},
        "drain": {"reconnect_grace": 0},
        "backup": {"labels": {"role": "backup"}},
    }
    cluster = run_cluster(tmp_path / "stack", mariadb, nodes=4, arguments=arguments, settings=settings)
    async with cluster as stack, AsyncExitStack() as exit_stack:
        default, near, far, backup = (node.address for node in stack.tidb)
        for node, labels in zip(stack.tidb, NODE_LABELS, strict=True):
            response = await stack.api.patch(f"/v1/nodes/{node.address}", json={"labels": labels})
            response.raise_for_status()
        # The group is added to an Envoy that already serves.
        olap_port = ports.allocate()
        await reload_settings(stack, groups=[group(olap_port)])
        await stack.wait_until(lambda: sends_mysql_greeting(olap_port), "the group's port")
        assert {await node_port_of_new_session(stack.sql_port) for _ in range(6)} == {port_of(default)}
        assert {await node_port_of_new_session(olap_port) for _ in range(12)} == {port_of(near), port_of(far)}

        start_another = run_another_envoy(stack, "envoy-2", module=require_module(), group="olap", zone="a")
        zone_port = await exit_stack.enter_async_context(start_another)
        clients = [await exit_stack.enter_async_context(counting_client(zone_port)) for _ in range(ANALYSTS)]
        for client in clients:
            assert error_code(await client.log_in()) == 0
        await wait_session_counts(stack, {default: 0, near: ANALYSTS, far: 0, backup: 0})
        # The backup node gets sessions only when no other node of the group is left.
        await drain(stack, near)
        await wait_session_counts(stack, {default: 0, near: 0, far: ANALYSTS, backup: 0})
        await drain(stack, far)
        await wait_session_counts(stack, {default: 0, near: 0, far: 0, backup: ANALYSTS})
        for client in clients:
            assert error_code(await client.send_command(MySqlCommand.PING)) == 0
        (await stack.api.post(f"/v1/nodes/{near}/undrain")).raise_for_status()

        async def is_near_used() -> bool:
            return await node_port_of_new_session(zone_port) == port_of(near)

        await stack.wait_until(is_near_used, "the near node to get sessions")


def group(port: int) -> dict[str, Any]:
    return {"name": "olap", "listen": f"127.0.0.1:{port}", "labels": {"use": "olap"}}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def drain(stack: LocalCluster, address: str) -> None:
    (await stack.api.post(f"/v1/nodes/{address}/drain")).raise_for_status()


async def wait_session_counts(stack: LocalCluster, expected: Mapping[str, int]) -> None:
    async def is_reached() -> bool:
        return {address: node["sessions"] for address, node in (await stack.nodes()).items()} == expected

    await stack.wait_until(is_reached, f"sessions as {dict(expected)}")
