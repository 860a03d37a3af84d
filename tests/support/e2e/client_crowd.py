"""Clients that stay, and each say something now and then. What goes wrong for any of them is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sandbox.tidb_sim.packets import Command
from tests.support.e2e.cluster import Client, code

_AT_ONCE = 8  # logins
_PAUSE = 0.2  # seconds between two rounds of statements


@dataclass(slots=True)
class Crowd:
    """The clients that are there, what they have asked in all, and what failed."""

    clients: list[Client] = field(default_factory=list)
    asked: int = 0
    errors: list[str] = field(default_factory=list)
    over: bool = False
    _entering: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    async def enter(self, ports: Iterable[int]) -> list[Client]:
        """One more client on each of these ports, at about the same time; they are logged in."""
        came = await asyncio.gather(*(self._enter(port) for port in ports))
        self.clients += came
        return came

    def leave(self, clients: Sequence[Client]) -> None:
        """These clients are gone, without a word."""
        for client in clients:
            self.clients.remove(client)
            client.writer.transport.abort()

    async def ask_all(self) -> None:
        """Each client asks something, one after the other."""
        for client in list(self.clients):
            if client not in self.clients:
                continue  # it has left meanwhile
            self.asked += 1
            try:
                failure = code(await client.command(Command.PING))
            except (OSError, EOFError, TimeoutError, AssertionError) as error:
                if client in self.clients:
                    self.errors.append(f"{type(error).__name__}: {error}")
                continue
            if failure:
                self.errors.append(f"error {failure}")

    async def _enter(self, port: int) -> Client:
        async with self._entering:
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            assert code(await client.enter()) == 0
            return client

    async def _converse(self) -> None:
        while not self.over:
            await self.ask_all()
            await asyncio.sleep(_PAUSE)


@asynccontextmanager
async def crowd() -> AsyncIterator[Crowd]:
    """Nobody yet. Who comes asks on until the block ends, and is cut then."""
    made = Crowd()
    asking = asyncio.create_task(made._converse())
    try:
        yield made
    finally:
        # Not cancelled: what it died of would not be seen.
        made.over = True
        try:
            await asking
        finally:
            made.leave(list(made.clients))
