"""Where sessions go that have to leave: to nodes near by, and never to another group or an older release."""

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


async def test_sessions_that_have_to_leave_go_to_the_nearest_node(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, specs=THREE_NODES, drained=[1, 2]) as all_:
        first, near, backup = (Host(node.sql_address) for node in all_.nodes)
        far = dataclasses.replace(backup, priority=2)
        clients = [await all_.connect_driver() for _ in range(3)]
        await all_.wait_session_counts(3, 0, 0)
        publish_nodes(all_.endpoints, [left(first), near, dataclasses.replace(far, weight=100)])
        await all_.wait_session_counts(0, 3, 0)
        publish_nodes(all_.endpoints, [left(first), left(near), far])
        await all_.wait_session_counts(0, 0, 3)
        for client in clients:
            await client.ensure_closed()


async def test_no_session_goes_to_an_older_release(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as all_:
        newer, other = (Host(node.sql_address, version="v8.5.4") for node in all_.nodes)
        older = dataclasses.replace(other, version="v8.5.3")
        client = await all_.connect_driver()
        publish_nodes(all_.endpoints, [left(newer), older])
        await all_.wait_stayed("no_node")
        assert all_.sessions == [1, 0]
        publish_nodes(all_.endpoints, [left(newer), other])
        await all_.wait_session_counts(0, 1)
        await client.ensure_closed()


async def test_a_node_is_not_left_for_another_priority_but_when_it_is_named_no_more(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as all_:
        first, second = (Host(node.sql_address) for node in all_.nodes)
        clients = [await all_.connect_driver() for _ in range(3)]
        await all_.wait_session_counts(3, 0)
        for _ in range(3):
            publish_nodes(all_.endpoints, [dataclasses.replace(first, priority=2), second])
            clients.append(await led_to(all_, 1))
            publish_nodes(all_.endpoints, [first, dataclasses.replace(second, priority=1)])
            clients.append(await led_to(all_, 0))
        before = all_.sessions
        await assert_never(lambda: all_.sessions != before, 0.3)
        assert await all_.count_migrations("moved", "ok") == 0
        publish_nodes(all_.endpoints, [second])
        await all_.wait_session_counts(0, sum(before))
        for client in clients:
            await client.ensure_closed()


async def led_to(all_: MigratingFleet, position: int) -> Any:
    """A client on that node, once others are led there; those that were led elsewhere leave again."""
    while True:
        before = all_.sessions
        client = await all_.connect_driver()
        if all_.sessions[position] > before[position]:
            return client
        await client.ensure_closed()
        await all_.wait_session_counts(*before)


@asynccontextmanager
async def groups(directory: Path, mariadb: MariaDb) -> AsyncIterator[tuple[MigratingFleet, Path]]:
    """Three nodes, of which the first gets sessions, and the third those of another listener, for its group.

    With the file of that group's nodes.
    """
    endpoints = directory / "olap.json"

    def add(tree: dict[str, Any]) -> None:
        static = tree["static_resources"]
        ((cluster,), (listener,)) = (copy.deepcopy(static[kind]) for kind in ("clusters", "listeners"))
        cluster["name"], listener["name"] = OLAP, "sql-olap"
        source = cluster["eds_cluster_config"]["eds_config"]["path_config_source"]
        publish_nodes(endpoints, [Host(told(Path(source["path"]))[2])], "olap")
        source["path"] = str(endpoints)
        (policy,) = cluster["load_balancing_policy"]["policies"]
        policy["typed_extension_config"]["typed_config"]["lb_policy_config"]["value"]["group"] = "olap"
        (live,) = listener["listener_filters"]
        live_source = live["config_discovery"]["config_source"]["path_config_source"]
        live_source["path"] = str(live_config_file(endpoints))
        listener["filter_chains"][0]["filters"][1]["typed_config"]["cluster"] = OLAP
        static["clusters"].append(cluster)
        static["listeners"].append(listener)

    async with run_fleet(directory, mariadb, specs=THREE_NODES, drained=[1, 2], change_bootstrap=add) as all_:
        yield all_, endpoints


def told(endpoints: Path) -> list[str]:
    """The nodes that stand in such a file."""
    (group,) = json.loads(endpoints.read_text())["resources"][0]["endpoints"]
    known = [node["endpoint"]["address"]["socket_address"] for node in group["lb_endpoints"]]
    return [addresses.join(address["address"], address["port_value"]) for address in known]


async def test_sessions_stay_within_their_group(tmp_path: Path, mariadb: MariaDb) -> None:
    async with groups(tmp_path, mariadb) as (all_, olap):
        first, second, third = (Host(node.sql_address) for node in all_.nodes)
        clients = [await all_.connect_driver() for _ in range(2)]
        clients += [await all_.connect_driver(port=all_.proxy.listeners["sql-olap"]) for _ in range(3)]
        await all_.wait_session_counts(2, 0, 3)
        publish_nodes(all_.endpoints, [left(first), second])
        await all_.wait_session_counts(0, 2, 3)
        # The second node changes its group: its sessions leave it, although it serves others.
        publish_nodes(all_.endpoints, [first])
        publish_nodes(olap, [second, left(third)], "olap")
        await all_.wait_session_counts(2, 3, 0)
        for client in clients:
            await client.ensure_closed()


def left(host: Host) -> Host:
    return dataclasses.replace(host, state="draining")
