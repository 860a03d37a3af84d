"""Sessions that check that their state is not lost. They use no driver: a driver could hide errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

from sandbox.tidb_sim.packets import AUTOCOMMIT, IN_TRANSACTION, MySqlCommand
from tests.support.migration.sql_client import (
    Answer,
    AnswerClient,
    OkAnswer,
    PrepareAnswer,
    RowsAnswer,
    execute_body,
)

DATABASE = "guests"
_SQL_PREPARED = "select concat('named ', @mine)"
_BINARY_PREPARED = b"select concat('numbered ', ?, ' ', @mine)"
_PAUSE_SECONDS = 0.02  # Between two turns of a session.


class SessionDisturbed(AssertionError):
    """A response differs from the expected response."""


@dataclass
class StatefulSession:
    """A session with a user variable, a current database, and a prepared statement of each protocol.

    Each turn is a transaction, a PING and a query. `max_latency_seconds` is the longest response time.
    """

    number: int
    wire: AnswerClient
    finished_turns: int = 0
    max_latency_seconds: float = 0.0
    visited_nodes: set[str] = field(default_factory=set)
    """Nodes on which the session has worked."""

    @classmethod
    async def create(cls, port: int, number: int) -> Self:
        """Log in at a port of this machine, and set up the state."""
        session = cls(number, await AnswerClient.login("127.0.0.1", port))
        try:
            setup = (f"use {DATABASE}", f"set @mine = 'of {number}'", f'prepare named from "{_SQL_PREPARED}"')
            await _run(session.wire, *setup)
            (prepared,) = await session.wire.send_command(MySqlCommand.STMT_PREPARE, _BINARY_PREPARED)
            assert isinstance(prepared, PrepareAnswer), prepared
        except BaseException:
            session.abort()
            raise
        return session

    async def run(self, stopped: asyncio.Event) -> None:
        """Run turns until `stopped` is set."""
        while not stopped.is_set():
            await self._turn()
            self.finished_turns += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_SECONDS):
                    await stopped.wait()

    async def _turn(self) -> None:
        insert = f"insert into turns values ({self.number}, {self.finished_turns}, %s)"
        _expect(await self._send_timed(MySqlCommand.QUERY, "begin"), (OkAnswer(AUTOCOMMIT | IN_TRANSACTION),))
        for half in ("1", "2"):
            answer = await self._send_timed(MySqlCommand.QUERY, insert % half)
            _expect(answer, (OkAnswer(AUTOCOMMIT | IN_TRANSACTION, affected=1),))
        _expect(await self._send_timed(MySqlCommand.QUERY, "commit"), (OkAnswer(AUTOCOMMIT),))
        _expect(await self._send_timed(MySqlCommand.PING), (OkAnswer(AUTOCOMMIT),))
        _expect(await self._query_cell("select @mine"), f"of {self.number}")
        self.visited_nodes.add(await self.node_address())

    async def check(self) -> None:
        """Check that all state is still there, and that each turn was stored exactly once."""
        value = f"of {self.number}"
        _expect(await self._query_cell("select concat(database(), ' ', @mine)"), f"{DATABASE} {value}")
        _expect(await self._query_cell("execute named"), f"named {value}")
        (rows,) = await self._send_timed(
            MySqlCommand.STMT_EXECUTE, execute_body(self.wire.statement_id, (b"x",))
        )
        assert isinstance(rows, RowsAnswer), rows
        text = f"numbered x {value}".encode()
        _expect(rows.rows, (b"\0\0" + bytes((len(text),)) + text,))
        query = f"select concat(count(*), ' ', count(distinct turn)) from turns where guest = {self.number}"
        _expect(await self._query_cell(query), f"{2 * self.finished_turns} {self.finished_turns}")

    async def node_address(self) -> str:
        """Return the address of the session's node."""
        return await self._query_cell("select @@hostname")

    def abort(self) -> None:
        """Reset the connection at once."""
        self.wire.writer.transport.abort()

    async def _query_cell(self, text: str) -> str:
        (rows,) = await self._send_timed(MySqlCommand.QUERY, text)
        assert isinstance(rows, RowsAnswer), rows
        ((cell,),) = rows.cells()
        assert cell is not None
        return cell.decode()

    async def _send_timed(self, command: MySqlCommand, body: str | bytes = b"") -> Answer:
        started_at = time.monotonic()
        answer = await self.wire.send_command(command, body.encode() if isinstance(body, str) else body)
        self.max_latency_seconds = max(self.max_latency_seconds, time.monotonic() - started_at)
        return answer


def _expect(actual: object, expected: object) -> None:
    if actual != expected:
        raise SessionDisturbed(f"received {actual!r} instead of {expected!r}")


async def _run(wire: AnswerClient, *statements: str) -> None:
    for statement in statements:
        (part,) = await wire.query(statement)
        assert isinstance(part, OkAnswer), part


@asynccontextmanager
async def run_stateful_sessions(port: int, count: int) -> AsyncIterator[list[StatefulSession]]:
    """Create a table for the turns and open `count` sessions. At the end, reset their connections."""
    admin = await AnswerClient.login("127.0.0.1", port)
    await _run(
        admin,
        f"create database {DATABASE}",
        f"create table {DATABASE}.turns (guest int, turn int, half int, primary key (guest, turn, half))",
    )
    await admin.quit()
    sessions: list[StatefulSession] = []
    try:
        for number in range(count):
            sessions.append(await StatefulSession.create(port, number))
        yield sessions
    finally:
        for session in sessions:
            session.abort()
