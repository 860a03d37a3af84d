"""Clients that stop in the middle of their login: they are to blame, even if the server closes first."""

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
from sandbox.tidb_sim.packets import Capability, frame
from tests.integration.module.test_proxy_errors import failures, greeted, refusal
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    ModuleEnvoy,
    greeting_packet,
    login_packet,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient

_SSL_REQUEST = frame(1, login_packet(CAPABILITIES | Capability.SSL)[4:36])
_CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01"
"""The first bytes of one."""


@contextmanager
def root(mariadb: MariaDb) -> Iterator[Any]:
    connection: Any = pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True)
    with connection, connection.cursor() as cursor:
        yield cursor


def number(cursor: Any, sql: str) -> int:
    cursor.execute(sql)
    ((value,),) = cursor.fetchall()
    return int(value)


@pytest.fixture
def impatient(mariadb: MariaDb) -> Iterator[MariaDb]:
    """A MariaDB that waits 2 s for a client's login, the least that can be set."""
    with root(mariadb) as cursor:
        before = number(cursor, "select @@global.connect_timeout")
        cursor.execute("set global connect_timeout = 2")
        yield mariadb
        cursor.execute(f"set global connect_timeout = {before}")


@asynccontextmanager
async def before(directory: Path, node: str) -> AsyncIterator[tuple[ModuleEnvoy, PemFiles]]:
    """An Envoy whose timeout for logins is longer than that of the node."""
    pair = PemFiles.create(directory / "certificates")
    client = {"tls": "optional", "cert": str(pair.cert), "key": str(pair.key)}
    async with run_envoy(directory, [node], ModuleConfig(client=client, live={"login_timeout": 15})) as proxy:
        yield proxy, pair


async def unfinished(proxy: ModuleEnvoy, *sent: bytes) -> RawClient:
    """A client that has sent these parts of its login, each after a packet of the server."""
    client = await greeted(proxy)
    client.writer.write(sent[0])
    for part in sent[1:]:
        await with_timeout(client.read_packet())
        client.writer.write(part)
    return client


async def test_a_client_was_too_slow_if_the_server_gave_up_waiting_for_it(
    tmp_path: Path, impatient: MariaDb
) -> None:
    node = f"127.0.0.1:{impatient.port}"
    whole = login_packet()
    other_plugin = frame(1, whole[4:].replace(b"mysql_native_password", b"client_ed25519"))
    async with before(tmp_path, node) as (proxy, _):
        clients = [
            await unfinished(proxy, b""),
            await unfinished(proxy, whole[:2]),
            await unfinished(proxy, whole[:-1]),
            await unfinished(proxy, _SSL_REQUEST),
            await unfinished(proxy, _SSL_REQUEST + _CLIENT_HELLO),
        ]
        # This one is asked for another authentication method, and does not answer.
        switching = await unfinished(proxy, other_plugin)
        assert (await with_timeout(switching.read_packet()))[1][:1] == b"\xfe"
        received = await asyncio.gather(*(read_to_end(client) for client in [*clients, switching]))
        assert received[:3] == [refusal("login_too_slow", sequence) for sequence in (1, 2, 2)]
        assert received[3:5] == [b"", b""]  # before TLS is established no error can be sent
        assert received[5] == refusal("login_too_slow", 3, state=True)
        await failures(proxy, "login_too_slow", 6)
        # It is not counted as a failure of the node.
        assert not [
            key for key, count in (await proxy.metrics()).items() if key[0] == "connect_failures" and count
        ]
        stats = await proxy.stats("cluster.tidb.(upstream_cx_connect_fail|outlier_detection.ejections_total)")
        assert not any(stats.values())
        client = await greeted(proxy)
        client.writer.write(whole)
        assert (await with_timeout(client.read_packet()))[1][0] == 0


async def test_a_node_that_closes_at_once_has_gone(tmp_path: Path) -> None:
    """No client is too slow in so short a time: the node was stopped or killed."""

    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        writer.close()

    async with run_fake_server(leaves) as node, before(tmp_path, node.endpoint) as (proxy, _):
        assert (await read_to_end(await greeted(proxy))) == refusal("node_gone", 1)
        await failures(proxy, "node_gone", 1)


async def test_a_node_that_closes_instead_of_answering_has_gone_however_long_it_took(tmp_path: Path) -> None:
    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        await RawClient(reader, writer).read_packet()
        await asyncio.sleep(1.2)  # so long that the client would be to blame if it had to send something
        writer.close()

    async with run_fake_server(hangs) as node, before(tmp_path, node.endpoint) as (proxy, _):
        assert await read_to_end(await unfinished(proxy, login_packet())) == refusal(
            "node_gone", 2, state=True
        )
        await failures(proxy, "node_gone", 1)


def test_the_default_timeout_for_logins_is_shorter_than_that_of_servers(mariadb: MariaDb) -> None:
    """Else the server ends the connection first, perhaps without an error. (TiDB 8.5 waits without limit.)"""
    with root(mariadb) as cursor:
        default = number(
            cursor,
            "select default_value from information_schema.system_variables"
            " where variable_name = 'connect_timeout'",
        )
    assert SqlSettings().login_timeout < default == 10
