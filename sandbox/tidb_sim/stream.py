"""A connection while somebody logs in: whole packets, awaited one by one, their sequence numbers checked.

After the login the transport gets another protocol (`relay.py`), which hears of chunks and awaits nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from sandbox.tidb_sim.compression import Compression
from sandbox.tidb_sim.packets import HEADER_SIZE, MAX_PACKET_PAYLOAD, BadSequence, frames
from sandbox.tidb_sim.tls import TlsTransport

_MAX_LOGIN_PAYLOAD_BYTES = 1 << 20
"""Longest payload of a client, in bytes, before the login is over."""
_CLOSE_TIMEOUT_SECONDS = 2.0


class ConnectionClosed(Exception):
    """The other end went away."""


class PacketTooLarge(Exception):
    """More bytes than anybody needs to log in (ERR 1153)."""


class PacketStream(asyncio.Protocol):
    """Packets of one connection. `sequence` is the number of the next packet, in either direction.

    `compression` is None until `compress`: then the numbers within are no longer checked, as in TiDB.
    `limit`: bytes of the longest packet that is taken.
    """

    def __init__(
        self,
        on_connected: Callable[[PacketStream], None] | None = None,
        *,
        max_payload: int = _MAX_LOGIN_PAYLOAD_BYTES,
    ) -> None:
        self._max_payload = max_payload
        self.sequence = 0
        self.compression: Compression | None = None
        self._on_connected = on_connected
        self.transport: asyncio.Transport
        self._buffer = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._on_connected is not None:
            self._on_connected(self)

    def data_received(self, data: bytes) -> None:
        if self.compression is None:
            self._buffer += data
        else:
            self.compression.feed(data)
        if len(self._buffer) + len(self.compression or ()) > 2 * self._max_payload:
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()
        self._wake()

    async def read(self) -> bytes:
        """The payload that begins with the next packet.

        ConnectionClosed, BadSequence, PacketTooLarge, or MalformedPacket when it cannot be opened.
        """
        header = await self.peek(HEADER_SIZE)
        length = int.from_bytes(header[:3], "little")
        if header[3] != self.sequence and self.compression is None:
            raise BadSequence(header[3], self.sequence)
        if length > self._max_payload:
            raise PacketTooLarge
        packet = await self.peek(HEADER_SIZE + length)
        self.discard(len(packet))
        self.sequence = (self.sequence + 1) & 0xFF
        return (
            packet[HEADER_SIZE:] if length < MAX_PACKET_PAYLOAD else packet[HEADER_SIZE:] + await self.read()
        )

    async def peek(self, count: int) -> bytes:
        """The next `count` bytes, which stay where they are. ConnectionClosed when they never come."""
        while len(self._buffer) < count:
            part = self.compression.next_content() if self.compression is not None else None
            if part is not None:
                self._buffer += part
                continue
            if self._closed.is_set():
                raise ConnectionClosed
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return bytes(self._buffer[:count])

    def discard(self, count: int) -> None:
        """Forget bytes that were peeked at."""
        del self._buffer[:count]

    def send(self, payload: bytes) -> None:
        """Send one payload, with the next sequence number."""
        packets = frames(self.sequence, [payload])
        self.transport.write(packets if self.compression is None else self.compression.compress(packets))
        self.sequence = (self.sequence + 1 + len(payload) // MAX_PACKET_PAYLOAD) & 0xFF

    async def start_tls(self, context: ssl.SSLContext) -> None:
        """Go on inside TLS, as its server. TlsFailed."""
        transport = TlsTransport(self.transport, self, context)
        self.transport = transport
        await transport.handshake(self.take_buffered())

    def start_compression(self) -> None:
        """Go on with compressed packets."""
        self.compression = Compression()
        self.compression.feed(self.take_buffered())

    async def close(self) -> None:
        """Close behind what was sent, and wait until that has been done; an end that takes nothing is cut."""
        self.transport.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                await self._closed.wait()
        except TimeoutError:
            self.abort()
            await self._closed.wait()

    def abort(self) -> None:
        """Cut it, whatever is still to be sent."""
        # asyncio (3.11) raises when a transport is cut that has closed already, behind the last of its bytes.
        if not self._closed.is_set():
            self.transport.abort()

    def take_buffered(self) -> bytes:
        """All bytes that came behind the last packet."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
