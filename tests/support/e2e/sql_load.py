"""Load for end-to-end tests: sysbench on long sessions, and a stream of short ones."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncmy
from asyncmy.errors import MySQLError

# Uniform, so that few transactions deadlock.
TABLE_OPTIONS = ("--tables=2", "--table-size=10000", "--rand-type=uniform")


@dataclass(frozen=True, slots=True)
class SessionAttempt:
    """One short session: when it began and ended (monotonic seconds), and where it was served or why not."""

    started_at: float
    ended_at: float
    port: int | None
    error: str = ""


@dataclass(slots=True)
class ShortSessions:
    """Sessions that log in, ask on which node they are, and leave; one after the other on each lane."""

    port: int
    attempts: list[SessionAttempt] = field(default_factory=list)
    is_stopping: bool = False  # no more are begun
    _attempt_added: asyncio.Condition = field(default_factory=asyncio.Condition)

    def failures(self, since: float = 0.0) -> list[SessionAttempt]:
        """Those that began at or after `since` and failed."""
        return [a for a in self.attempts if a.started_at >= since and a.port is None]

    def nodes(self, since: float) -> set[int]:
        """SQL ports of the nodes that served those that began at or after `since`."""
        return {a.port for a in self.attempts if a.started_at >= since and a.port is not None}

    async def wait_for_attempts(self, count: int) -> None:
        """Wait until so many more have ended."""
        goal = len(self.attempts) + count
        async with asyncio.timeout(30), self._attempt_added:
            await self._attempt_added.wait_for(lambda: len(self.attempts) >= goal)

    async def wait_for_first_on(self, port: int, timeout: float) -> float:
        """Wait for the first one that a node serves; when it ended."""
        async with asyncio.timeout(timeout), self._attempt_added:
            await self._attempt_added.wait_for(lambda: port in self.nodes(0.0))
        return next(a.ended_at for a in self.attempts if a.port == port)

    async def _run_lane(self) -> None:
        while not self.is_stopping:
            began = time.monotonic()
            try:
                async with asyncio.timeout(10):
                    port, error = await find_serving_port(self.port), ""
            except (MySQLError, OSError, TimeoutError) as failure:
                port, error = None, f"{type(failure).__name__}: {failure}"
            async with self._attempt_added:
                self.attempts.append(SessionAttempt(began, time.monotonic(), port, error))
                self._attempt_added.notify_all()
            await asyncio.sleep(0.005)


@asynccontextmanager
async def run_short_sessions(port: int, lanes: int = 2) -> AsyncIterator[ShortSessions]:
    """A stream of short sessions for as long as the block lasts."""
    sessions = ShortSessions(port)
    running = [asyncio.create_task(sessions._run_lane()) for _ in range(lanes)]
    try:
        yield sessions
    finally:
        # Not cancelled: half a login would be left behind, and what a lane died of would not be seen.
        sessions.is_stopping = True
        await asyncio.gather(*running)


async def find_serving_port(port: int) -> int:
    """The SQL port of the node that serves a new session through `port`."""
    connection = await asyncmy.connect(host="127.0.0.1", port=port, user="root", connect_timeout=10)
    try:
        async with connection.cursor() as cursor:
            await cursor.execute("select @@port")
            (found,) = await cursor.fetchone()
            return int(found)
    finally:
        connection.close()


class Sysbench:
    """A running `sysbench oltp_read_write`, which ends with an error at anything but a deadlock."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait_for_failure(self) -> str:
        """Wait for its end; what it said if it failed, empty when all went well."""
        output, _ = await self._process.communicate()
        text = output.decode(errors="replace")
        if self._process.returncode == 0 and re.search(r"reconnects:\s+0 ", text):
            return ""
        return text or f"ended with {self._process.returncode}"


@asynccontextmanager
async def run_sysbench(
    port: int, database: str, *, seconds: int, threads: int = 16
) -> AsyncIterator[Sysbench]:
    """`oltp_read_write` for some seconds, a session a thread; killed if the block ends before it does."""
    process = await _start(port, database, [f"--threads={threads}", f"--time={seconds}", "run"])
    try:
        yield Sysbench(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def prepare_sysbench(port: int, database: str) -> None:
    """Fill the tables that sysbench works on."""
    process = await _start(port, database, ["prepare"])
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode(errors="replace")


async def _start(port: int, database: str, arguments: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        "sysbench",
        "oltp_read_write",
        "--db-driver=mysql",
        "--mysql-host=127.0.0.1",
        f"--mysql-port={port}",
        "--mysql-user=root",
        f"--mysql-db={database}",
        *TABLE_OPTIONS,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
