"""asyncmy, a driver in Cython for asyncio, called from synchronous code."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any

import asyncmy
from asyncmy.cursors import SSCursor
from asyncmy.errors import MySQLError, NotSupportedError

from tests.support.clients.python.session import FETCH_ROWS, DriverSession, NotSupported, Rows

_MULTI_STATEMENTS = 1 << 16
_UNSUPPORTED = 1295  # ER_UNSUPPORTED_PS


class AsyncmySession(DriverSession):
    """One connection of asyncmy, with its own event loop: a step may use two connections in two threads."""

    misreads_large_text = True

    def __init__(self, *arguments: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._run = self._loop.run_until_complete
        super().__init__(*arguments)

    def connect(self) -> None:
        tls: dict[str, Any] = {}
        if self.plan.ca:
            tls["ssl"] = ssl.create_default_context(cafile=self.plan.ca)
        connect_future = asyncmy.connect(
            **self.connection_arguments(),
            local_infile=True,
            client_flag=_MULTI_STATEMENTS,
            binary_prefix=True,
            max_allowed_packet=128 << 20,
            **tls,
        )
        self._connection: Any = self._run(_awaited(connect_future))

    @classmethod
    def error_code(cls, error: Exception) -> int | None:
        return error.args[0] if isinstance(error, MySQLError) and error.args else None

    def close(self) -> None:
        self._run(self._connection.ensure_closed())
        self._run(asyncio.sleep(0))  # The transport closes its socket in a later iteration of the loop.
        self._loop.close()

    def text(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        async def run() -> Rows:
            async with self._connection.cursor() as cursor:
                await cursor.execute(sql.replace("?", "%s"), tuple(parameters) or None)
                return list(await cursor.fetchall())

        try:
            return self._run(run())
        except TypeError as error:
            if not sql.startswith("load data"):
                raise
            # asyncmy 0.2.18 declares the file name as text, but passes bytes.
            raise NotSupported(f"broken in the driver itself: {error}") from error

    def prepared(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        async def run() -> Rows:
            async with await self._connection.prepare(sql) as statement:
                result = await statement.execute(tuple(parameters))
                return list(result.rows or ())

        return self._run(run())

    def begin(self) -> None:
        self._run(self._connection.begin())

    def commit(self) -> None:
        self._run(self._connection.commit())

    def rollback(self) -> None:
        self._run(self._connection.rollback())

    def multi_statement(self, sql: str) -> list[Rows]:
        async def run() -> list[Rows]:
            results = []
            async with self._connection.cursor() as cursor:
                await cursor.execute(sql)
                while True:
                    if cursor.description:
                        results.append(list(await cursor.fetchall()))
                    if not await cursor.nextset():
                        return results

        return self._run(run())

    def stream(self, sql: str) -> tuple[int, int]:
        async def run() -> tuple[int, int]:
            count = total = 0
            async with self._connection.cursor(SSCursor) as cursor:
                await cursor.execute(sql)
                while rows := await cursor.fetchmany(FETCH_ROWS):
                    count += len(rows)
                    total += sum(row[0] for row in rows)
            return count, total

        return self._run(run())

    def stream_prepared(self, sql: str) -> tuple[int, int]:
        rows = self.prepared(sql)
        return len(rows), sum(row[0] for row in rows)

    def begin_stream(self, sql: str, rows: int) -> None:
        async def run() -> int:
            self._cursor = self._connection.cursor(SSCursor)
            await self._cursor.execute(sql)
            return len(await self._cursor.fetchmany(rows))

        assert self._run(run()) == rows

    def batch(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        async def run() -> None:
            async with await self._connection.prepare(sql) as statement:
                try:
                    await statement.execute_bulk(rows)  # MariaDB's own COM_STMT_BULK_EXECUTE
                except MySQLError as error:
                    # The server is not MariaDB, or the driver did not request the capability because of TLS.
                    if not isinstance(error, NotSupportedError) and self.error_code(error) != _UNSUPPORTED:
                        raise
                    for row in rows:
                        await statement.execute(row)

        self._run(run())

    def ping(self) -> None:
        self._run(self._connection.ping(reconnect=False))


async def _awaited(waiting: Any) -> Any:
    return await waiting
