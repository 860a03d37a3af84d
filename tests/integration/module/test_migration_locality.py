"""A draining node's sessions migrate to the nearest node, never to another group or an older release."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from controlplane import address as addresses
from sandbox.mariadb import MariaDb
from tests.support.migration.fleet import THREE_NODES, MigratingFleet, run_fleet
from tests.support.module.bootstrap import Host, live_config_file, publish_nodes
from tests.support.waiting import assert_never

OLAP = "tidb-olap"


async def test_sessions_of_a_draining_node_migrate_to_the_nearest_node(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_fleet(tmp_path, mariadb, specs=THREE_NODES, drained=[1, 2]) as fleet:
        first, near, backup = (Host(node.sql_address) for node in fleet.nodes)
        far = dataclasses.replace(backup, priority=2)
        clients = [await fleet.connect_driver() for _ in range(3)]
        await fleet.wait_session_counts(3, 0, 0)
        publish_nodes(fleet.endpoints, [draining(first), near, dataclasses.replace(far, weight=100)])
        await fleet.wait_session_counts(0, 3, 0)
        publish_nodes(fleet.endpoints, [draining(first), draining(near), far])
        await fleet.wait_session_counts(0, 0, 3)
        for client in clients:
            await client.ensure_closed()


async def test_no_session_migrates_to_an_older_release(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as fleet:
        newer, other = (Host(node.sql_address, version="v8.5.4") for node in fleet.nodes)
        older = dataclasses.replace(other, version="v8.5.3")
        client = await fleet.connect_driver()
        publish_nodes(fleet.endpoints, [draining(newer), older])
        await fleet.wait_stayed("no_node")
        assert fleet.sessions == [1, 0]
        publish_nodes(fleet.endpoints, [draining(newer), other])
        await fleet.wait_session_counts(0, 1)
        await client.ensure_closed()


async def test_priority_change_migrates_no_session_but_removal_does(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as fleet:
        first, second = (Host(node.sql_address) for node in fleet.nodes)
        clients = [await fleet.connect_driver() for _ in range(3)]
        await fleet.wait_session_counts(3, 0)
        for _ in range(3):
            publish_nodes(fleet.endpoints, [dataclasses.replace(first, priority=2), second])
            clients.append(await connect_on(fleet, 1))
            publish_nodes(fleet.endpoints, [first, dataclasses.replace(second, priority=1)])
            clients.append(await connect_on(fleet, 0))
        before = fleet.sessions
        await assert_never(lambda: fleet.sessions != before, 0.3)
        assert await fleet.count_migrations("moved", "ok") == 0
        publish_nodes(fleet.endpoints, [second])
        await fleet.wait_session_counts(0, sum(before))
        for client in clients:
            await client.ensure_closed()


async def connect_on(fleet: MigratingFleet, index: int) -> Any:
    """Connect until a session is on the node at `index`. Close sessions that reach another node."""
    while True:
        before = fleet.sessions
        client = await fleet.connect_driver()
        if fleet.sessions[index] > before[index]:
            return client
        await client.ensure_closed()
        await fleet.wait_session_counts(*before)


@asynccontextmanager
async def run_two_groups(directory: Path, mariadb: MariaDb) -> AsyncIterator[tuple[MigratingFleet, Path]]:
    """Run three nodes: the first serves the default group, and the third serves the group `olap`.

    Each group has its own listener. Yield the fleet and the endpoints file of `olap`.
    """
    endpoints = directory / "olap.json"

    def add_group(bootstrap: dict[str, Any]) -> None:
        static = bootstrap["static_resources"]
        ((cluster,), (listener,)) = (copy.deepcopy(static[kind]) for kind in ("clusters", "listeners"))
        cluster["name"], listener["name"] = OLAP, "sql-olap"
        source = cluster["eds_cluster_config"]["eds_config"]["path_config_source"]
        publish_nodes(endpoints, [Host(node_addresses(Path(source["path"]))[2])], "olap")
        source["path"] = str(endpoints)
        (policy,) = cluster["load_balancing_policy"]["policies"]
        policy["typed_extension_config"]["typed_config"]["lb_policy_config"]["value"]["group"] = "olap"
        (live_config,) = listener["listener_filters"]
        live_source = live_config["config_discovery"]["config_source"]["path_config_source"]
        live_source["path"] = str(live_config_file(endpoints))
        listener["filter_chains"][0]["filters"][1]["typed_config"]["cluster"] = OLAP
        static["clusters"].append(cluster)
        static["listeners"].append(listener)

    async with run_fleet(
        directory, mariadb, specs=THREE_NODES, drained=[1, 2], change_bootstrap=add_group
    ) as fleet:
        yield fleet, endpoints


def node_addresses(endpoints: Path) -> list[str]:
    (group,) = json.loads(endpoints.read_text())["resources"][0]["endpoints"]
    socket_addresses = [node["endpoint"]["address"]["socket_address"] for node in group["lb_endpoints"]]
    return [addresses.join(address["address"], address["port_value"]) for address in socket_addresses]


async def test_sessions_stay_within_their_group(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_two_groups(tmp_path, mariadb) as (fleet, olap_endpoints):
        first, second, third = (Host(node.sql_address) for node in fleet.nodes)
        clients = [await fleet.connect_driver() for _ in range(2)]
        clients += [await fleet.connect_driver(port=fleet.proxy.listeners["sql-olap"]) for _ in range(3)]
        await fleet.wait_session_counts(2, 0, 3)
        publish_nodes(fleet.endpoints, [draining(first), second])
        await fleet.wait_session_counts(0, 2, 3)
        # The second node changes its group, so its sessions migrate although the node is active.
        publish_nodes(fleet.endpoints, [first])
        publish_nodes(olap_endpoints, [second, draining(third)], "olap")
        await fleet.wait_session_counts(2, 3, 0)
        for client in clients:
            await client.ensure_closed()


def draining(host: Host) -> Host:
    return dataclasses.replace(host, state="draining")
