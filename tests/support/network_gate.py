"""A way to a server that can be shut, as when its machine dies, or go silent, as a stopped process does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from controlplane import address as addresses


class NetworkGate:
    """Passes connections on to a port of this machine."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.address = ""
        self._forwarding = asyncio.Event()
        self._forwarding.set()
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Let connections in; after `shut`, on the same address."""
        host, port = addresses.split(self.address) if self.address else ("127.0.0.1", 0)
        self._listener = await asyncio.start_server(self._forward, host, port, reuse_address=True)
        self.address = addresses.join(host, self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End all connections, and refuse new ones."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in list(self._writers):
            writer.transport.abort()

    def stall(self) -> None:
        """Take what comes, pass nothing on, answer nothing. New connections are made, as the kernel does."""
        self._forwarding.clear()

    def resume(self) -> None:
        """End the silence: all that was held back goes on."""
        self._forwarding.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there, onward = await asyncio.open_connection(*addresses.split(self._target))
            self._writers.add(onward)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pump(reader, onward))
                    tasks.create_task(self._pump(there, writer))
            finally:
                onward.transport.abort()
                self._writers.discard(onward)
        except* (OSError, EOFError):
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self._forwarding.wait()
            writer.write(data)
            await writer.drain()
        await self._forwarding.wait()
        raise EOFError


@contextlib.asynccontextmanager
async def network_gates(*targets: str) -> AsyncIterator[list[NetworkGate]]:
    """One for each of these addresses, open."""
    all_ = [NetworkGate(target) for target in targets]
    try:
        for door in all_:
            await door.open()
        yield all_
    finally:
        for door in all_:
            door.resume()
            await door.close()
