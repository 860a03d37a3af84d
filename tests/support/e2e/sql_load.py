"""Load for end-to-end tests: a stream of short sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncmy
from asyncmy.errors import MySQLError

from controlplane.aio import wait_at_most

LANE_PAUSE_SECONDS = 0.02
"""Pause after each session. Without pauses, the sessions would use a whole core, which other tests need."""


@dataclass(frozen=True, slots=True)
class SessionAttempt:
    """One short session: its start and end (monotonic seconds), and its node's port or its error."""

    started_at: float
    ended_at: float
    port: int | None
    error: str = ""


@dataclass(slots=True)
class ShortSessions:
    """Sessions that log in, query their node, and quit. Each lane is a task that runs them in turn."""

    port: int
    attempts: list[SessionAttempt] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # If set, no more sessions are started.
    _attempt_added: asyncio.Condition = field(default_factory=asyncio.Condition)

    def failures(self, since: float = 0.0) -> list[SessionAttempt]:
        """Return the failed sessions that started at or after `since`."""
        return [a for a in self.attempts if a.started_at >= since and a.port is None]

    def nodes(self, since: float) -> set[int]:
        """Return the SQL ports of the nodes that served sessions started at or after `since`."""
        return {a.port for a in self.attempts if a.started_at >= since and a.port is not None}

    async def wait_for_attempts(self, count: int) -> None:
        """Wait until this many more sessions have ended."""
        target = len(self.attempts) + count
        async with asyncio.timeout(90), self._attempt_added:
            await self._attempt_added.wait_for(lambda: len(self.attempts) >= target)

    async def wait_for_first_on(self, port: int, timeout: float) -> None:
        """Wait for the first session on the node with the SQL port `port`."""
        async with asyncio.timeout(timeout), self._attempt_added:
            await self._attempt_added.wait_for(lambda: port in self.nodes(0.0))

    async def _run_lane(self) -> None:
        while not self.stopping.is_set():
            started_at = time.monotonic()
            try:
                async with asyncio.timeout(10):
                    port, error = await node_port_of_new_session(self.port), ""
            except (MySQLError, OSError, TimeoutError) as failure:
                port, error = None, f"{type(failure).__name__}: {failure}"
            async with self._attempt_added:
                self.attempts.append(SessionAttempt(started_at, time.monotonic(), port, error))
                self._attempt_added.notify_all()
            await wait_at_most(self.stopping, LANE_PAUSE_SECONDS)


@asynccontextmanager
async def run_short_sessions(port: int, lanes: int = 2) -> AsyncIterator[ShortSessions]:
    """Run short sessions during the block."""
    sessions = ShortSessions(port)
    tasks = [asyncio.create_task(sessions._run_lane()) for _ in range(lanes)]
    try:
        yield sessions
    finally:
        # Do not cancel the lanes: a half-finished login would remain, and the error of a lane would be lost.
        sessions.stopping.set()
        await asyncio.gather(*tasks)


async def node_port_of_new_session(port: int) -> int:
    """Return the SQL port of the node that serves a new session through `port`."""
    connection = await asyncmy.connect(host="127.0.0.1", port=port, user="root", connect_timeout=10)
    try:
        async with connection.cursor() as cursor:
            await cursor.execute("select @@port")
            (node_port,) = await cursor.fetchone()
            return int(node_port)
    finally:
        connection.close()
