"""A disconnect while a simulated server exports or restores states leaves no connection or session."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pymysql
import pytest

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.mariadb_backend import BackendConnection
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.packets import AUTOCOMMIT, MySqlCommand, frame, frames, ok
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.tidb_sim_clients import (
    error_code,
    raw_connection,
    raw_session,
    session_rules,
    set_states_statement,
)
from tests.support.waiting import wait_until, wait_until_read

SHOW = frame(0, b"\x03show session_states")
SLOW = MigrationRules(export_delay_seconds=60)


@pytest.fixture
async def connections(mariadb: MariaDb) -> AsyncIterator[Callable[[], int]]:
    """Yield a function that counts MariaDB's other connections. Check that the test leaves none open."""
    with pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True) as watcher:

        def count() -> int:
            with watcher.cursor() as cursor:
                cursor.execute(
                    "select count(*) from information_schema.processlist where id <> connection_id()"
                )
                return int(cursor.fetchall()[0][0])

        before = count()
        yield count
        await wait_until(lambda: count() <= before)


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[None]:
    """Return a queue that gets an item whenever a simulated server sends a query to MariaDB."""
    sent_queries: asyncio.Queue[None] = asyncio.Queue()

    def recording(
        method: Callable[[BackendConnection, bytes | str], Any],
    ) -> Callable[[BackendConnection, bytes | str], Any]:
        def record_and_run(backend: BackendConnection, statement: bytes | str) -> Any:
            sent_queries.put_nowait(None)
            return method(backend, statement)

        return record_and_run

    monkeypatch.setattr(BackendConnection, "rows", recording(BackendConnection.rows))
    monkeypatch.setattr(BackendConnection, "execute", recording(BackendConnection.execute))
    return sent_queries


def clear_queries(queries: asyncio.Queue[None]) -> int:
    """Remove all queries from the queue; return how many there were."""
    count = queries.qsize()
    for _ in range(count):
        queries.get_nowait()
    return count


async def test_client_disconnects_during_export(
    mariadb: MariaDb, signing: SessionCertificate, connections: Callable[[], int]
) -> None:
    settings = SimSettings(session_rules(mariadb, migration=SLOW), **signing.settings)
    async with TidbSim(settings) as sim:
        async with raw_session(sim) as client:
            client.writer.write(SHOW + frame(0, b"\x0e"))
            await wait_until_read(client.writer)
            with_it = connections()
        await wait_until(lambda: not sim.node.connections and connections() < with_it)


@pytest.mark.parametrize("ending", ["quit", "abort"])
async def test_clients_disconnect_at_any_query(
    mariadb: MariaDb,
    signing: SessionCertificate,
    connections: Callable[[], int],
    queries: asyncio.Queue[None],
    ending: str,
) -> None:
    """Clients disconnect at each query that the server sends for SHOW or SET SESSION_STATES."""
    async with TidbSim(SimSettings(session_rules(mariadb), **signing.settings)) as sim:
        async with raw_session(sim, "set @a = repeat('x', 1000000)", "prepare s from 'select 1'") as model:
            states, _ = await model.export_states()
        restored = frames(0, [b"\x03" + set_states_statement(states).encode()])
        for statement in (SHOW, restored):
            async with raw_session(sim) as client:
                await client.export_states()
                clear_queries(queries)
                client.writer.write(statement)
                await client.read_packet()
            query_count = clear_queries(queries)
            assert query_count > 1
            for step in range(query_count + 1):
                async with raw_session(sim) as client:
                    await client.export_states()
                    clear_queries(queries)
                    client.writer.write(statement)
                    for _ in range(step):
                        await queries.get()
                    if ending == "abort":
                        client.writer.transport.abort()
                await wait_until(lambda: not sim.node.connections)
        async with raw_session(sim) as client:
            assert (await client.export_states())[0]["status"] == AUTOCOMMIT
        assert sim.node.violations == []


async def test_client_disconnects_while_receiving_states(
    mariadb: MariaDb, signing: SessionCertificate, connections: Callable[[], int]
) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb), **signing.settings)) as sim:
        async with raw_session(sim) as source, raw_connection(sim) as client:
            _, token = await source.export_states()
            assert await client.login_by_token(token) == ok(AUTOCOMMIT)
            statement = b"\x03set session_states '" + b" " * 100_000
            client.writer.write(frame(0, statement)[:-5])
            await wait_until_read(client.writer)
        await wait_until(lambda: not sim.node.connections)
        assert sim.node.violations == []


async def test_kill_during_export_ends_session_at_once(
    mariadb: MariaDb, signing: SessionCertificate, connections: Callable[[], int]
) -> None:
    settings = SimSettings(session_rules(mariadb, migration=SLOW), **signing.settings)
    async with TidbSim(settings) as sim, raw_session(sim) as client, raw_session(sim) as killer:
        ((number,),) = await client.rows("select connection_id()")
        client.writer.write(SHOW)
        await wait_until_read(client.writer)
        assert (await killer.query(f"kill {number}"))[0] == 0x00
        assert await client.reader.read() == b""


@pytest.mark.parametrize("crash", [False, True])
async def test_server_stops_during_export(
    mariadb: MariaDb, signing: SessionCertificate, connections: Callable[[], int], crash: bool
) -> None:
    settings = SimSettings(session_rules(mariadb, migration=SLOW), drain_timeout=0.1, **signing.settings)
    sim = TidbSim(settings)
    await sim.start()
    async with raw_session(sim) as client:
        client.writer.write(SHOW)
        await wait_until_read(client.writer)
        async with asyncio.timeout(10):
            if crash:
                sim.crash()
                await sim.wait()
            else:
                await sim.stop()
        assert await client.reader.read() == b""


async def test_export_starts_while_mariadb_reads_earlier_data(
    mariadb: MariaDb, signing: SessionCertificate
) -> None:
    """Flow control must work during the export's queries, or the server never reads from the client again."""
    settings = SimSettings(
        session_rules(mariadb, migration=MigrationRules(export_delay_seconds=0.2)), **signing.settings
    )
    async with TidbSim(settings) as sim, raw_session(sim) as client:
        number = await client.prepare(b"select length(?)")
        head = struct.pack("<BIH", MySqlCommand.STMT_SEND_LONG_DATA, number, 0)
        client.writer.write(b"".join(frame(0, head + b"x" * 1_000_000) for _ in range(20)) + SHOW)
        assert error_code((await client.read_packet())[1]) == 8146
        (row,) = await client.execute(number, b"\0\1\xfc\0")
        assert row[2:6] == struct.pack("<i", 20_000_000)
        assert (await client.send_command(MySqlCommand.PING))[0] == 0x00


async def test_client_that_does_not_read_states_blocks_no_other(
    mariadb: MariaDb, signing: SessionCertificate, connections: Callable[[], int]
) -> None:
    sim = TidbSim(SimSettings(session_rules(mariadb), drain_timeout=0.1, **signing.settings))
    await sim.start()
    async with raw_session(sim, "set @a = repeat('x', 20000000)") as client, raw_session(sim) as other:
        transport = client.writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        client.writer.write(SHOW)
        await wait_until_read(client.writer)
        assert (await other.export_states())[0]["status"] == AUTOCOMMIT
        async with asyncio.timeout(10):
            await sim.stop()
        transport.abort()
