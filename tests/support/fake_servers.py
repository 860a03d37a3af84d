"""Servers for tests that behave or misbehave in one way each, on real sockets; and what TiDB's ports say."""

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

STATUS_BODY = json.dumps(
    {
        "connections": 3,
        "version": "8.0.11-TiDB-v8.5.3",
        "git_hash": "abc",
        "status": {"init_stats_percentage": 100},
    }
).encode()
# A configuration with which no session can move, as far as it is looked at.
CONFIG_WITHOUT_MIGRATION = (
    b'{"security": {"session-token-signing-cert": ""}, "graceful-wait-before-shutdown": 15}'
)
GREETING_PAYLOAD = b"\x0a8.0.11-TiDB-v8.5.3\x00" + bytes(range(1, 60))


def mysql_packet(payload: bytes) -> bytes:
    """A MySQL packet, the first of its connection."""
    return len(payload).to_bytes(3, "little") + b"\x00" + payload


def http_response(code: int, body: bytes, *headers: str) -> bytes:
    """An HTTP/1.1 answer."""
    lines = [f"HTTP/1.1 {code} Some Reason", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class FakeServer:
    """A listening socket with a handler; counts connections and keeps how each ended."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.endpoint = ""
        self.connections = 0
        self.connection_ends: asyncio.Queue[str] = asyncio.Queue()
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: the handler, and then whatever comes until the other side ends it."""
        self.connections += 1
        self.writers.append(writer)
        try:
            await self._handler(reader, writer)
            rest = await reader.read()
            self.connection_ends.put_nowait("eof" if not rest else f"eof after {len(rest)} bytes")
        except (OSError, EOFError) as error:
            self.connection_ends.put_nowait(type(error).__name__)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def run_fake_server(
    handler: Handler, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[FakeServer]:
    """A peer on a port of its own, unless one is given; its connections are cut at the end."""
    peer = FakeServer(handler)
    server = await asyncio.start_server(peer.serve, host, port, ssl=tls, backlog=1024)
    peer.endpoint = addresses.join(host, server.sockets[0].getsockname()[1])
    try:
        yield peer
    finally:
        server.close()
        for writer in peer.writers:
            writer.transport.abort()


def send_parts(*parts: bytes, then_close: bool = False) -> Handler:
    """A handler that writes at once, part by part, and then waits for the peer or closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if then_close:
            writer.close()

    return handler


def answer_http(response: bytes, times: int | None = None, *, then_close: bool = False) -> Handler:
    """A handler that gives the same answer to every HTTP request, at most `times` times."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answered = 0
        while times is None or answered < times:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(response)
            await writer.drain()
            answered += 1
        if then_close:
            writer.close()

    return handler


class FakeStatusPort:
    """A handler for a status port that can be told what to say, and what to say of the configuration."""

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
    """A handler that ends its connection by RST."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """A listening socket that nobody accepts from and whose queue is full: SYNs are dropped."""
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
    """A port that is bound and not listening: connections are refused, and nobody else gets it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"
