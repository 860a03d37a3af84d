"""A TCP forwarder that can close, like a crashed machine, or stall, like a suspended machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from controlplane import address as addresses


class StallableForwarder:
    """Forwards connections to the address `target`."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.address = ""
        self._forwarding = asyncio.Event()
        self._forwarding.set()
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Accept connections. After `close`, use the same address as before."""
        host, port = addresses.split(self.address) if self.address else ("127.0.0.1", 0)
        self._listener = await asyncio.start_server(self._forward, host, port, reuse_address=True)
        self.address = addresses.join(host, self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Reset all connections and refuse new ones."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in list(self._writers):
            writer.transport.abort()

    def stall(self) -> None:
        """Stop forwarding. New connections are accepted, and data is received until buffers are full."""
        self._forwarding.clear()

    def resume(self) -> None:
        """Resume forwarding, starting with the data received meanwhile."""
        self._forwarding.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            target_reader, target_writer = await asyncio.open_connection(*addresses.split(self._target))
            self._writers.add(target_writer)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pump(reader, target_writer))
                    tasks.create_task(self._pump(target_reader, writer))
            finally:
                target_writer.transport.abort()
                self._writers.discard(target_writer)
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
async def run_stallable_forwarders(*targets: str) -> AsyncIterator[list[StallableForwarder]]:
    """Run one open forwarder for each of these addresses."""
    forwarders = [StallableForwarder(target) for target in targets]
    try:
        for forwarder in forwarders:
            await forwarder.open()
        yield forwarders
    finally:
        for forwarder in forwarders:
            forwarder.resume()
            await forwarder.close()
