"""Clients that run statements at a bounded rate while a drill breaks servers, and record what they notice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Self

import pymysql

from tests.support.tidb.sessions import Connection, connect, query_rows
from tests.support.waiting import wait_until

INCREMENT = "update drill_load set n = n + 1 where id = {client}"
"""Needs a timestamp from PD, and its result shows whether a commit was lost."""
_CONNECTION_ERRORS = (0, 2006, 2013)
"""PyMySQL's codes for a connection that is closed or lost."""
_RECONNECT_SECONDS = 0.2


class DrillLoad:
    """Sessions that run `statement` from `async with` on until its end. Each session has a thread.

    `statement` may contain `{client}`, the number of the session. By default, each session increments its
    row of the table `drill_load`, which this class creates. With `reconnect`, a client whose session has
    ended logs in again; otherwise it stops. An error that leaves the session open stops no client. A client
    gives its session up if a statement takes `timeout_seconds`: by default longer than the 120 s for which
    TiDB waits for PD.
    """

    def __init__(
        self,
        port: int,
        database: str,
        *,
        clients: int = 8,
        statements_per_second: float = 100,
        statement: str = INCREMENT,
        reconnect: bool = False,
        timeout_seconds: float = 150.0,
    ) -> None:
        self.errors: list[str] = []
        """One text for each error: seconds after the start, number of the session, error."""
        self.lost_sessions = 0
        self.slowest_seconds = 0.0
        """The longest time from a statement to its result or error."""
        self.increments = [0] * clients
        """The number of successful statements by client."""
        self._port, self._database, self._statement = port, database, statement
        self._interval = clients / statements_per_second
        self._reconnect, self._timeout = reconnect, timeout_seconds
        self._started_at = 0.0
        self._answered: set[int] = set()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"drill-{number}", daemon=True)
            for number in range(clients)
        ]

    async def __aenter__(self) -> Self:
        """Create the table and start the clients; return when each has run a statement or got an error."""
        if self._statement == INCREMENT:
            await asyncio.to_thread(self._create_table)
        self._started_at = time.monotonic()
        try:
            for thread in self._threads:
                thread.start()
            await self._wait_until(lambda: len(self._answered) == len(self._threads))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                await asyncio.to_thread(thread.join)

    @property
    def statements(self) -> int:
        """How many statements succeeded."""
        return sum(self.increments)

    async def wait_for_statements(self, timeout_seconds: float = 30.0) -> float:
        """Wait until every client has run one more statement; return how many seconds that took.

        Raises AssertionError, with the errors so far.
        """
        before, started_at = list(self.increments), time.monotonic()
        await self._wait_until(
            lambda: all(now > then for now, then in zip(self.increments, before, strict=True)),
            timeout_seconds,
        )
        return time.monotonic() - started_at

    async def _wait_until(self, condition: Callable[[], bool], timeout_seconds: float = 30.0) -> None:
        try:
            await wait_until(condition, timeout_seconds)
        except TimeoutError:
            raise AssertionError(
                f"a client got no answer within {timeout_seconds:.0f} s; errors: {self.errors}"
            ) from None

    def _create_table(self) -> None:
        rows = ", ".join(f"({number}, 0)" for number in range(len(self._threads)))
        with connect(self._port, self._database) as connection:
            query_rows(connection, "create table if not exists drill_load (id int primary key, n int)")
            query_rows(connection, f"replace into drill_load values {rows}")

    def _run(self, number: int) -> None:
        connection: Connection | None = None
        statement = self._statement.format(client=number)
        # The clients' first statements are spread over one interval.
        self._stop.wait(self._interval * number / len(self._threads))
        while not self._stop.is_set():
            started_at = time.monotonic()
            try:
                if connection is None:
                    connection = connect(self._port, self._database, read_timeout=self._timeout)
                query_rows(connection, statement)
                self._record(number, started_at)
            except Exception as error:
                is_lost = connection is None or _ends_session(error)
                self._record(number, started_at, error, is_lost=is_lost and connection is not None)
                if is_lost:
                    if connection is not None and connection.open:
                        connection.close()
                    connection = None
                    if not self._reconnect or self._stop.wait(_RECONNECT_SECONDS):
                        return
            self._stop.wait(started_at + self._interval - time.monotonic())
        if connection is not None:
            connection.close()

    def _record(
        self, number: int, started_at: float, error: Exception | None = None, *, is_lost: bool = False
    ) -> None:
        now = time.monotonic()
        with self._lock:
            self.slowest_seconds = max(self.slowest_seconds, now - started_at)
            self._answered.add(number)
            if error is None:
                self.increments[number] += 1
                return
            self.errors.append(f"{now - self._started_at:.1f} {number} {error!r}")
            self.lost_sessions += is_lost


def _ends_session(error: Exception) -> bool:
    return not isinstance(error, pymysql.MySQLError) or error.args[0] in _CONNECTION_ERRORS
