"""A TCP relay to a server that answers one statement slowly."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

from controlplane import address as addresses


class SlowStatementRelay:
    """Forwards connections to `target`. While `is_slow`, requests with `text` wait for `delay` seconds."""

    def __init__(self, target: str, text: bytes, delay: float, listen: str = "127.0.0.1:0") -> None:
        self.is_slow = False
        self.delayed_requests = 0
        self._target, self._text, self._delay, self._listen = target, text, delay, listen
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Accept connections."""
        host, _, port = self._listen.rpartition(":")
        self._server = await asyncio.start_server(self._forward, host, int(port))

    async def close(self) -> None:
        """Close all connections, and refuse new ones."""
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def address(self) -> str:
        host, port = self._server.sockets[0].getsockname()[:2]
        return addresses.join(host, port)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            server_reader, server_writer = await asyncio.open_connection(*addresses.split(self._target))
            with contextlib.closing(server_writer):
                requests = asyncio.create_task(self._pump_requests(reader, server_writer))
                responses = asyncio.create_task(_pump(server_reader, writer))
                try:
                    await asyncio.wait({requests, responses}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    requests.cancel()
                    responses.cancel()
                    await asyncio.gather(requests, responses, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the server is down, or the relay closes; asyncio would log a cancelled task as an error
        finally:
            writer.close()
            self._connections.discard(task)

    async def _pump_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            if self.is_slow and self._text in data:
                self.delayed_requests += 1
                await asyncio.sleep(self._delay)
            writer.write(data)
            await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
