"""TLS on the SQL port: a transport over a transport, so that a login can begin it in the middle.

Not asyncio's `start_tls`: what a client sent behind its SSLRequest, in the same segment, has been read
already; and a server closes as Go does: close_notify and FIN at once, without waiting for the client's.
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
    """The handshake failed: the client does not like us, or we do not like the client."""


@dataclass(frozen=True)
class SqlTlsFiles:
    """PEM files. With `client_ca` a client may show a certificate, which must then be of that authority."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def create_context(self, *, require_client_certificate: bool) -> ssl.SSLContext:
        """TLS 1.2 or newer; `demand`: no client without a certificate. ConfigError names a bad file.

        TiDB demands one when it has a client CA and `require_secure_transport` (pkg/util/misc.go).
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        try:
            context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            problem = f"no certificate with the key of {self.key}: {error}"
            raise ConfigError(str(self.cert), "", problem, "give --tls-cert and --tls-key in PEM") from error
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED if require_client_certificate else ssl.CERT_OPTIONAL
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                problem = f"no certificates: {error}"
                raise ConfigError(str(self.client_ca), "", problem, "give --tls-client-ca in PEM") from error
        return context


class TlsTransport(asyncio.Transport):
    """The server's end of TLS over `lower`, for the protocol `upper`. `handshake` comes first."""

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
        """Do it, `early` being what the client sent of it already. TlsFailed, also when the client leaves."""
        self.on_data(received)
        await self._established

    # What the protocol below hands up.

    def on_data(self, data: bytes) -> None:
        """Bytes from the network."""
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
        """The network connection has ended."""
        if not self._established.done():
            self._established.set_exception(TlsHandshakeFailed("the client left"))
        self._upper.connection_lost(error)

    def set_write_paused(self, paused: bool) -> None:
        """Whether the network takes no more for now."""
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
                data = b""  # close_notify (SSLZeroReturnError), or nonsense
            if not data:
                self.close()
                return
            assert isinstance(self._upper, asyncio.Protocol)
            self._upper.data_received(data)
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._lower.is_closing():
            self._lower.write(self._outgoing.read())

    # What the protocol above asks for.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt and send."""
        if self._lower.is_closing():
            return
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        self._flush()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        """Encrypt and send."""
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        """Close behind what was sent."""
        if self._lower.is_closing():
            return
        with suppress(ssl.SSLError, ValueError):
            self._tls.unwrap()  # sends close_notify, and would like to read the other end's
        self._flush()
        self._lower.close()

    def abort(self) -> None:
        """Cut it."""
        self._lower.abort()

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._lower.is_closing()

    def pause_reading(self) -> None:
        """Hand nothing more up."""
        self._paused = True
        self._lower.pause_reading()

    def resume_reading(self) -> None:
        """Go on handing up, beginning with what has come already, though not within this call."""
        self._lower.resume_reading()
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._deliver)

    def is_reading(self) -> bool:
        """Whether data is handed up."""
        return not self._paused and self._lower.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand data to `protocol` from now on."""
        self._upper = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Whom data is handed to."""
        return self._upper

    def get_write_buffer_size(self) -> int:
        """Bytes that the network has not taken yet."""
        return self._lower.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the transport below, and `ssl_object`."""
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
