"""Clients and connections that go away while a stand-in reads or restores states: nothing stays behind."""

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
    """How many connections MariaDB has beside this one's; at the end not more than before."""
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
def questions(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[None]:
    """One for each that stand-ins have for MariaDB, when it is asked."""
    asked: asyncio.Queue[None] = asyncio.Queue()

    def told(
        asks: Callable[[BackendConnection, bytes | str], Any],
    ) -> Callable[[BackendConnection, bytes | str], Any]:
        def ask(backing: BackendConnection, statement: bytes | str) -> Any:
            asked.put_nowait(None)
            return asks(backing, statement)

        return ask

    monkeypatch.setattr(BackendConnection, "rows", told(BackendConnection.rows))
    monkeypatch.setattr(BackendConnection, "execute", told(BackendConnection.execute))
    return asked


def forget(questions: asyncio.Queue[None]) -> int:
    """Of those that were asked; how many that were."""
    count = questions.qsize()
    for _ in range(count):
        questions.get_nowait()
    return count


async def test_a_client_leaves_while_its_states_are_read(
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
async def test_clients_leave_at_any_moment(
    mariadb: MariaDb,
    signing: SessionCertificate,
    connections: Callable[[], int],
    questions: asyncio.Queue[None],
    ending: str,
) -> None:
    """While MariaDB has any question of both statements; the last one is served as ever."""
    async with TidbSim(SimSettings(session_rules(mariadb), **signing.settings)) as sim:
        async with raw_session(sim, "set @a = repeat('x', 1000000)", "prepare s from 'select 1'") as model:
            states, _ = await model.export_states()
        restored = frames(0, [b"\x03" + set_states_statement(states).encode()])
        for statement in (SHOW, restored):
            async with raw_session(sim) as client:
                await client.export_states()
                forget(questions)
                client.writer.write(statement)
                await client.read_packet()
            asked = forget(questions)
            assert asked > 1
            for step in range(asked + 1):
                async with raw_session(sim) as client:
                    await client.export_states()
                    forget(questions)
                    client.writer.write(statement)
                    for _ in range(step):
                        await questions.get()
                    if ending == "abort":
                        client.writer.transport.abort()
                await wait_until(lambda: not sim.node.connections)
        async with raw_session(sim) as client:
            assert (await client.export_states())[0]["status"] == AUTOCOMMIT
        assert sim.node.violations == []


async def test_a_client_leaves_in_the_middle_of_its_states(
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


async def test_a_session_that_is_killed_while_its_states_are_read_ends_at_once(
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
async def test_a_stand_in_ends_while_states_are_read(
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


async def test_states_are_asked_for_while_mariadb_takes_what_came_before(
    mariadb: MariaDb, signing: SessionCertificate
) -> None:
    """Whether MariaDB takes more is heard while we ask it ourselves, or the client is never read again."""
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


async def test_a_client_that_does_not_read_its_states_holds_up_nobody(
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
