"""Balancing by facts of real servers: their load, their memory limit, and the labels of their settings."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pymysql
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.ports import Ports
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from sandbox.tidb_servers import TidbServer
from tests.support.tidb.global_variables import GlobalVariables
from tests.support.tidb.node_operations import wait_for_state
from tests.support.tidb.sessions import connect, connect_directly, query_rows, query_value, session_port

LOAD_THREADS = 3
NEW_SESSIONS = 60
MAX_SHARE = 0.5
METRICS_INTERVAL_SECONDS = 1.0
CHANGED_SETTINGS = {
    "tidb_server_memory_limit": "2GB",
    "tidb_enable_resource_control": "off",
    "tidb_enable_slow_log": "off",
    "tidb_enable_prepared_plan_cache": "off",
    "max_connections": 100,
}
_BUSY_QUERY = "select benchmark(2000000, md5('busy'))"
_TIMEOUT_SECONDS = 90.0
"""CPU is measured over 30 s, and the share falls slowly."""


@contextmanager
def keep_busy(node: Tidb) -> Iterator[None]:
    """Run expensive queries at a node, past Envoy."""
    stopped = threading.Event()

    def run_queries(connection: Any) -> None:
        with suppress(pymysql.MySQLError, OSError):  # killed at the end
            while not stopped.is_set():
                query_rows(connection, _BUSY_QUERY)

    connections = [connect_directly(node) for _ in range(LOAD_THREADS)]
    ids = [query_value(connection, "select connection_id()") for connection in connections]
    threads = [threading.Thread(target=run_queries, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        with closing(connect_directly(node)) as root:
            for id_ in ids:
                query_rows(root, f"kill tidb {id_}")
        for thread in threads:
            thread.join()


@pytest.mark.timeout(240)
async def test_server_that_is_busy_with_other_work_gets_fewer_sessions(
    tmp_path: Path, cluster: TidbCluster
) -> None:
    settings = {
        "balance": {"metrics": {"interval": METRICS_INTERVAL_SECONDS}, "slow_start": 0},
        "rebalance": {"enabled": False},
    }
    busy = cluster.tidb[1]
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
        with keep_busy(busy):

            async def has_smaller_share() -> bool:
                node = (await stack.api.get(f"/v1/nodes/{busy.address}")).raise_for_status().json()
                (cpu,) = (factor for factor in node["explanation"]["factors"] if factor["name"] == "cpu")
                return cpu["share"] is not None and bool(cpu["share"] <= MAX_SHARE)

            await stack.wait_until(has_smaller_share, "a smaller share of the busy node", _TIMEOUT_SECONDS)
            nodes = await stack.nodes()
            assert nodes[busy.address]["state"] == "active"
            cpu = {address: node["metrics"]["cpu"] for address, node in nodes.items()}
            assert cpu.pop(busy.address) > 2 * max(cpu.values())
            sessions = [connect(stack.sql_port) for _ in range(NEW_SESSIONS)]
            ports = Counter(session_port(session) for session in sessions)
            for session in sessions:
                session.close()
            # By its share of 0.5, it would get a fifth instead of a third.
            assert ports[busy.port] <= NEW_SESSIONS / 4, ports


async def test_settings_that_change_while_servers_run_change_no_share(
    tmp_path: Path, cluster: TidbCluster, global_variables: GlobalVariables
) -> None:
    settings = {"balance": {"metrics": {"interval": METRICS_INTERVAL_SECONDS}}}
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:

        async def measured_at() -> list[datetime]:
            nodes = (await stack.nodes()).values()
            return [datetime.fromisoformat(node["metrics"]["at"]) for node in nodes if node["metrics"]["cpu"]]

        async def are_known() -> bool:
            return len(await measured_at()) == len(stack.tidb)

        await stack.wait_until(are_known, "metrics of all nodes", 30.0)
        for name, value in CHANGED_SETTINGS.items():
            global_variables.set(name, value)
        changed_at = datetime.now(UTC)

        async def are_newer() -> bool:
            return min(await measured_at()) > changed_at + timedelta(seconds=3)

        await stack.wait_until(are_newer, "later metrics", 30.0)
        nodes = (await stack.nodes()).values()
        assert {node["state"] for node in nodes} == {"active"}
        assert len({node["published_weight"] for node in nodes}) == 1
        assert {node["migration_blockers"] == [] for node in nodes} == {True}


async def test_labels_in_the_configuration_of_tidb_select_group_and_zone(
    tmp_path: Path, cluster: TidbCluster
) -> None:
    with Ports() as ports:
        olap_port = ports.allocate()
        settings = {
            "groups": [{"name": "olap", "listen": f"127.0.0.1:{olap_port}", "labels": {"use": "olap"}}]
        }
        async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
            labelled = cluster.new_node()
            assert isinstance(labelled, TidbServer)
            labelled.labels = {"use": "olap", "zone": "a"}
            await labelled.launch()
            await wait_for_state(stack, labelled, "active")
            node = (await stack.nodes())[labelled.address]
            assert (node["labels"], node["group"], node["zone"]) == (labelled.labels, "olap", "a")
            in_group = [connect(olap_port) for _ in range(3)]
            in_default_group = [connect(stack.sql_port) for _ in range(12)]
            assert {session_port(session) for session in in_group} == {labelled.port}
            assert labelled.port not in {session_port(session) for session in in_default_group}
            for session in in_group + in_default_group:
                session.close()
