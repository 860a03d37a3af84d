"""`TidbCluster.restore` repairs the cluster between tests."""

from __future__ import annotations

import signal
import time
from typing import Any

from sandbox.server import http_client
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.tidb.global_variables import restoring_variables
from tests.support.tidb.sessions import connect_directly, query_rows, query_value
from tests.support.waiting import wait_until
from tests.tidb.conftest import NODES

_MAX_DDL_SECONDS = 20.0
"""Maximal seconds of a schema change, which waits until the lease of a killed DDL owner expires.

The sandbox sets this lease to 5 s. TiDB's default is 60 s.
"""


async def config(node: Tidb) -> dict[str, Any]:
    """Return the settings that a node reports."""
    async with http_client() as client:
        settings: dict[str, Any] = (await client.get(f"{node.status_url}/config")).raise_for_status().json()
        return settings


async def test_servers_are_restored_with_their_settings(cluster: TidbCluster) -> None:
    suspended, killed, reconfigured = cluster.tidb
    before = [await config(node) for node in cluster.tidb]
    reconfigured.graceful_wait = 0.0
    await reconfigured.restart()
    assert (await config(reconfigured))["graceful-wait-before-shutdown"] == 0
    await cluster.new_node().launch()
    suspended.process.send_signal(signal.SIGSTOP)
    await killed.kill()
    await cluster.pd.kill()
    await cluster.restore(NODES)
    assert [await config(node) for node in cluster.tidb] == before
    for node in cluster.tidb:
        with connect_directly(node) as connection:
            assert query_value(connection, "select 1") == 1


async def test_stopping_server_is_restarted(cluster: TidbCluster) -> None:
    node = cluster.tidb[0]
    process = node.process
    process.send_signal(signal.SIGTERM)

    async def is_shutting_down() -> bool:
        return not await node.is_serving()

    await wait_until(is_shutting_down)
    await cluster.restore(NODES)
    assert node.process is not process
    with connect_directly(node) as connection:
        assert query_value(connection, "select 1") == 1


async def test_schema_changes_work_soon_after_the_ddl_owner_was_killed(
    cluster: TidbCluster, database: str
) -> None:
    for node in cluster.tidb:
        await node.kill()
        await node.launch()
    started = time.monotonic()
    with connect_directly(cluster.tidb[0], database) as connection:
        query_rows(connection, "create table t (n int)")
    assert time.monotonic() - started < _MAX_DDL_SECONDS


async def test_global_variables_are_restored(cluster: TidbCluster) -> None:
    first, second, _ = cluster.tidb
    with connect_directly(first) as connection:
        before = query_value(connection, "select @@global.wait_timeout")
    async with restoring_variables(cluster) as variables:
        variables.set("wait_timeout", 77)
        variables.set("max_connections", 5, first)
        with connect_directly(second) as connection:
            assert query_value(connection, "select @@wait_timeout") == 77
            assert query_value(connection, "select @@global.max_connections") == 0
        with connect_directly(first) as connection:
            assert query_value(connection, "select @@global.max_connections") == 5
    with connect_directly(first) as connection:
        assert query_value(connection, "select @@wait_timeout") == before
        assert query_value(connection, "select @@global.max_connections") == 0
