"""Balancing by facts of real servers: their load, their memory limit, and the labels of their settings."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.ports import Ports
from sandbox.server import sends_mysql_greeting
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from sandbox.tidb_servers import TidbServer
from tests.support.tidb.global_variables import GlobalVariables
from tests.support.tidb.node_operations import wait_for_state
from tests.support.tidb.sessions import (
    TrackedSessions,
    connect,
    connect_directly,
    query_rows,
    session_port,
)

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

    def run_queries() -> None:
        with connect_directly(node) as connection:
            while not stopped.is_set():
                query_rows(connection, _BUSY_QUERY)

    with ThreadPoolExecutor() as threads:
        queries = [threads.submit(run_queries) for _ in range(LOAD_THREADS)]
        try:
            yield
        finally:
            stopped.set()
    for query in queries:
        query.result()


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

            async def have_envoys_smaller_share() -> bool:
                node = (await stack.api.get(f"/v1/nodes/{busy.address}")).raise_for_status().json()
                (cpu,) = (factor for factor in node["explanation"]["factors"] if factor["name"] == "cpu")
                (envoy,) = (await stack.api.get("/v1/envoys")).raise_for_status().json()["envoys"]
                is_applied = envoy["acked_version"] == envoy["published_version"]
                return cpu["share"] is not None and cpu["share"] <= MAX_SHARE and is_applied

            await stack.wait_until(have_envoys_smaller_share, "a smaller share", _TIMEOUT_SECONDS)
            nodes = await stack.nodes()
            assert nodes[busy.address]["state"] == "active"
            cpu = {address: node["metrics"]["cpu"] for address, node in nodes.items()}
            assert cpu.pop(busy.address) > 2 * max(cpu.values())
            with closing(TrackedSessions(stack, None)) as sessions:
                opened = [sessions.through_envoy() for _ in range(NEW_SESSIONS)]
                ports = Counter(map(session_port, opened))
            # By its share of 0.5, it would get a fifth instead of a third.
            assert ports[busy.port] <= NEW_SESSIONS / 4, ports


async def test_settings_that_change_while_servers_run_change_no_share(
    tmp_path: Path, cluster: TidbCluster, global_variables: GlobalVariables
) -> None:
    settings = {"balance": {"metrics": {"interval": METRICS_INTERVAL_SECONDS}}}
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:

        async def measured_at() -> list[datetime]:
            nodes = (await stack.nodes()).values()
            return [
                datetime.fromisoformat(node["metrics"]["at"])
                for node in nodes
                if node["metrics"]["cpu"] is not None
            ]

        async def are_known() -> bool:
            return len(await measured_at()) == len(stack.tidb)

        await stack.wait_until(are_known, "metrics of all nodes", 30.0)
        before = await weights(stack)
        for name, value in CHANGED_SETTINGS.items():
            global_variables.set(name, value)
        changed_at = datetime.now(UTC)

        async def are_newer() -> bool:
            return min(await measured_at()) > changed_at + timedelta(seconds=3)

        await stack.wait_until(are_newer, "later metrics", 30.0)
        nodes = (await stack.nodes()).values()
        assert {node["state"] for node in nodes} == {"active"}
        assert await weights(stack) == before
        assert {node["migration_blockers"] == [] for node in nodes} == {True}


async def weights(stack: LocalCluster) -> dict[str, int]:
    """Return the weights that Envoys get, by address."""
    return {address: node["published_weight"] for address, node in (await stack.nodes()).items()}


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
            # A node is active shortly before Envoy has its endpoint.
            await stack.wait_until(lambda: sends_mysql_greeting(olap_port), "a greeting for the group")
            with closing(connect(olap_port)) as session:
                assert session_port(session) == labelled.port
            with closing(TrackedSessions(stack, None)) as sessions:
                used_ports = {session_port(sessions.through_envoy()) for _ in range(12)}
                assert labelled.port not in used_ports
