"""TLS on the SQL port: a transport over a transport, because TLS starts in the middle of a login.

asyncio's `start_tls` does not work here. Data that the client sent right after its SSLRequest has been read
already. And the server must close as Go does: close_notify and FIN at once, without waiting for the client's
close_notify.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 256 * 1024


class TlsHandshakeFailed(Exception):
    """The TLS handshake failed: one side rejected the other."""


@dataclass(frozen=True)
class SqlTlsFiles:
    """PEM files."""

    cert: Path
    key: Path

    def create_context(self) -> ssl.SSLContext:
        """Create a context for TLS 1.2 or newer. Raises OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.load_cert_chain(self.cert, self.key)
        return context


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """The server side of TLS: protocol of `lower` and transport of `upper`. Call `handshake` first."""

    def __init__(
        self, lower: asyncio.Transport, upper: asyncio.BaseProtocol, context: ssl.SSLContext
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._lower, self._upper = lower, upper
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._established: asyncio.Future[None] = self._loop.create_future()
        self._paused = False
        lower.set_protocol(self)

    async def handshake(self, received: bytes) -> None:
        """Do the handshake, which starts with `received`. A disconnect, too, raises TlsHandshakeFailed."""
        self.data_received(received)
        await self._established

    # Methods as a protocol.

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if not self._established.done():
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                return
            except ssl.SSLError as error:
                self._flush()
                self._established.set_exception(TlsHandshakeFailed(str(error)))
                return
            self._established.set_result(None)
        self._deliver()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._established.done():
            self._established.set_exception(TlsHandshakeFailed("the client disconnected"))
        self._upper.connection_lost(error)

    def pause_writing(self) -> None:
        self._upper.pause_writing()

    def resume_writing(self) -> None:
        self._upper.resume_writing()

    def _deliver(self) -> None:
        while not self._paused and not self._lower.is_closing():
            try:
                data = self._tls.read(_CHUNK_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError:
                data = b""  # close_notify (SSLZeroReturnError), or invalid data.
            if not data:
                self.close()
                return
            assert isinstance(self._upper, asyncio.Protocol)
            self._upper.data_received(data)
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._lower.is_closing():
            self._lower.write(self._outgoing.read())

    # Methods as a transport.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._lower.is_closing():
            return
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[self._tls.write(remaining) :]
        self._flush()

    def close(self) -> None:
        """Close after all data is sent."""
        if self._lower.is_closing():
            return
        with suppress(ssl.SSLError, ValueError):
            self._tls.unwrap()  # Sends close_notify, but does not wait for the peer's.
        self._flush()
        self._lower.close()

    def abort(self) -> None:
        self._lower.abort()

    def is_closing(self) -> bool:
        return self._lower.is_closing()

    def pause_reading(self) -> None:
        self._paused = True
        self._lower.pause_reading()

    def resume_reading(self) -> None:
        """Deliver data again, first the buffered data, but not within this call."""
        self._lower.resume_reading()
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._deliver)

    def is_reading(self) -> bool:
        return not self._paused and self._lower.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._upper = protocol

    def get_write_buffer_size(self) -> int:
        return self._lower.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return `ssl_object`, or the information of the transport below."""
        return self._tls if name == "ssl_object" else self._lower.get_extra_info(name, default)
