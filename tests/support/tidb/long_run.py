"""The load of a long run: sessions that stay open for the whole run, and short connections all the time."""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from controlplane.aio import wait_at_most
from sandbox.local_cluster import LocalCluster
from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.migration.sql_client import (
    Answer,
    AnswerClient,
    OkAnswer,
    PrepareAnswer,
    RowsAnswer,
    execute_body,
)
from tests.support.tidb.sessions import connect, connect_directly, query_rows

SESSIONS = 24
STATEMENTS_PER_SECOND = 150
SHORT_SESSIONS_PER_SECOND = 5
_STATEMENTS_PER_ROUND = 6
_ROUND_SECONDS = SESSIONS * _STATEMENTS_PER_ROUND / STATEMENTS_PER_SECOND
_MAX_NUMBER = 1_000_000


@dataclass
class Load:
    """Counts and errors of all clients. `rounds`: one number for each long-lived session."""

    rounds: list[int] = field(default_factory=lambda: [0] * SESSIONS)
    short_sessions: int = 0
    errors: list[str] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def statements(self) -> int:
        """Number of statements of the long-lived sessions."""
        return sum(self.rounds) * _STATEMENTS_PER_ROUND

    def record(self, client: str, error: Exception) -> None:
        """Remember an error, and print it at once: a long run continues without this client."""
        self.errors.append(f"{client}: {error!r}")
        print(f"long run: ERROR of {self.errors[-1]}", flush=True)


@asynccontextmanager
async def run_load(stack: LocalCluster, database: str) -> AsyncIterator[Load]:
    """Run all clients. At the end, check that there was no error, and that no commit was lost."""
    with connect_directly(stack.tidb[0], database) as root:
        query_rows(root, "create table counters (id int primary key, n bigint)")
        rows = ", ".join(f"({number}, 0)" for number in range(SESSIONS))
        query_rows(root, f"insert into counters values {rows}")
    load = Load()
    async with asyncio.TaskGroup() as tasks:
        for number in range(SESSIONS):
            tasks.create_task(_run_session(stack.sql_port, database, number, load))
        tasks.create_task(_run_short_sessions(stack.sql_port, load))
        try:
            yield load
        finally:
            load.stopping.set()
    assert load.errors == []
    with connect(stack.sql_port, database) as connection:
        assert [n for (n,) in query_rows(connection, "select n from counters order by id")] == load.rounds
        query_rows(connection, "admin check table counters")


async def _run_session(port: int, database: str, number: int, load: Load) -> None:
    """Run rounds in one session until the end or an error. It never reconnects."""
    try:
        client = await AnswerClient.login("127.0.0.1", port, database=database)
        try:
            counter_id, product_id = await _prepare(client, number)
            while not load.stopping.is_set():
                await _run_round(client, number, load.rounds[number], counter_id, product_id)
                load.rounds[number] += 1
                await wait_at_most(load.stopping, random.uniform(0.5, 1.5) * _ROUND_SECONDS)
            await client.quit()
        finally:
            client.writer.close()
    except Exception as error:
        load.record(f"session {number} after {load.rounds[number]} rounds", error)


async def _prepare(client: AnswerClient, number: int) -> tuple[int, int]:
    """Set a variable, and prepare two statements in the binary protocol. Return their ids."""
    await run_statement(client, f"set @session = {number}")
    ids = []
    for statement in (b"select n from counters where id = ?", b"select ? * 2 + @session"):
        (answer,) = await client.send_command(MySqlCommand.STMT_PREPARE, statement)
        assert isinstance(answer, PrepareAnswer), answer
        ids.append(client.statement_id)
    return ids[0], ids[1]


async def _run_round(
    client: AnswerClient, number: int, rounds_before: int, counter_id: int, product_id: int
) -> None:
    """Run `_STATEMENTS_PER_ROUND` statements, and check each answer."""
    await run_statement(client, "begin")
    await run_statement(client, f"update counters set n = n + 1 where id = {number}", affected=1)
    assert await _execute(client, counter_id, number) == rounds_before + 1
    await run_statement(client, "commit")
    value = random.randrange(_MAX_NUMBER)
    assert await _execute(client, product_id, value) == 2 * value + number
    assert await client.query_row("select @session, database() is null") == (b"%d" % number, b"0")


async def run_statement(client: AnswerClient, statement: str, affected: int = 0) -> None:
    """Run a statement without rows, and check its answer."""
    (answer,) = await client.query(statement)
    assert isinstance(answer, OkAnswer), (statement, answer)
    assert answer.affected == affected, (statement, answer)


async def _execute(client: AnswerClient, statement_id: int, parameter: int) -> int:
    """Execute a prepared statement with one BIGINT as result."""
    answer: Answer = await client.send_command(
        MySqlCommand.STMT_EXECUTE, execute_body(statement_id, [parameter])
    )
    (rows,) = answer
    assert isinstance(rows, RowsAnswer), rows
    (row,) = rows.rows
    # A binary row begins with a zero byte and a bitmap of NULLs.
    (value,) = struct.unpack("<2xq", row)
    return int(value)


async def _run_short_sessions(port: int, load: Load) -> None:
    """Log in, run one statement and quit, at an even pace. A slow session delays the next one."""
    pause = 1 / SHORT_SESSIONS_PER_SECOND
    while not load.stopping.is_set():
        started_at = time.monotonic()
        try:
            client = await AnswerClient.login("127.0.0.1", port)
            try:
                assert await client.query_row("select 1") == (b"1",)
                await client.quit()
            finally:
                client.writer.close()
            load.short_sessions += 1
        except Exception as error:
            load.record(f"short session {load.short_sessions}", error)
        await wait_at_most(load.stopping, started_at + pause - time.monotonic())


@asynccontextmanager
async def burst(port: int, count: int) -> AsyncIterator[dict[int, AnswerClient]]:
    """Keep additional sessions open. At the end, check their states and quit them.

    A caller that quits a session removes it from the mapping.
    """
    async with AsyncExitStack() as exit_stack:
        clients = {}
        for number in range(count):
            client = await AnswerClient.login("127.0.0.1", port)
            exit_stack.callback(client.writer.close)
            await run_statement(client, f"set @burst = {number}")
            clients[number] = client
        yield clients
        for number, client in clients.items():
            assert await client.query_row("select @burst") == (b"%d" % number,)
            await client.quit()
