"""TLS on the SQL port: a transport over a transport, so that TLS can start in the middle of a login.

Not asyncio's `start_tls`: what a client sent after its SSLRequest, in the same segment, has already been
read; and a server closes as Go does: close_notify and FIN at once, without waiting for the client's
close_notify.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.errors import ConfigError

_CHUNK_BYTES = 256 * 1024


class TlsHandshakeFailed(Exception):
    """The TLS handshake failed: one side rejected the other."""


@dataclass(frozen=True)
class SqlTlsFiles:
    """PEM files.

    With `client_ca`, a client may present a certificate, which that authority must have signed.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def create_context(self, *, require_client_certificate: bool) -> ssl.SSLContext:
        """Create a context for TLS 1.2 or newer. Raises ConfigError, naming a bad file.

        TiDB requires a client certificate if it has a client CA and `require_secure_transport`
        (pkg/util/misc.go).
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        try:
            context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            problem = f"no valid certificate with the key {self.key}: {error}"
            raise ConfigError(str(self.cert), "", problem, "give --tls-cert and --tls-key in PEM") from error
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED if require_client_certificate else ssl.CERT_OPTIONAL
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                problem = f"no valid certificates: {error}"
                raise ConfigError(str(self.client_ca), "", problem, "give --tls-client-ca in PEM") from error
        return context


class TlsTransport(asyncio.Transport):
    """The server side of TLS over `lower`, for the protocol `upper`. Call `handshake` first."""

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
        lower.set_protocol(_LowerProtocol(self))

    async def handshake(self, received: bytes) -> None:
        """Handshake; `received` holds its first bytes. Raises TlsHandshakeFailed, also on a disconnect."""
        self.on_data(received)
        await self._established

    # Called by the protocol below.

    def on_data(self, data: bytes) -> None:
        """Process bytes from the network."""
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

    def on_connection_lost(self, error: Exception | None) -> None:
        """Handle the loss of the network connection."""
        if not self._established.done():
            self._established.set_exception(TlsHandshakeFailed("the client disconnected"))
        self._upper.connection_lost(error)

    def set_write_paused(self, paused: bool) -> None:
        """Pass on whether the network accepts no more data for now."""
        if paused:
            self._upper.pause_writing()
        else:
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

    # Called by the protocol above.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt and send."""
        if self._lower.is_closing():
            return
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[self._tls.write(remaining) :]
        self._flush()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        """Encrypt and send."""
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        """Close after sending all data."""
        if self._lower.is_closing():
            return
        with suppress(ssl.SSLError, ValueError):
            self._tls.unwrap()  # Sends close_notify, and would read the peer's.
        self._flush()
        self._lower.close()

    def abort(self) -> None:
        """Reset the connection."""
        self._lower.abort()

    def is_closing(self) -> bool:
        """Return whether it is closed or about to be."""
        return self._lower.is_closing()

    def pause_reading(self) -> None:
        """Stop delivering data."""
        self._paused = True
        self._lower.pause_reading()

    def resume_reading(self) -> None:
        """Resume delivering, starting with buffered data, though not within this call."""
        self._lower.resume_reading()
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._deliver)

    def is_reading(self) -> bool:
        """Return whether data is delivered."""
        return not self._paused and self._lower.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Deliver data to `protocol` from now on."""
        self._upper = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol that receives the data."""
        return self._upper

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the network has not accepted yet."""
        return self._lower.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return `ssl_object`, or the info of the transport below."""
        return self._tls if name == "ssl_object" else self._lower.get_extra_info(name, default)


class _LowerProtocol(asyncio.Protocol):
    """The lower transport's protocol: everything goes to the TLS layer."""

    def __init__(self, tls: TlsTransport) -> None:
        self._tls = tls

    def data_received(self, data: bytes) -> None:
        self._tls.on_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._tls.on_connection_lost(error)

    def pause_writing(self) -> None:
        self._tls.set_write_paused(True)

    def resume_writing(self) -> None:
        self._tls.set_write_paused(False)
