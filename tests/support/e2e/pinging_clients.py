"""Clients that stay connected and ping repeatedly. Their errors are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.e2e.cluster import CountingClient
from tests.support.tidb_sim_clients import error_code

_MAX_PARALLEL_LOGINS = 8
_PAUSE_SECONDS = 0.2  # Pause after every client has pinged once.


@dataclass(slots=True)
class PingingClients:
    """The connected clients, their total number of statements, and their errors."""

    clients: list[CountingClient] = field(default_factory=list)
    statement_count: int = 0
    errors: list[str] = field(default_factory=list)
    is_stopping: bool = False
    _login_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_PARALLEL_LOGINS))

    async def add_clients(self, ports: Iterable[int]) -> list[CountingClient]:
        """Connect one more client to each of these ports, in parallel, and log them in."""
        new_clients = await asyncio.gather(*(self._connect(port) for port in ports))
        self.clients += new_clients
        return new_clients

    def drop_clients(self, clients: Sequence[CountingClient]) -> None:
        """Abort these clients without a COM_QUIT."""
        for client in clients:
            self.clients.remove(client)
            client.writer.transport.abort()

    async def ping_all(self) -> None:
        """Send a PING from each client, one after the other."""
        for client in list(self.clients):
            if client not in self.clients:
                continue  # The client was dropped meanwhile.
            self.statement_count += 1
            try:
                failure = error_code(await client.send_command(MySqlCommand.PING))
            except (OSError, EOFError, TimeoutError, AssertionError) as error:
                if client in self.clients:
                    self.errors.append(f"{type(error).__name__}: {error}")
                continue
            if failure:
                self.errors.append(f"error {failure}")

    async def _connect(self, port: int) -> CountingClient:
        async with self._login_slots:
            client = CountingClient(*await asyncio.open_connection("127.0.0.1", port))
            assert error_code(await client.log_in()) == 0
            return client

    async def _query_repeatedly(self) -> None:
        while not self.is_stopping:
            await self.ping_all()
            await asyncio.sleep(_PAUSE_SECONDS)


@asynccontextmanager
async def run_pinging_clients() -> AsyncIterator[PingingClients]:
    """Start without clients. Added clients ping until the block ends. Then abort them."""
    clients = PingingClients()
    query_task = asyncio.create_task(clients._query_repeatedly())
    try:
        yield clients
    finally:
        # Do not cancel the task: its error would be lost.
        clients.is_stopping = True
        try:
            await query_task
        finally:
            clients.drop_clients(list(clients.clients))
