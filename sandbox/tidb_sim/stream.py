"""A connection during login. It reads whole packets, one by one, and checks their sequence numbers.

After the login, the transport gets another protocol (`relay.py`), which processes chunks without waiting.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from sandbox.tidb_sim.compression import Compression
from sandbox.tidb_sim.packets import HEADER_SIZE, MAX_PACKET_PAYLOAD, BadSequence, frames
from sandbox.tidb_sim.tls import TlsTransport

_MAX_LOGIN_PAYLOAD_BYTES = 1 << 20  # Longest payload of a client before the login is complete.
_CLOSE_TIMEOUT_SECONDS = 2.0


class ConnectionClosed(Exception):
    """The peer closed the connection."""


class PacketTooLarge(Exception):
    """A packet is larger than `max_payload` (ERR 1153)."""


class PacketStream(asyncio.Protocol):
    """Packets of one connection. `sequence`: the number of the next packet, in either direction.

    `compression`: None until `start_compression`. After it, as in TiDB, the sequence numbers of packets
    inside compressed packets are not checked.
    `max_payload`: size of the longest accepted packet in bytes.
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
        """Read the payload that starts with the next packet.

        Raises ConnectionClosed, BadSequence, PacketTooLarge, or MalformedPacket if decompression fails.
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
        """Return the next `count` bytes without consuming them.

        Raises ConnectionClosed if the connection ends before they arrive.
        """
        while len(self._buffer) < count:
            content = self.compression.next_content() if self.compression is not None else None
            if content is not None:
                self._buffer += content
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
        del self._buffer[:count]

    def send(self, payload: bytes) -> None:
        """Send one payload with the next sequence number."""
        packets = frames(self.sequence, [payload])
        self.transport.write(packets if self.compression is None else self.compression.compress(packets))
        self.sequence = (self.sequence + 1 + len(payload) // MAX_PACKET_PAYLOAD) & 0xFF

    async def start_tls(self, context: ssl.SSLContext) -> None:
        """Start TLS as the server. Raises TlsHandshakeFailed."""
        transport = TlsTransport(self.transport, self, context)
        self.transport = transport
        await transport.handshake(self.take_buffered())

    def start_compression(self) -> None:
        self.compression = Compression()
        self.compression.feed(self.take_buffered())

    async def close(self) -> None:
        """Close after all data is sent. Reset the connection if the peer does not accept the data in time."""
        self.transport.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                await self._closed.wait()
        except TimeoutError:
            self.abort()
            await self._closed.wait()

    def abort(self) -> None:
        """Reset the connection and drop unsent data."""
        # asyncio (3.11) raises if a transport is aborted after it was closed and has sent its last byte.
        if not self._closed.is_set():
            self.transport.abort()

    def take_buffered(self) -> bytes:
        """Return and remove all buffered bytes, which follow the last packet that was read."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
