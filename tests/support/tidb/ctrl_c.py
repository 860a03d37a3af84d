"""Clients that run statements and press Ctrl-C, and what TiDB does then."""

from __future__ import annotations

import asyncio
import random
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest

from sandbox.tidb import Tidb
from tests.support.tidb.kill_victims import log_kills
from tests.support.tidb.mysql_terminal import MySqlTerminal, run_mysql_terminal
from tests.support.tidb.sessions import connect_directly, query_rows
from tests.support.waiting import wait_until

_RUNNING_QUERY = "select info from information_schema.processlist where info like 'select sleep%'"
_MARKER = re.compile(r"select sleep\(100\), '(.+)'")
_WATCH_INTERVAL_SECONDS = 0.05
_START_SECONDS = 10.0
_RESULT_SECONDS = 3.0
_INTERRUPTED = re.compile(r"1 row in set|ERROR 1317|ERROR (?P<broken>1105) .*invalid memory address")
"""`sleep` returns 1 if a KILL ends it. Error 1105 is a race in TiDB v8.5.3, also without Tidevoy: `killQuery`
may remove the executor of a statement that has ended, before the session reads the end of the result set
(`recordSet.Finish` in pkg/executor/adapter.go)."""
_LOST = re.compile(r"ERROR (2006|2013)")
_KILLED = re.compile(r"\[kill\] \[conn=(\d+)\] \[query=true\]")
_TIMED_OUT = re.compile(r'\["read packet timeout, close this connection"\].*?\[conn=(\d+)\]')


class RunningStatements:
    """The statements of `CtrlCClients` that the servers run at the moment."""

    def __init__(self) -> None:
        self._markers: set[str] = set()

    def __contains__(self, marker: str) -> bool:
        return marker in self._markers

    @classmethod
    @asynccontextmanager
    async def watch(cls, nodes: Sequence[Tidb]) -> AsyncIterator[RunningStatements]:
        """Read the process lists all the time during the block."""
        running = cls()
        admins = [connect_directly(node) for node in nodes]

        async def watch() -> None:
            while True:
                listed = await asyncio.to_thread(
                    lambda: [row[0] for admin in admins for row in query_rows(admin, _RUNNING_QUERY)]
                )
                running._markers = {match[1] for text in listed if (match := _MARKER.search(str(text)))}
                await asyncio.sleep(_WATCH_INTERVAL_SECONDS)

        task = asyncio.create_task(watch())
        try:
            yield running
        finally:
            task.cancel()
            await asyncio.wait({task})
            for admin in admins:
                admin.close()


class CtrlCClients:
    """Clients on terminals. A statement of theirs ends only when its own client presses Ctrl-C."""

    def __init__(self, name: str, running: RunningStatements, terminals: AsyncExitStack) -> None:
        self._name, self._running, self._terminals = name, running, terminals
        self._clients: list[tuple[int, MySqlTerminal]] = []
        # Statements of a test that has failed may still run.
        self._marker = f"{name} {uuid.uuid4().hex[:8]}"
        self.seconds: list[float] = []
        """How long each statement took to end after Ctrl-C."""
        self.lost = 0
        """How many sessions the servers have ended."""
        self._broken = 0

    async def open(self, ports: Sequence[int], count: int) -> None:
        """Open this many sessions, spread over the ports."""
        for index in range(count):
            port = ports[index % len(ports)]
            self._clients.append((port, await self._open(port)))

    async def press(self, rounds: int, pause: float) -> None:
        """Each client presses Ctrl-C `rounds` times. `pause`: the longest time between two statements."""
        await asyncio.gather(
            *(
                self._press(f"{self._marker}-{index}", port, client, rounds, pause)
                for index, (port, client) in enumerate(self._clients)
            )
        )

    def describe(self) -> str:
        seconds = sorted(self.seconds)
        return (
            f"{self._name}: {len(seconds)} presses of Ctrl-C ended as many statements after"
            f" {seconds[len(seconds) // 2] * 1000:.0f} ms (median), {seconds[-1] * 1000:.0f} ms (longest);"
            f" TiDB ended {self.lost} sessions, and {self._broken} statements with error 1105"
        )

    async def _open(self, port: int) -> MySqlTerminal:
        return await self._terminals.enter_async_context(run_mysql_terminal(port))

    async def _press(self, name: str, port: int, client: MySqlTerminal, rounds: int, pause: float) -> None:
        for number in range(rounds):
            await asyncio.sleep(random.uniform(0, pause))
            marker = f"{name}-{number}"
            client = await self._start(client, port, marker)
            await asyncio.sleep(random.uniform(0, 0.3))
            assert not client.has_result, f"{marker} has ended before Ctrl-C: {client.text!r}"
            pressed = time.monotonic()
            client.press_ctrl_c()
            try:
                await client.wait_for_result(_RESULT_SECONDS)
            except TimeoutError:
                pytest.fail(f"{marker} still runs after Ctrl-C: {client.text!r}")
            self.seconds.append(time.monotonic() - pressed)
            interrupted = _INTERRUPTED.search(client.text)
            assert interrupted, f"{marker} has not been interrupted: {client.text!r}"
            self._broken += interrupted["broken"] is not None
        client.start("do 0;")
        self.lost += _is_lost(await client.wait_for_result(_RESULT_SECONDS))

    async def _start(self, client: MySqlTerminal, port: int, marker: str) -> MySqlTerminal:
        """Start a statement, in a new session if the session was lost. Return when a server runs it."""
        while True:
            client.start(f"select sleep(100), '{marker}';")
            await wait_until(partial(self._has_begun, client, marker), _START_SECONDS)
            if not client.has_result:
                return client
            assert _is_lost(client.text), client.text
            self.lost += 1
            client = await self._open(port)

    def _has_begun(self, client: MySqlTerminal, marker: str) -> bool:
        return marker in self._running or client.has_result


def _is_lost(text: str) -> bool:
    return _LOST.search(text) is not None


class QueryKillLog:
    """What the servers log about KILL QUERY. Lines of earlier tests do not count."""

    def __init__(self, nodes: Sequence[Tidb]) -> None:
        self._earlier_lines = [(node, len(node.log_lines_containing(""))) for node in nodes]

    @classmethod
    @asynccontextmanager
    async def read(cls, nodes: Sequence[Tidb]) -> AsyncIterator[QueryKillLog]:
        """Make the servers log during the block."""
        async with log_kills(nodes):
            yield cls(nodes)

    def killed(self) -> list[tuple[int, int]]:
        """Return SQL port and connection id of each KILL QUERY, as logged by the node of the session."""
        return self._find(_KILLED)

    def timed_out(self) -> list[tuple[int, int]]:
        """Return SQL port and connection id of each session that ended since no command came in time."""
        return self._find(_TIMED_OUT)

    def _find(self, pattern: re.Pattern[str]) -> list[tuple[int, int]]:
        return [
            (node.port, int(match[1]))
            for node, earlier in self._earlier_lines
            for line in node.log_lines_containing("")[earlier:]
            if (match := pattern.search(line))
        ]
