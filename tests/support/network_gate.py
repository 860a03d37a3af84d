"""A way to a server that can be shut, as when its machine dies, or go silent, as a stopped process does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from controlplane import address as addresses


class Door:
    """Passes connections on to a port of this machine."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.address = ""
        self._flows = asyncio.Event()
        self._flows.set()
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Let connections in; after `shut`, on the same address."""
        host, port = addresses.split(self.address) if self.address else ("127.0.0.1", 0)
        self._listener = await asyncio.start_server(self._pass, host, port, reuse_address=True)
        self.address = addresses.join(host, self._listener.sockets[0].getsockname()[1])

    async def shut(self) -> None:
        """End all connections, and refuse new ones."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in list(self._writers):
            writer.transport.abort()

    def silence(self) -> None:
        """Take what comes, pass nothing on, answer nothing. New connections are made, as the kernel does."""
        self._flows.clear()

    def speak(self) -> None:
        """End the silence: all that was held back goes on."""
        self._flows.set()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        await self._flows.wait()
        raise EOFError


@contextlib.asynccontextmanager
async def doors(*targets: str) -> AsyncIterator[list[Door]]:
    """One for each of these addresses, open."""
    all_ = [Door(target) for target in targets]
    try:
        for door in all_:
            await door.open()
        yield all_
    finally:
        for door in all_:
            door.speak()
            await door.shut()
