"""Logins on real servers: clients that compress, and clients that send nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb_cluster import TidbCluster
from tests.support.clients.client_builds import ALWAYS_COMPRESSING, CLIENTS, MatrixClient
from tests.support.clients.runner import SMALL_SIZE, MatrixTarget, run_client
from tests.support.clients.server import DATABASE, MAIN_ACCOUNT
from tests.support.tidb.node_operations import wait_until_can_log_in
from tests.support.tidb.sessions import connect_directly
from tests.support.waiting import assert_nothing_received

_STEPS = ("login", "query_text", "query_prepared", "multi", "blob_text")

compressing_clients = pytest.mark.parametrize(
    "client",
    [client for client in CLIENTS if client.name in ALWAYS_COMPRESSING],
    ids=lambda client: client.name,
)


@pytest.fixture
async def account(cluster: TidbCluster) -> AsyncIterator[None]:
    """Create the account and the database of the client matrix."""
    with connect_directly(cluster.tidb[0]) as connection, connection.cursor() as cursor:
        cursor.execute(f"create database {DATABASE}")
        cursor.execute("create user %s@'%%' identified by %s", (MAIN_ACCOUNT.user, MAIN_ACCOUNT.password))
        cursor.execute(f"grant all on {DATABASE}.* to %s@'%%'", (MAIN_ACCOUNT.user,))
        await wait_until_can_log_in(cluster.tidb, MAIN_ACCOUNT.user, MAIN_ACCOUNT.password)
        yield
        cursor.execute(f"drop database {DATABASE}")
        cursor.execute("drop user %s@'%%'", (MAIN_ACCOUNT.user,))


@compressing_clients
@pytest.mark.usefixtures("account")
async def test_compressing_php_client_receives_the_reason(
    client: MatrixClient, stack: LocalCluster, tmp_path: Path
) -> None:
    server = MatrixTarget("a server", stack.tidb[0].port)
    outcomes = await run_client(client, server, tmp_path, size=SMALL_SIZE, steps=_STEPS, compress=True)
    assert all(outcome.is_ok for outcome in outcomes), outcomes
    envoy = MatrixTarget("Envoy", stack.sql_port)
    (login,) = await run_client(client, envoy, tmp_path, steps=["login"], compress=True)
    assert login.is_ok is False
    assert "1235" in login.detail
    assert "sql.compression" in login.detail


@pytest.mark.usefixtures("account")
async def test_compressing_php_client_works_with_passthrough(cluster: TidbCluster, tmp_path: Path) -> None:
    settings = {"sql": {"compression": "passthrough"}}
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
        for client in CLIENTS:
            if client.name in ALWAYS_COMPRESSING:
                envoy = MatrixTarget("Envoy", stack.sql_port)
                outcomes = await run_client(
                    client, envoy, tmp_path, size=SMALL_SIZE, steps=_STEPS, compress=True
                )
                assert all(outcome.is_ok for outcome in outcomes), outcomes


async def test_tidevoy_times_out_a_silent_login_before_tidb(cluster: TidbCluster, tmp_path: Path) -> None:
    settings = {"sql": {"login_timeout": 1.0}}
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
        server, to_server = await asyncio.open_connection("127.0.0.1", cluster.tidb[0].port)
        envoy, to_envoy = await asyncio.open_connection("127.0.0.1", stack.sql_port)
        async with asyncio.timeout(20):
            length = int.from_bytes((await server.readexactly(4))[:3], "little")
            assert (await server.readexactly(length))[0] == 10
            received = await envoy.read()
        # Envoy sends error 1159 after the greeting. The server sends nothing, and does not disconnect.
        assert re.search(rb"\xff\x87\x04Tidevoy: the login took too long", received)
        await assert_nothing_received(server, 0.1)
        to_server.close()
        to_envoy.close()
