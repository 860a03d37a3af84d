"""Clients that run the conversations of `malformed.py` in parallel, and check that each conversation ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from sandbox.tidb_sim.packets import HEADER_SIZE
from tests.support.load.client_packets import SSL_REQUEST, login
from tests.support.load.malformed import UNPRIVILEGED_USER, ConnectionEnd, MalformedConversation

_MAX_PARALLEL = 48
# Silent conversations mostly wait, so more of them may run in parallel.
_MAX_PARALLEL_SILENT = 200
_LINGER_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for 0 s


@dataclass(slots=True)
class HostileResult:
    """Numbers of conversations by kind and by end, and the conversations that never ended."""

    count_by_kind: Counter[str] = field(default_factory=Counter)
    count_by_end: Counter[str] = field(default_factory=Counter)
    hung: list[MalformedConversation] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of all conversations, including the conversations that never ended."""
        return self.count_by_kind.total()


class _PlainConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, piece: bytes) -> None:
        self.writer.write(piece)
        await self.writer.drain()

    async def receive(self) -> bytes:
        """Return the next data; empty at the end."""
        return await self.reader.read(65536)


class _TlsConnection(_PlainConnection):
    """A TLS connection, with a valid handshake."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: ssl.SSLContext
    ) -> None:
        super().__init__(reader, writer)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._incoming, self._outgoing)

    async def handshake(self) -> None:
        """Send the SSLRequest and do the TLS handshake. Raises ConnectionError if the proxy disconnects."""
        self.writer.write(SSL_REQUEST)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await super().send(self._outgoing.read())
                await self._receive_records()
            else:
                return await super().send(self._outgoing.read())

    async def send(self, piece: bytes) -> None:
        self._tls.write(piece)
        await super().send(self._outgoing.read())

    async def receive(self) -> bytes:
        while True:
            try:
                return self._tls.read(65536)
            except ssl.SSLWantReadError:
                await self._receive_records()

    async def _receive_records(self) -> None:
        if not (received := await super().receive()):
            raise ConnectionResetError("closed during TLS")
        self._incoming.write(received)


async def run_hostile_clients(
    port: int, conversations: Iterable[MalformedConversation], count: int, timeout_seconds: float
) -> HostileResult:
    """Run the first `count` conversations. Those that do not end within the timeout are in `hung`."""
    result = HostileResult()
    active, silent = asyncio.Semaphore(_MAX_PARALLEL), asyncio.Semaphore(_MAX_PARALLEL_SILENT)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE

    async def hold(conversation: MalformedConversation, slot: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                result.count_by_end[await _run_conversation(port, conversation, tls)] += 1
        except TimeoutError:
            result.hung.append(conversation)
        finally:
            result.count_by_kind[conversation.kind] += 1
            slot.release()

    async with asyncio.TaskGroup() as tasks:
        for conversation in itertools.islice(conversations, count):
            slot = silent if conversation.end is ConnectionEnd.SILENCE else active
            await slot.acquire()
            tasks.create_task(hold(conversation, slot))
    return result


async def _run_conversation(port: int, conversation: MalformedConversation, tls: ssl.SSLContext) -> str:
    """Return how the conversation ended. Raises ConnectionRefusedError if the proxy has exited."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw: socket.socket = writer.get_extra_info("socket")
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not conversation.skips_greeting:
            await reader.read(65536)
        tls_connection = _TlsConnection(reader, writer, tls) if conversation.tls else None
        if tls_connection is not None:
            await tls_connection.handshake()
        connection = tls_connection or _PlainConnection(reader, writer)
        if conversation.logs_in:
            await connection.send(login(UNPRIVILEGED_USER, tls=conversation.tls))
            await connection.receive()
        for piece in conversation.pieces:
            await connection.send(piece)
            await asyncio.sleep(conversation.pause_seconds)
        match conversation.end:
            case ConnectionEnd.RST:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
                return "reset by the client"
            case ConnectionEnd.FIN:
                writer.write_eof()
        answer = await reader.read()
        if conversation.skips_greeting:
            _, answer = _first_packet(answer)
        return _describe_end(answer)
    except OSError:  # Also ENOTCONN of `write_eof`.
        return "reset by the proxy"
    except asyncio.CancelledError:
        writer.transport.abort()  # Unsent data would keep the connection open.
        raise
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _first_packet(data: bytes) -> tuple[bytes, bytes]:
    end = HEADER_SIZE + int.from_bytes(data[:3], "little")
    return data[:end], data[end:]


def _describe_end(answer: bytes) -> str:
    if answer[HEADER_SIZE : HEADER_SIZE + 1] == b"\xff":
        return "closed with an error packet"
    return "closed" if not answer else "answered"
