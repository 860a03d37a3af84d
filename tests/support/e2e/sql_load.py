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
    """One short session: its start and end (monotonic seconds), and its node's port or its error."""

    started_at: float
    ended_at: float
    port: int | None
    error: str = ""


@dataclass(slots=True)
class ShortSessions:
    """Sessions that log in, query their node, and quit; one after the other on each lane."""

    port: int
    attempts: list[SessionAttempt] = field(default_factory=list)
    is_stopping: bool = False  # No more sessions are started.
    _attempt_added: asyncio.Condition = field(default_factory=asyncio.Condition)

    def failures(self, since: float = 0.0) -> list[SessionAttempt]:
        """Return the sessions started at or after `since` that failed."""
        return [a for a in self.attempts if a.started_at >= since and a.port is None]

    def nodes(self, since: float) -> set[int]:
        """Return the SQL ports of the nodes of the sessions started at or after `since`."""
        return {a.port for a in self.attempts if a.started_at >= since and a.port is not None}

    async def wait_for_attempts(self, count: int) -> None:
        """Wait until this many more sessions have ended."""
        target = len(self.attempts) + count
        async with asyncio.timeout(30), self._attempt_added:
            await self._attempt_added.wait_for(lambda: len(self.attempts) >= target)

    async def wait_for_first_on(self, port: int, timeout: float) -> float:
        """Wait for the first session on a node; return when it ended."""
        async with asyncio.timeout(timeout), self._attempt_added:
            await self._attempt_added.wait_for(lambda: port in self.nodes(0.0))
        return next(a.ended_at for a in self.attempts if a.port == port)

    async def _run_lane(self) -> None:
        while not self.is_stopping:
            started_at = time.monotonic()
            try:
                async with asyncio.timeout(10):
                    port, error = await find_serving_port(self.port), ""
            except (MySQLError, OSError, TimeoutError) as failure:
                port, error = None, f"{type(failure).__name__}: {failure}"
            async with self._attempt_added:
                self.attempts.append(SessionAttempt(started_at, time.monotonic(), port, error))
                self._attempt_added.notify_all()
            await asyncio.sleep(0.005)


@asynccontextmanager
async def run_short_sessions(port: int, lanes: int = 2) -> AsyncIterator[ShortSessions]:
    """Run short sessions during the block."""
    sessions = ShortSessions(port)
    tasks = [asyncio.create_task(sessions._run_lane()) for _ in range(lanes)]
    try:
        yield sessions
    finally:
        # Not cancelled: a half-finished login would remain, and the error of a lane would be lost.
        sessions.is_stopping = True
        await asyncio.gather(*tasks)


async def find_serving_port(port: int) -> int:
    """Return the SQL port of the node that serves a new session through `port`."""
    connection = await asyncmy.connect(host="127.0.0.1", port=port, user="root", connect_timeout=10)
    try:
        async with connection.cursor() as cursor:
            await cursor.execute("select @@port")
            (node_port,) = await cursor.fetchone()
            return int(node_port)
    finally:
        connection.close()


class Sysbench:
    """A running `sysbench oltp_read_write`, which fails at any error except a deadlock."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait_for_failure(self) -> str:
        """Wait for its end; return its output if it failed, empty if it succeeded."""
        output, _ = await self._process.communicate()
        text = output.decode(errors="replace")
        if self._process.returncode == 0 and re.search(r"reconnects:\s+0 ", text):
            return ""
        return text or f"ended with {self._process.returncode}"


@asynccontextmanager
async def run_sysbench(
    port: int, database: str, *, seconds: int, threads: int = 16
) -> AsyncIterator[Sysbench]:
    """Run `oltp_read_write` for some seconds, one session per thread; killed if the block ends earlier."""
    process = await _start(port, database, [f"--threads={threads}", f"--time={seconds}", "run"])
    try:
        yield Sysbench(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def prepare_sysbench(port: int, database: str) -> None:
    """Fill the tables for sysbench."""
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
