"""A TiDB server dies that has nearly all sessions, and all their clients reconnect at once.

TIDEVOY_SOAK=1: 10,000 clients of two Envoys on the same port.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest

from controlplane.xds.bootstrap import module_path
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.envoy import EnvoyProcess
from sandbox.local_cluster import LocalCluster
from sandbox.server import http_client
from sandbox.tidb import Tidb
from tests.support.background import run_in_background
from tests.support.soak import SOAK
from tests.support.tidb.logins import LoginRejected, describe, log_in
from tests.support.tidb.node_operations import drain, undrain, wait_for_state
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

CLIENTS = 10_000 if SOAK else 1_000
RESTORABLE = CLIENTS // 20
"""Sessions that migrated shortly before, so that Envoys know their states."""
MAX_SECONDS = 120.0 if SOAK else 30.0
"""Until all clients have a session again."""
_PARALLEL_LOGINS = 50
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.05, 5.0
_SAMPLE_SECONDS = 0.5


class Storm:
    """Clients that reconnect as soon as their session has ended, and back off only after an error."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: list[RawClient] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.ends: Counter[str] = Counter()
        """How sessions ended: the code of an error, or `EOF` or `RST`."""
        self.login_errors: Counter[str] = Counter()
        self.last_login_at = 0.0
        self.longest_login = 0.0
        self.reconnected = 0

    @classmethod
    @asynccontextmanager
    async def run(cls, port: int) -> AsyncIterator[Storm]:
        """Close all connections at the end."""
        storm = cls(port)
        try:
            yield storm
        finally:
            try:
                await storm.stop()
            finally:
                for client in storm._clients:
                    client.writer.transport.abort()

    @property
    def clients(self) -> list[RawClient]:
        """The current connection of each client, in the order of `add`."""
        return self._clients

    async def add(self, count: int) -> None:
        """Log in so many more clients, some of them at a time."""
        limit = asyncio.Semaphore(_PARALLEL_LOGINS)

        async def log_in_one() -> RawClient:
            async with limit:
                return await log_in(self._port)

        self._clients += await asyncio.gather(*(log_in_one() for _ in range(count)))

    def start(self) -> None:
        """From now on, clients whose sessions end reconnect."""
        self._tasks = [asyncio.create_task(self._reconnect(number)) for number in range(len(self._clients))]

    async def stop(self) -> None:
        """From now on, clients no longer wait for the end of their sessions."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _reconnect(self, number: int) -> None:
        while True:
            self.ends[await _end_of(self._clients[number])] += 1
            self._clients[number].writer.transport.abort()
            self._clients[number] = await self._log_in_again()
            self.reconnected += 1
            self.last_login_at = time.monotonic()

    async def _log_in_again(self) -> RawClient:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            started_at = time.monotonic()
            try:
                return await log_in(self._port)
            except (LoginRejected, OSError, EOFError, TimeoutError) as error:
                self.login_errors[describe(error)] += 1
            finally:
                self.longest_login = max(self.longest_login, time.monotonic() - started_at)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)


async def _end_of(client: RawClient) -> str:
    """Wait for the end of an idle session; return how it ended."""
    try:
        data = await client.reader.read()
    except ConnectionError:
        return "RST"
    return str(int.from_bytes(data[5:7], "little")) if data[4:5] == b"\xff" else "EOF"


async def sample_cpu(process: psutil.Process, peaks: list[float]) -> None:
    """Append the CPU usage of each interval, in cores."""
    process.cpu_percent()
    while True:
        await asyncio.sleep(_SAMPLE_SECONDS)
        peaks.append(process.cpu_percent() / 100)


async def sessions_on(node: Tidb) -> int:
    """Return TiDB's own number of sessions."""
    async with http_client(node.status_url) as client:
        return int((await client.get("/status")).raise_for_status().json()["connections"])


@pytest.fixture
async def envoys(stack: LocalCluster, tmp_path: Path) -> AsyncIterator[list[EnvoyProcess]]:
    """Yield the Envoys. In the long form there are two, because of the limit of open files of a process."""
    async with AsyncExitStack() as exit_stack:
        running = [stack.envoy]
        if SOAK:
            bootstrap = render_bootstrap(
                stack.control_plane.parsed_settings(),
                control_planes=[f"127.0.0.1:{stack.advertised.xds}"],
                node_id="envoy-2",
                admin="127.0.0.1:0",
                module=str(module_path.find_module()),
            )
            second = EnvoyProcess(bootstrap, tmp_path, name="envoy-2", concurrency=2)
            running.append(await exit_stack.enter_async_context(second))
            await wait_until(second.is_live)
        yield running
        assert [line for envoy in running for line in envoy.bugs()] == []


@pytest.mark.timeout(900 if SOAK else 120)
async def test_all_clients_reconnect_after_the_death_of_their_server(
    stack: LocalCluster, envoys: list[EnvoyProcess]
) -> None:
    dying, *survivors = stack.tidb
    async with Storm.run(stack.sql_port) as storm:
        # These sessions reach the server by migration.
        await drain(stack, dying)
        await drain(stack, survivors[0])
        await storm.add(RESTORABLE)
        await undrain(stack, dying)
        await drain(stack, survivors[1])
        await storm.add(CLIENTS - RESTORABLE)
        for node in survivors:
            await undrain(stack, node)
        assert await sessions_on(dying) >= CLIENTS
        storm.start()
        cpu: list[list[float]] = [[] for _ in envoys]
        samplers = [
            sample_cpu(psutil.Process(envoy.process.pid), peaks)
            for envoy, peaks in zip(envoys, cpu, strict=True)
        ]
        counts: list[int] = []

        async def are_all_back() -> bool:
            counts[:] = [await sessions_on(node) for node in survivors]
            # A server counts a session before its client has received the answer to the login.
            return sum(counts) >= CLIENTS and storm.reconnected >= CLIENTS - RESTORABLE

        async with run_in_background(*samplers):
            killed_at = time.monotonic()
            await dying.kill()
            await wait_until(are_all_back, MAX_SECONDS)
            seconds = time.monotonic() - killed_at
        await storm.stop()
        await wait_for_state(stack, dying, "unhealthy")
        states = await stack.states()
        print(
            f"\ndrill reconnect_storm: {CLIENTS} clients, all back after {seconds:.1f} s (last login"
            f" {storm.last_login_at - killed_at:.1f} s); ends {dict(storm.ends)}, reconnected"
            f" {storm.reconnected}; login errors {dict(storm.login_errors)}, longest login"
            f" {storm.longest_login:.2f} s; sessions per server {counts}; CPU peak of Envoys"
            f" {[round(max(peaks, default=0.0), 1) for peaks in cpu]} cores"
        )
        answers = await asyncio.gather(*(client.query("do 1") for client in storm.clients[:RESTORABLE]))
        assert [answer[0] for answer in answers] == [0] * RESTORABLE
        assert storm.reconnected == CLIENTS - RESTORABLE
        assert min(counts) > 0.8 * max(counts)
        assert [states[node.address] for node in survivors] == ["active", "active"]
        assert (await stack.api.get("/readyz")).status_code == 200
        for envoy in envoys:
            assert await envoy.is_live()
