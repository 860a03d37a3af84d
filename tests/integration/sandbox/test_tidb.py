"""The simulated TiDB server as a child process on fixed ports."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pymysql
import pytest

from sandbox.etcd import Etcd
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import http_client
from sandbox.tidb import FakeTidb


@pytest.fixture
async def tidb(tmp_path: Path, ports: Ports, etcd: Etcd, mariadb: MariaDb) -> AsyncIterator[FakeTidb]:
    node = FakeTidb(
        tmp_path, ports.allocate(), ports.allocate(), name="tidb", pd=[etcd.url], mariadb=mariadb.address
    )
    async with node:
        yield node


def _select_one(tidb: FakeTidb) -> object:
    with (
        pymysql.connect(host="127.0.0.1", port=tidb.port, user="root") as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("select 1")
        return cursor.fetchone()


async def _registered(etcd: Etcd) -> int:
    """Return the number of keys under /topology/tidb/. etcd's JSON gateway takes keys in base64."""
    key_range = {"key": "L3RvcG9sb2d5L3RpZGIv", "range_end": "L3RvcG9sb2d5L3RpZGIw"}
    async with http_client(timeout=20.0) as client:
        page = (await client.post(f"{etcd.url}/v3/kv/range", json=key_range)).raise_for_status().json()
        return int(page.get("count", 0))


async def test_graceful_shutdown_removes_registration_and_crash_does_not(tidb: FakeTidb, etcd: Etcd) -> None:
    assert await asyncio.to_thread(_select_one, tidb) == (1,)
    assert await _registered(etcd) == 2
    await tidb.kill()
    assert tidb.process.returncode == -signal.SIGKILL
    assert await _registered(etcd) == 2
    address = tidb.address
    await tidb.restart()
    assert tidb.address == address
    assert await asyncio.to_thread(_select_one, tidb) == (1,)
    assert await tidb.terminate() == 0
    assert await _registered(etcd) == 0


async def test_logs_protocol_violation(tidb: FakeTidb) -> None:
    assert tidb.violations() == []
    with socket.create_connection(("127.0.0.1", tidb.port)) as client:
        client.recv(4096)
        client.sendall(b"\x01\x00\x00\x07\x0e")  # sequence number 7 where 1 is due
        while client.recv(4096):
            pass
    (line,) = tidb.violations()
    assert "protocol violation" in line
    assert await tidb.terminate() != 0
