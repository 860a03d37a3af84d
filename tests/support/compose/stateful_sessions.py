"""Sessions that have something to lose, and notice when it is lost: no driver hides it from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

from sandbox.tidb_sim.packets import AUTOCOMMIT, IN_TRANSACTION, Command
from tests.support.migration.sql_client import Answer, Ok, Prepared, Rows, Wire, executed

DATABASE = "guests"
_NAMED = "select concat('named ', @mine)"
_NUMBERED = b"select concat('numbered ', ?, ' ', @mine)"
_THINKS = 0.02  # seconds between two statements of one that works


class Disturbed(AssertionError):
    """An answer is not the one that the session must get."""


@dataclass
class Guest:
    """A session with a user variable, a current database, and a prepared statement of each protocol.

    `done`: turns that it has worked. `slowest`: the longest that it has waited for an answer, in seconds.
    """

    number: int
    wire: Wire
    done: int = 0
    slowest: float = 0.0
    seen: set[str] = field(default_factory=set)
    """Nodes on which it has worked."""

    @classmethod
    async def arrive(cls, port: int, number: int) -> Self:
        """Log in at a port of this machine, and set all up."""
        guest = cls(number, await Wire.login("127.0.0.1", port))
        try:
            setup = (f"use {DATABASE}", f"set @mine = 'of {number}'", f'prepare named from "{_NAMED}"')
            await _run(guest.wire, *setup)
            (prepared,) = await guest.wire.ask(Command.STMT_PREPARE, _NUMBERED)
            assert isinstance(prepared, Prepared), prepared
        except BaseException:
            guest.leave()
            raise
        return guest

    async def work(self, over: asyncio.Event) -> None:
        """Statement upon statement, until `over`."""
        while not over.is_set():
            await self._turn()
            self.done += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(_THINKS):
                    await over.wait()

    async def _turn(self) -> None:
        """A transaction that is lost, half done or done twice is seen, and so is a PING that fails."""
        insert = f"insert into turns values ({self.number}, {self.done}, %s)"
        _expect(await self._timed(Command.QUERY, "begin"), (Ok(AUTOCOMMIT | IN_TRANSACTION),))
        for half in ("1", "2"):
            answer = await self._timed(Command.QUERY, insert % half)
            _expect(answer, (Ok(AUTOCOMMIT | IN_TRANSACTION, affected=1),))
        _expect(await self._timed(Command.QUERY, "commit"), (Ok(AUTOCOMMIT),))
        _expect(await self._timed(Command.PING), (Ok(AUTOCOMMIT),))
        _expect(await self._cell("select @mine"), f"of {self.number}")
        self.seen.add(await self.place())

    async def check(self) -> None:
        """All that it has is still there, and all that it has done was done once."""
        mine = f"of {self.number}"
        _expect(await self._cell("select concat(database(), ' ', @mine)"), f"{DATABASE} {mine}")
        _expect(await self._cell("execute named"), f"named {mine}")
        (rows,) = await self._timed(Command.STMT_EXECUTE, executed(self.wire.number, (b"x",)))
        assert isinstance(rows, Rows), rows
        text = f"numbered x {mine}".encode()
        _expect(rows.rows, (b"\0\0" + bytes((len(text),)) + text,))
        counted = f"select concat(count(*), ' ', count(distinct turn)) from turns where guest = {self.number}"
        _expect(await self._cell(counted), f"{2 * self.done} {self.done}")

    async def place(self) -> str:
        """The address of the node that it is on."""
        return await self._cell("select @@hostname")

    def leave(self) -> None:
        """At once."""
        self.wire.writer.transport.abort()

    async def _cell(self, text: str) -> str:
        (rows,) = await self._timed(Command.QUERY, text)
        assert isinstance(rows, Rows), rows
        ((cell,),) = rows.cells()
        assert cell is not None
        return cell.decode()

    async def _timed(self, command: Command, body: str | bytes = b"") -> Answer:
        began = time.monotonic()
        answer = await self.wire.ask(command, body.encode() if isinstance(body, str) else body)
        self.slowest = max(self.slowest, time.monotonic() - began)
        return answer


def _expect(found: object, expected: object) -> None:
    if found != expected:
        raise Disturbed(f"{found!r} came instead of {expected!r}")


async def _run(wire: Wire, *statements: str) -> None:
    for statement in statements:
        (part,) = await wire.query(statement)
        assert isinstance(part, Ok), part


@asynccontextmanager
async def guests(port: int, count: int) -> AsyncIterator[list[Guest]]:
    """So many sessions, with a table for what they do; cut at the end."""
    host = await Wire.login("127.0.0.1", port)
    await _run(
        host,
        f"create database {DATABASE}",
        f"create table {DATABASE}.turns (guest int, turn int, half int, primary key (guest, turn, half))",
    )
    await host.leave()
    there: list[Guest] = []
    try:
        for number in range(count):
            there.append(await Guest.arrive(port, number))
        yield there
    finally:
        for guest in there:
            guest.leave()
