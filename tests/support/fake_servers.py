"""Fake servers on real sockets, each with one behavior, correct or wrong.

The data that they send is here too: MySQL packets, HTTP responses, and a status and configuration of TiDB.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from controlplane import address as addresses

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

# Turns of the event loop from accept(2) to the start of the handler: the task that makes the transport,
# `connection_made`, the task of the handler.
_TURNS_TO_ACCEPT = 4

STATUS_BODY = json.dumps(
    {
        "connections": 3,
        "version": "8.0.11-TiDB-v8.5.3",
        "git_hash": "abc",
        "status": {"init_stats_percentage": 100},
    }
).encode()
# The part of a TiDB configuration that the control plane checks. These values make migration impossible.
CONFIG_WITHOUT_MIGRATION = (
    b'{"security": {"session-token-signing-cert": ""}, "graceful-wait-before-shutdown": 15}'
)
GREETING_PAYLOAD = b"\x0a8.0.11-TiDB-v8.5.3\x00" + bytes(range(1, 60))


def mysql_packet(payload: bytes) -> bytes:
    """Build a MySQL packet with sequence number 0."""
    return len(payload).to_bytes(3, "little") + b"\x00" + payload


def http_response(code: int, body: bytes, *headers: str) -> bytes:
    """Build an HTTP/1.1 response."""
    lines = [f"HTTP/1.1 {code} Some Reason", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class FakeServer:
    """A listening socket with a handler; counts connections and records how each ended."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.endpoint = ""
        self.connections = 0
        self.connection_ends: asyncio.Queue[str] = asyncio.Queue()
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: run the handler, then read until the peer closes."""
        self.connections += 1
        self.writers.append(writer)
        try:
            await self._handler(reader, writer)
            remaining = await reader.read()
            self.connection_ends.put_nowait("eof" if not remaining else f"eof after {len(remaining)} bytes")
        except (OSError, EOFError) as error:
            self.connection_ends.put_nowait(type(error).__name__)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def run_fake_server(
    handler: Handler, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[FakeServer]:
    """Run a fake server, by default on a free port. Abort its connections at the end."""
    fake_server = FakeServer(handler)
    server = await asyncio.start_server(fake_server.serve, host, port, ssl=tls, backlog=1024)
    fake_server.endpoint = addresses.join(host, server.sockets[0].getsockname()[1])
    try:
        yield fake_server
    finally:
        # Python 3.11 leaves a connection open if the server is closed between accept(2) and the handler's
        # start. So stop accepting, and let the handlers of accepted connections start, before closing.
        for listener in server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        for _ in range(_TURNS_TO_ACCEPT):
            await asyncio.sleep(0)
        server.close()
        for writer in fake_server.writers:
            writer.transport.abort()


def send_parts(*parts: bytes, then_close: bool = False) -> Handler:
    """Return a handler that writes the parts one by one, then closes or waits until the peer closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if then_close:
            writer.close()

    return handler


def answer_http(response: bytes, times: int | None = None, *, then_close: bool = False) -> Handler:
    """Return a handler that gives the same response to every HTTP request, at most `times` times."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        while times is None or count < times:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(response)
            await writer.drain()
            count += 1
        if then_close:
            writer.close()

    return handler


class FakeStatusPort:
    """A handler for a status port. Tests set `status` and `config`, the responses."""

    def __init__(self) -> None:
        self.status, self.config = (
            http_response(200, STATUS_BODY),
            http_response(200, CONFIG_WITHOUT_MIGRATION),
        )
        self.requested_paths: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            self.requested_paths.append(path)
            writer.write(self.config if path == "/config" else self.status)
            await writer.drain()


async def reset_by_peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reset the connection (a handler)."""
    reset_connection(writer)


def reset_connection(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """Yield the address of a listening socket whose accept queue is full: SYNs are dropped."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def refusing_port() -> Iterator[str]:
    """Yield a port that is bound but not listening: connections are refused, and no other process gets it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"
