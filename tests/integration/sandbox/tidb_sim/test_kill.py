"""KILL at a simulated server ends a session as in TiDB: by a FIN without an error.

In pingcap/tidb, `Kill` (pkg/server/server.go) sets a deadline on the connection. So KILL sends no error to a
busy client either.
"""

from __future__ import annotations

import asyncio

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import MySqlCommand, frames
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.tidb_sim_clients import RawClient, raw_session, run_statement, session_rules
from tests.support.waiting import wait_until

SLEEP = bytes((MySqlCommand.QUERY,)) + b"select sleep(60)"


async def connection_id(client: RawClient) -> str:
    ((number,),) = await client.rows("select connection_id()")
    return str(number)


async def kill_session(admin: RawClient, statement: str, client: RawClient, number: str) -> bytes:
    """Kill the session of `client`. Return the bytes that `client` receives."""
    assert (await admin.send_command(MySqlCommand.QUERY, f"{statement} {number}".encode()))[0] == 0
    async with asyncio.timeout(10):
        return await client.reader.read()


async def wait_sleeping(admin: RawClient, client: RawClient, number: str) -> None:
    """Send SLEEP from the client, and wait until it runs."""
    client.writer.write(frames(0, [SLEEP]))
    await wait_listed(admin, number, "state", "User sleep")


async def wait_listed(admin: RawClient, number: str, column: str, value: str) -> None:
    """Wait until the session's row in the process list has this value in `column`."""

    async def is_listed() -> bool:
        query = f"select {column} from information_schema.processlist where id = {number}"
        return await admin.rows(query) == [(value,)]

    await wait_until(is_listed)


@pytest.mark.parametrize("statement", ["kill", "KILL CONNECTION"])
@pytest.mark.parametrize("state", ["idle", "in a transaction"])
async def test_kill_ends_idle_session_by_fin(mariadb: MariaDb, state: str, statement: str) -> None:
    before = ["begin"] if state == "in a transaction" else []
    async with (
        TidbSim(SimSettings(session_rules(mariadb))) as sim,
        raw_session(sim) as admin,
        raw_session(sim, *before) as client,
    ):
        number = await connection_id(client)
        await wait_listed(admin, number, "command", "Sleep")  # MariaDB may still list the earlier state.
        assert await kill_session(admin, statement, client, number) == b""


@pytest.mark.parametrize("before", [[], ["begin"]], ids=str)
async def test_kill_ends_busy_session_by_fin_or_error(mariadb: MariaDb, before: list[str]) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim, raw_session(sim) as admin:
        async with raw_session(sim, *before) as client:
            number = await connection_id(client)
            await wait_sleeping(admin, client, number)
            assert await kill_session(admin, "kill", client, number) == b""
        async with raw_session(sim, *before) as client:
            number = await connection_id(client)
            await wait_sleeping(admin, client, number)
            assert (await admin.send_command(MySqlCommand.QUERY, f"kill query {number}".encode()))[0] == 0
            async with asyncio.timeout(10):
                for _ in range(4):  # the answer; MariaDB interrupts SLEEP() with an error, but TiDB returns 1
                    await client.read_packet()
            await run_statement(client, "do 1")


async def test_kill_of_unknown_session_succeeds(mariadb: MariaDb) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim, raw_session(sim) as admin:
        for statement in ("kill 4294967000", "kill query 4294967000"):
            assert (await admin.send_command(MySqlCommand.QUERY, statement.encode()))[0] == 0
