"""TLS of a scripted node. asyncio's `start_tls` would lose what Envoy sends right behind its SSLRequest."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar

from tests.support.clients.server import PemFiles

_T = TypeVar("_T")


class TlsNode:
    """The server side of TLS, over streams that have delivered exactly the SSLRequest."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
    ) -> None:
        self._reader, self._writer = reader, writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    async def handshake(self) -> None:
        """Complete the handshake. Raises ssl.SSLError, and IncompleteReadError at the end of the stream."""
        await self._drive(self._tls.do_handshake)

    def peer_certificate(self) -> bytes | None:
        """Return the certificate (DER) that the other side has presented; None if it has none."""
        return self._tls.getpeercert(binary_form=True)

    async def read_packet(self) -> tuple[int, bytes]:
        """Return the next packet's sequence number and payload."""
        header = await self._read_exactly(4)
        return header[3], await self._read_exactly(int.from_bytes(header[:3], "little"))

    def write(self, data: bytes) -> None:
        """Encrypt and send."""
        self._tls.write(data)
        self._writer.write(self._outgoing.read())

    async def _read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await self._drive(lambda: self._tls.read(size - len(data)))  # noqa: B023
            if not piece:
                raise asyncio.IncompleteReadError(data, size)
            data += piece
        return data

    async def _drive(self, step: Callable[[], _T]) -> _T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._writer.write(self._outgoing.read())
                received = await self._reader.read(65_536)
                if not received:
                    raise asyncio.IncompleteReadError(b"", None) from None
                self._incoming.write(received)
            else:
                self._writer.write(self._outgoing.read())
                return result


def server_context(pair: PemFiles) -> ssl.SSLContext:
    """Return the context of a node with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    return context
