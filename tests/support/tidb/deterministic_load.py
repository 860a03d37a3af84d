"""Sessions whose reads depend only on their own writes: replays on the same data give equal results."""

from __future__ import annotations

import asyncio
import random
import struct
from contextlib import AsyncExitStack
from dataclasses import dataclass

from sandbox.tidb import Tidb
from sandbox.tidb_sim.packets import MySqlCommand, frame
from tests.support.tidb.sessions import connect_directly, query_rows, query_value
from tests.support.tidb_sim_clients import RawClient

ROWS = 100
"""Rows of each session."""
_BATCH = 5_000
_LONGLONG = 8
_AUTH_SWITCH = 0xFE


@dataclass
class DeterministicSession:
    """A session that works on its own rows. `statements`: how many it has sent."""

    number: int
    client: RawClient
    prepared: int
    statements: int = 0

    async def run(self, steps: int) -> None:
        """Run steps, which are the same for each session of this number."""
        chooser = random.Random(self.number)
        for _ in range(steps):
            row = self.number * ROWS + chooser.randrange(ROWS)
            action = chooser.randrange(5)
            if action == 0:
                await self._read(f"select id, value, note from t where id = {row}")
            elif action == 1:
                first = self.number * ROWS
                await self._read(f"select count(*), sum(value) from t where id between {first} and {row}")
            elif action == 2:
                parameter = struct.pack("<BBHq", 0, 1, _LONGLONG, row)
                await self.client.execute(self.prepared, parameter)
                self.statements += 1
            elif action == 3:
                await self._read(f"select @factor * value from t where id = {row}")
            else:
                await self._write("begin")
                await self._write(f"update t set value = value + {chooser.randrange(1000)} where id = {row}")
                await self._read(f"select value from t where id = {row}")
                await self._write("commit")

    async def quit(self) -> None:
        self.client.writer.write(b"\1\0\0\0\1")
        await self.client.reader.read()
        self.client.writer.close()

    async def _read(self, statement: str) -> None:
        await self.client.rows(statement)
        self.statements += 1

    async def _write(self, statement: str) -> None:
        answer = await self.client.query(statement)
        assert answer[0] == 0, (statement, answer)
        self.statements += 1


async def open_session(port: int, database: str, number: int) -> DeterministicSession:
    """Open a session with a user variable and a prepared statement."""
    client = RawClient(*await asyncio.open_connection("127.0.0.1", port))
    answer = await client.login()
    if answer[0] == _AUTH_SWITCH:  # TiProxy demands the password again. It is empty.
        client.writer.write(frame(3, b""))
        answer = (await client.read_packet())[1]
    assert answer[0] == 0, answer
    assert (await client.send_command(MySqlCommand.INIT_DB, database.encode()))[0] == 0
    assert (await client.query(f"set @factor = {number + 2}"))[0] == 0
    return DeterministicSession(number, client, await client.prepare(b"select value from t where id = ?"), 3)


async def run_sessions(port: int, database: str, numbers: range, steps: int) -> int:
    """Open sessions, run their steps at the same time, and close them. Return the number of statements."""
    async with AsyncExitStack() as stack:
        opened = [await open_session(port, database, number) for number in numbers]
        for session in opened:
            stack.push_async_callback(session.quit)
        await asyncio.gather(*(session.run(steps) for session in opened))
        return sum(session.statements for session in opened)


def fill_table(node: Tidb, database: str, sessions: int) -> None:
    """Create the table, or give it its first content again."""
    with connect_directly(node, database) as connection:
        query_rows(
            connection, "create table if not exists t (id int primary key, value bigint, note varchar(40))"
        )
        query_rows(connection, "truncate table t")
        for start in range(0, sessions * ROWS, _BATCH):
            ids = range(start, min(start + _BATCH, sessions * ROWS))
            rows = ", ".join(f"({id_}, {id_}, 'note {id_}')" for id_ in ids)
            query_rows(connection, f"insert into t values {rows}")


def table_checksum(node: Tidb, database: str) -> str:
    """Return a value that changes with the content of the table."""
    with connect_directly(node, database) as connection:
        return str(query_value(connection, "select concat(count(*), ' ', sum(id * value)) from t"))
