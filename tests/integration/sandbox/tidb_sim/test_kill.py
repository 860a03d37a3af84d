"""KILL ends a session of a fake TiDB server as TiDB does: by a FIN without an error, whatever it is doing.

pingcap/tidb pkg/server/server.go, `Kill` and `killQuery`: they set a deadline on the connection. So the
client of a busy session gets no error either, and KILL QUERY ends an idle session, too.
"""

from __future__ import annotations

import asyncio

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import Command, frames
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.tidb_sim_clients import Raw, rules_for, run, session
from tests.support.waiting import until

SLEEP = bytes((Command.QUERY,)) + b"select sleep(60)"


async def own(client: Raw) -> str:
    """Its connection ID."""
    ((number,),) = await client.rows("select connection_id()")
    return str(number)


async def killed(admin: Raw, statement: str, client: Raw, number: str) -> bytes:
    """What the client receives after it was killed."""
    assert (await admin.command(Command.QUERY, f"{statement} {number}".encode()))[0] == 0
    async with asyncio.timeout(10):
        return await client.reader.read()


async def sleeps(admin: Raw, client: Raw, number: str) -> None:
    """Returns when the client's statement runs."""
    client.writer.write(frames(0, [SLEEP]))
    await listed(admin, number, "state", "User sleep")


async def listed(admin: Raw, number: str, column: str, value: str) -> None:
    """Returns when the list of processes has that value for a session."""

    async def is_listed() -> bool:
        asked = f"select {column} from information_schema.processlist where id = {number}"
        return await admin.rows(asked) == [(value,)]

    await until(is_listed)


@pytest.mark.parametrize("statement", ["kill", "KILL TIDB CONNECTION", "kill query", "kill tidb query"])
@pytest.mark.parametrize("state", ["idle", "in a transaction"])
async def test_a_session_that_runs_nothing_ends_by_a_fin(
    mariadb: MariaDb, state: str, statement: str
) -> None:
    before = ["begin"] if state == "in a transaction" else []
    async with (
        TidbSim(SimSettings(rules_for(mariadb))) as sim,
        session(sim) as admin,
        session(sim, *before) as client,
    ):
        number = await own(client)
        await listed(admin, number, "command", "Sleep")  # MariaDB shows it only after its answer
        assert await killed(admin, statement, client, number) == b""


@pytest.mark.parametrize("before", [[], ["begin"]], ids=str)
async def test_a_busy_session_ends_by_a_fin_or_gets_an_error(mariadb: MariaDb, before: list[str]) -> None:
    async with TidbSim(SimSettings(rules_for(mariadb))) as sim, session(sim) as admin:
        async with session(sim, *before) as client:
            number = await own(client)
            await sleeps(admin, client, number)
            assert await killed(admin, "kill", client, number) == b""
        async with session(sim, *before) as client:
            number = await own(client)
            await sleeps(admin, client, number)
            assert (await admin.command(Command.QUERY, f"kill query {number}".encode()))[0] == 0
            async with asyncio.timeout(10):
                for _ in range(4):  # MariaDB ends it with an error; in TiDB SLEEP() gives 1
                    await client.packet()
            await run(client, "do 1")


async def test_killing_a_session_that_does_not_exist_succeeds(mariadb: MariaDb) -> None:
    async with TidbSim(SimSettings(rules_for(mariadb))) as sim, session(sim) as admin:
        for statement in ("kill 4294967000", "kill query 4294967000"):
            assert (await admin.command(Command.QUERY, statement.encode()))[0] == 0
