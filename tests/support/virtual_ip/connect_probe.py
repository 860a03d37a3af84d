"""A client that logs in all the time, and the longest time in which it did not succeed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

from tests.support.e2e.cluster import CountingClient
from tests.support.tidb_sim_clients import error_code
from tests.support.virtual_ip.bridged_network import Machine
from tests.support.waiting import wait_until

_INTERVAL_SECONDS = 0.02
_TIMEOUT_SECONDS = 0.5
"""Shorter than the second after which the kernel sends an unanswered SYN again."""
_LOGINS = 50
"""More than the attempts that can be under way at once: `_TIMEOUT_SECONDS / _INTERVAL_SECONDS`."""
_WAIT_TIMEOUT_SECONDS = 30.0


async def connect(machine: Machine, address: str, port: int) -> CountingClient:
    """Connect from a machine without sending anything. Raises OSError."""
    client_socket = machine.create_socket()
    try:
        await asyncio.get_running_loop().sock_connect(client_socket, (address, port))
    except BaseException:
        client_socket.close()
        raise
    return CountingClient(*await asyncio.open_connection(sock=client_socket))


class ConnectProbe:
    """The times of all successful logins. Each attempt has a connection of its own."""

    def __init__(self, machine: Machine, address: str, port: int) -> None:
        self._target = (machine, address, port)
        self._successes = [time.monotonic()]

    def restart_measurement(self) -> None:
        """Forget all earlier logins."""
        self._successes = [time.monotonic()]

    def longest_gap(self) -> float:
        """Return the longest time between two successful logins, in seconds."""
        return max(after - before for before, after in pairwise(self._successes))

    async def wait_for_logins(self) -> None:
        """Wait until several logins that begin now have succeeded."""
        wanted = len(self._successes) + _LOGINS
        await wait_until(lambda: len(self._successes) >= wanted, _WAIT_TIMEOUT_SECONDS)

    async def run(self, stopping: asyncio.Event) -> None:
        """Start attempts until `stopping` is set. They overlap, so a slow one delays no other."""
        async with asyncio.TaskGroup() as attempts:
            while not stopping.is_set():
                attempts.create_task(self._attempt())
                with suppress(TimeoutError):
                    async with asyncio.timeout(_INTERVAL_SECONDS):
                        await stopping.wait()

    async def _attempt(self) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                client = await connect(*self._target)
                try:
                    is_logged_in = error_code(await client.log_in()) == 0
                finally:
                    client.writer.transport.abort()
        except (OSError, EOFError, TimeoutError):
            return
        if is_logged_in:
            self._successes.append(time.monotonic())


@asynccontextmanager
async def run_connect_probe(machine: Machine, address: str, port: int) -> AsyncIterator[ConnectProbe]:
    """Log in from a machine every 20 ms during the block, which begins when logins succeed."""
    probe = ConnectProbe(machine, address, port)
    stopping = asyncio.Event()
    task = asyncio.create_task(probe.run(stopping))
    try:
        await probe.wait_for_logins()
        probe.restart_measurement()
        yield probe
        assert not task.done(), "the client has failed"
    finally:
        stopping.set()
        await task
