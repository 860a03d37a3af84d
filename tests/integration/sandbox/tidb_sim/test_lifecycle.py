"""A simulated server registers in a real etcd, shuts down in TiDB's order, and can crash."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncmy
import httpx2
import pytest
from asyncmy.errors import OperationalError

from controlplane.etcd.client import EtcdClient
from sandbox.etcd import Etcd
from sandbox.mariadb import MariaDb
from sandbox.server import http_client
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.session import SessionRules
from sandbox.tidb_sim.settings import SimSettings
from tests.support.tidb_sim_clients import connect_driver, query_rows
from tests.support.waiting import wait_until


def settings_for(mariadb: MariaDb, **values: Any) -> SimSettings:
    return SimSettings(SessionRules(str(mariadb.socket)), **values)


async def ping_error(connection: Any) -> int:
    """Send COM_PING. Return the error code, or 0 for OK."""
    try:
        await connection.ping(reconnect=False)
    except OperationalError as error:
        return int(error.args[0])
    return 0


async def status_code(address: str) -> int:
    """Return the status code of `GET /status`; 0 if the connection is refused."""
    async with http_client() as client:
        try:
            return (await client.get(f"http://{address}/status")).status_code
        except httpx2.ConnectError:
            return 0


async def is_refused(address: str) -> bool:
    host, port = address.split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return True
    writer.close()
    await writer.wait_closed()
    return False


async def keys(client: EtcdClient) -> dict[str, bytes]:
    return {key: entry.value for key, entry in (await client.range("/topology/tidb/")).entries.items()}


@asynccontextmanager
async def process(mariadb: MariaDb, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """Run a simulated server as a process; yield it and its ready message."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sandbox.tidb_sim", "-P", "0", "--status", "0", "--host", "127.0.0.1"),
        *("--mariadb", str(mariadb.socket), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        yield child, json.loads(await child.stdout.readline())
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def test_graceful_shutdown_follows_order_of_tidb(mariadb: MariaDb, database: str) -> None:
    sim = TidbSim(settings_for(mariadb, graceful_wait=2))
    await sim.start()
    idle, second_idle, busy = [await connect_driver(sim, db=database) for _ in range(3)]
    await query_rows(busy, "create table t (id int)")
    await query_rows(busy, "begin")
    await query_rows(busy, "insert into t values (1)")
    assert await ping_error(idle) == 0
    assert await status_code(sim.status_address) == 200

    sim.request_stop()
    await wait_until(lambda: sim.node.is_reporting_shutdown)
    # During the graceful wait everything works except COM_PING, and /status reports the shutdown.
    assert await status_code(sim.status_address) == 500
    assert await ping_error(idle) == 1053
    assert await query_rows(idle, "select 1") == [(1,)]
    new_session = await connect_driver(sim)
    assert await query_rows(new_session, "select 2") == [(2,)]

    await wait_until(lambda: sim.node.is_ending_idle_sessions)
    assert await status_code(sim.status_address) == 0
    assert await is_refused(sim.sql_address)
    # The server sends nothing to an idle session, and does not execute its next request.
    with pytest.raises(OperationalError, match="Lost connection"):
        await query_rows(second_idle, "insert into t values (99)")
    # A session in a transaction continues until the transaction ends.
    await query_rows(busy, "insert into t values (2)")
    await query_rows(busy, "commit")
    with pytest.raises(OperationalError, match="Lost connection"):
        await query_rows(busy, "select 1")
    async with asyncio.timeout(5):
        await sim.wait()

    async with TidbSim(settings_for(mariadb)) as other:
        reader = await connect_driver(other, db=database)
        assert await query_rows(reader, "select id from t order by id") == [(1,), (2,)]
        await reader.ensure_closed()
    for connection in (idle, new_session):
        connection.close()


async def test_sessions_that_exceed_drain_timeout_are_killed(mariadb: MariaDb, database: str) -> None:
    sim = TidbSim(settings_for(mariadb, drain_timeout=0.3))
    await sim.start()
    waiting, executing = [await connect_driver(sim, db=database) for _ in range(2)]
    await query_rows(waiting, "create table t (id int)")
    await query_rows(waiting, "begin")
    await query_rows(waiting, "insert into t values (1)")
    query = asyncio.create_task(query_rows(executing, "select sleep(60)"))
    watcher = await asyncmy.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True)
    sleeping = "select count(*) from information_schema.processlist where info = 'select sleep(60)'"

    async def is_sleeping() -> bool:
        return await query_rows(watcher, sleeping) == [(1,)]

    await wait_until(is_sleeping)
    started = time.monotonic()
    await sim.stop()
    assert 0.3 <= time.monotonic() - started < 3
    with pytest.raises(OperationalError):
        await query
    with pytest.raises(OperationalError):
        await query_rows(waiting, "commit")

    async def is_gone() -> bool:
        return await query_rows(watcher, sleeping) == [(0,)]

    # Neither the statement nor the transaction remains in MariaDB.
    await wait_until(is_gone)
    assert await query_rows(watcher, f"select count(*) from {database}.t") == [(0,)]
    await watcher.ensure_closed()


async def test_login_that_completes_during_shutdown_is_closed(mariadb: MariaDb) -> None:
    sim = TidbSim(settings_for(mariadb, drain_timeout=5))
    await sim.start()
    busy = await connect_driver(sim)
    await query_rows(busy, "begin")
    assert (await query_rows(busy, "select 1 from mysql.user limit 1")) == [(1,)]
    host, port = sim.sql_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    greeting = await reader.readexactly(4)
    await reader.readexactly(int.from_bytes(greeting[:3], "little"))
    sim.request_stop()
    await wait_until(lambda: sim.node.is_ending_idle_sessions)
    response = (
        bytes.fromhex("0082 0800 0000 0001 2d".replace(" ", ""))
        + bytes(23)
        + b"root\0\0mysql_native_password\0"
    )
    writer.write(len(response).to_bytes(3, "little") + b"\1" + response)
    assert (await reader.read()).hex() == "0700000200000002000000"
    writer.close()
    await writer.wait_closed()
    await query_rows(busy, "rollback")
    await sim.wait()
    busy.close()


async def test_registers_like_tidb(mariadb: MariaDb, etcd: Etcd) -> None:
    async with EtcdClient([etcd.url]) as client:
        before = time.time_ns()
        settings = settings_for(mariadb, pd=(etcd.url,), labels={"zone": "a"}, topology_refresh=0.2)
        async with TidbSim(settings) as sim:
            base = f"/topology/tidb/127.0.0.1:{sim.node.sql_port}"
            entries = (await client.range("/topology/tidb/")).entries
            assert sorted(entries) == [f"{base}/info", f"{base}/ttl"]
            info = json.loads(entries[f"{base}/info"].value)
            assert (info["status_port"], info["labels"]) == (sim.node.status_port, {"zone": "a"})
            assert entries[f"{base}/info"].lease == 0
            assert entries[f"{base}/ttl"].lease != 0
            first = int(entries[f"{base}/ttl"].value)
            assert before < first < time.time_ns()

            async def refreshed() -> bool:
                return int((await keys(client))[f"{base}/ttl"]) > first

            await wait_until(refreshed)
            # After the lease has expired, the server gets a new lease and writes both keys again.
            await client.lease_revoke(entries[f"{base}/ttl"].lease)
            await client.delete(f"{base}/info")
            await wait_until(lambda: _has(client, f"{base}/info", f"{base}/ttl"))
        assert await keys(client) == {}


async def _has(client: EtcdClient, *expected_keys: str) -> bool:
    return set(expected_keys) <= set(await keys(client))


async def test_deregistration_also_deletes_addresses_with_same_prefix(mariadb: MariaDb, etcd: Etcd) -> None:
    async with EtcdClient([etcd.url]) as client:
        async with TidbSim(settings_for(mariadb, pd=(etcd.url,))) as sim:
            neighbour = f"/topology/tidb/127.0.0.1:{sim.node.sql_port}0/info"
            other = "/topology/tidb/127.0.0.2:4000/info"
            await client.put(neighbour, b"{}")
            await client.put(other, b"{}")
        assert set(await keys(client)) == {other}


async def test_serves_without_etcd_and_registers_later(mariadb: MariaDb, etcd: Etcd) -> None:
    await etcd.kill()
    async with TidbSim(settings_for(mariadb, pd=(etcd.url,))) as sim:
        connection = await connect_driver(sim)
        assert await query_rows(connection, "select 1") == [(1,)]
        await connection.ensure_closed()
        await etcd.restart()
        async with EtcdClient([etcd.url]) as client:
            base = f"/topology/tidb/{sim.node.name}"
            await wait_until(lambda: _has(client, f"{base}/info", f"{base}/ttl"))


async def test_crash_leaves_registration_until_lease_expires(mariadb: MariaDb, etcd: Etcd) -> None:
    async with EtcdClient([etcd.url]) as client:
        settings = settings_for(mariadb, pd=(etcd.url,), topology_ttl=2)
        sim = TidbSim(settings)
        await sim.start()
        connection = await connect_driver(sim)
        sim.crash()
        await sim.wait()
        with pytest.raises(OperationalError):
            await query_rows(connection, "select 1")
        assert await is_refused(sim.sql_address)
        base = f"/topology/tidb/{sim.node.name}"
        assert set(await keys(client)) == {f"{base}/info", f"{base}/ttl"}

        async def only_info() -> bool:
            return set(await keys(client)) == {f"{base}/info"}

        await wait_until(only_info)


async def test_process_reports_ready_and_stops_on_sigterm(mariadb: MariaDb, etcd: Etcd) -> None:
    pd = etcd.url.partition("://")[2]
    async with process(mariadb, "--path", pd, "--version", "v9.0.0") as (child, ready):
        assert ready["event"] == "ready"
        assert await status_code(ready["status"]) == 200
        host, port = ready["sql"].split(":")
        connection = await asyncmy.connect(host=host, port=int(port), user="root")
        assert await query_rows(connection, "select version()") == [("8.0.11-TiDB-v9.0.0",)]
        async with EtcdClient([etcd.url]) as client:
            assert len(await keys(client)) == 2
            child.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                assert await child.wait() == 0
            assert await keys(client) == {}
        connection.close()


async def test_process_exits_with_3_after_violation(mariadb: MariaDb) -> None:
    async with process(mariadb) as (child, ready):
        host, port = ready["sql"].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await reader.readexactly(4)
        writer.write(b"\x01\0\0\x07\x03")
        await reader.read()
        writer.close()
        await writer.wait_closed()
        child.send_signal(signal.SIGTERM)
        _, errors = await child.communicate()
        assert child.returncode == 3
        assert b"protocol violation" in errors
        assert b"invalid sequence 7 != 1" in errors
