"""Clients that stay, and each say something now and then. What goes wrong for any of them is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.e2e.cluster import CountingClient, error_code

_MAX_PARALLEL_LOGINS = 8  # logins
_PAUSE_SECONDS = 0.2  # seconds between two rounds of statements


@dataclass(slots=True)
class ClientCrowd:
    """The clients that are there, what they have asked in all, and what failed."""

    clients: list[CountingClient] = field(default_factory=list)
    statement_count: int = 0
    errors: list[str] = field(default_factory=list)
    is_stopping: bool = False
    _entering: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_PARALLEL_LOGINS))

    async def add_clients(self, ports: Iterable[int]) -> list[CountingClient]:
        """One more client on each of these ports, at about the same time; they are logged in."""
        came = await asyncio.gather(*(self._connect(port) for port in ports))
        self.clients += came
        return came

    def drop_clients(self, clients: Sequence[CountingClient]) -> None:
        """These clients are gone, without a word."""
        for client in clients:
            self.clients.remove(client)
            client.writer.transport.abort()

    async def ping_all(self) -> None:
        """Each client asks something, one after the other."""
        for client in list(self.clients):
            if client not in self.clients:
                continue  # it has left meanwhile
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
    """Nobody yet. Who comes asks on until the block ends, and is cut then."""
    made = ClientCrowd()
    asking = asyncio.create_task(made._query_repeatedly())
    try:
        yield made
    finally:
        # Not cancelled: what it died of would not be seen.
        made.is_stopping = True
        try:
            await asking
        finally:
            made.drop_clients(list(made.clients))
