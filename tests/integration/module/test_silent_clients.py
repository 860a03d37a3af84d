"""A client that stops during its login counts as too slow, even if the node closes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest

from controlplane.config.sql import SqlSettings
from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import frame
from tests.integration.module.test_proxy_errors import connect_greeted, expected_error, wait_login_failures
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.load.client_packets import SSL_REQUEST
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    ModuleEnvoy,
    greeting_packet,
    login_packet,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.tidb_sim_clients import RawClient

_CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01"
"""The first bytes of a ClientHello."""


@contextmanager
def root_cursor(mariadb: MariaDb) -> Iterator[Any]:
    connection: Any = pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True)
    with connection, connection.cursor() as cursor:
        yield cursor


def query_int(cursor: Any, sql: str) -> int:
    cursor.execute(sql)
    ((value,),) = cursor.fetchall()
    return int(value)


@pytest.fixture
def short_timeout_mariadb(mariadb: MariaDb) -> Iterator[MariaDb]:
    """Yield a MariaDB that waits 2 s for a client's login, the minimum that can be set."""
    with root_cursor(mariadb) as cursor:
        previous = query_int(cursor, "select @@global.connect_timeout")
        cursor.execute("set global connect_timeout = 2")
        yield mariadb
        cursor.execute(f"set global connect_timeout = {previous}")


@asynccontextmanager
async def run_with_short_node_timeout(
    directory: Path, node: str
) -> AsyncIterator[tuple[ModuleEnvoy, PemFiles]]:
    """Run an Envoy whose login timeout is longer than the node's."""
    certificates = PemFiles.create(directory / "certificates")
    client = {"tls": "optional", "cert": str(certificates.cert), "key": str(certificates.key)}
    async with run_envoy(
        directory, [node], ModuleConfig(client=client, live_settings={"login_timeout": 6})
    ) as proxy:
        yield proxy, certificates


async def start_login(proxy: ModuleEnvoy, *sent: bytes) -> RawClient:
    """Return a client that has sent these parts of its login, and has read a packet before each part."""
    client = await connect_greeted(proxy)
    client.writer.write(sent[0])
    for part in sent[1:]:
        await with_timeout(client.read_packet())
        client.writer.write(part)
    return client


async def test_client_is_too_slow_if_the_server_times_out(
    tmp_path: Path, short_timeout_mariadb: MariaDb
) -> None:
    node = f"127.0.0.1:{short_timeout_mariadb.port}"
    login = login_packet()
    other_plugin = frame(1, login[4:].replace(b"mysql_native_password", b"client_ed25519"))
    async with run_with_short_node_timeout(tmp_path, node) as (proxy, _):
        clients = [
            await start_login(proxy, b""),
            await start_login(proxy, login[:2]),
            await start_login(proxy, login[:-1]),
            await start_login(proxy, SSL_REQUEST),
            await start_login(proxy, SSL_REQUEST + _CLIENT_HELLO),
        ]
        # The server requests another authentication method from this client, which does not answer.
        switching = await start_login(proxy, other_plugin)
        assert (await with_timeout(switching.read_packet()))[1][:1] == b"\xfe"
        received = await asyncio.gather(*(read_to_end(client) for client in [*clients, switching]))
        assert received[:3] == [expected_error("login_too_slow", sequence) for sequence in (1, 2, 2)]
        assert received[3:5] == [b"", b""]  # Envoy can send no error before TLS is established
        assert received[5] == expected_error("login_too_slow", 3, state=True)
        await wait_login_failures(proxy, "login_too_slow", 6)
        # Slow clients do not count as failures of the node.
        assert not [
            key for key, count in (await proxy.metrics()).items() if key[0] == "connect_failures" and count
        ]
        stats = await proxy.stats("cluster.tidb.(upstream_cx_connect_fail|outlier_detection.ejections_total)")
        assert not any(stats.values())
        client = await connect_greeted(proxy)
        client.writer.write(login)
        assert (await with_timeout(client.read_packet()))[1][0] == 0


async def test_node_that_closes_at_once_counts_as_gone(tmp_path: Path) -> None:
    """The client has had no time to be too slow, so the node must have been stopped or killed."""

    async def close_after_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        writer.close()

    async with (
        run_fake_server(close_after_greeting) as node,
        run_with_short_node_timeout(tmp_path, node.endpoint) as (proxy, _),
    ):
        assert (await read_to_end(await connect_greeted(proxy))) == expected_error("node_gone", 1)
        await wait_login_failures(proxy, "node_gone", 1)


async def test_node_that_closes_instead_of_answering_counts_as_gone(tmp_path: Path) -> None:
    async def close_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        await RawClient(reader, writer).read_packet()
        await asyncio.sleep(1.2)  # if a client has sent no login for this long, it counts as too slow
        writer.close()

    async with (
        run_fake_server(close_late) as node,
        run_with_short_node_timeout(tmp_path, node.endpoint) as (proxy, _),
    ):
        assert await read_to_end(await start_login(proxy, login_packet())) == expected_error(
            "node_gone", 2, state=True
        )
        await wait_login_failures(proxy, "node_gone", 1)


def test_default_login_timeout_is_shorter_than_the_servers(mariadb: MariaDb) -> None:
    """If the server timed out first, it might close without an error. (TiDB 8.5 has no login timeout.)"""
    with root_cursor(mariadb) as cursor:
        default = query_int(
            cursor,
            "select default_value from information_schema.system_variables"
            " where variable_name = 'connect_timeout'",
        )
    assert SqlSettings().login_timeout < default == 10
