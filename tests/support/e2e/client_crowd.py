"""Long-lived clients that ping now and then. Errors of any of them are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.e2e.cluster import CountingClient, error_code

_MAX_PARALLEL_LOGINS = 8
_PAUSE_SECONDS = 0.2  # Between two rounds of statements.


@dataclass(slots=True)
class ClientCrowd:
    """The connected clients, their total number of statements, and their errors."""

    clients: list[CountingClient] = field(default_factory=list)
    statement_count: int = 0
    errors: list[str] = field(default_factory=list)
    is_stopping: bool = False
    _entering: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_PARALLEL_LOGINS))

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
        """Let each client ping, one after the other."""
        for client in list(self.clients):
            if client not in self.clients:
                continue  # It has left meanwhile.
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
        async with self._entering:
            client = CountingClient(*await asyncio.open_connection("127.0.0.1", port))
            assert error_code(await client.log_in()) == 0
            return client

    async def _query_repeatedly(self) -> None:
        while not self.is_stopping:
            await self.ping_all()
            await asyncio.sleep(_PAUSE_SECONDS)


@asynccontextmanager
async def run_crowd() -> AsyncIterator[ClientCrowd]:
    """Run an empty crowd. Clients ping until the block ends, and are aborted then."""
    crowd = ClientCrowd()
    query_task = asyncio.create_task(crowd._query_repeatedly())
    try:
        yield crowd
    finally:
        # Not cancelled: the error that stopped it would be lost.
        crowd.is_stopping = True
        try:
            await query_task
        finally:
            crowd.drop_clients(list(crowd.clients))
