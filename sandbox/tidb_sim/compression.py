"""The compressed protocol with zlib: MySQL packets inside compressed packets, which have their own numbering.

Sans-I/O. Layout: MySQL client/server protocol, "Compression"; numbers as pingcap/tidb
pkg/server/internal/packetio.go.
"""

from __future__ import annotations

import struct
import zlib

from sandbox.tidb_sim.packets import BadSequence, MalformedPacket

_HEADER_SIZE = 7
_MAX_CONTENT_BYTES = 1 << 20
"""Content of TiDB's packets, in bytes, except for the last packet of a response, which may be shorter.

Clients rely on long packets: some (mysql-connector-python) join no more than two.
"""
_MIN_COMPRESSED_BYTES = 50
"""Content of up to this many bytes is sent uncompressed."""
_ZLIB_LEVEL = 6


class Compression:
    """Both directions of one connection. `sequence` is the number of the next packet in either.

    Packets are decompressed only when their content is read: a client's next request, sent ahead, restarts
    the numbering at 0.
    """

    def __init__(self) -> None:
        self.sequence = 0
        self._received = bytearray()
        self._unsent = bytearray()

    def __len__(self) -> int:
        """Return the number of bytes received and not decompressed yet."""
        return len(self._received)

    def feed(self, data: bytes) -> None:
        """Add bytes received from the client."""
        self._received += data

    def next_content(self) -> bytes | None:
        """Return the next packet's content, None if incomplete. Raises BadSequence or MalformedPacket."""
        raw = self._received
        if len(raw) < _HEADER_SIZE:
            return None
        if raw[3] != self.sequence:
            raise BadSequence(raw[3], self.sequence, "compressed ")
        end = _HEADER_SIZE + int.from_bytes(raw[:3], "little")
        if len(raw) < end:
            return None
        body, size = bytes(raw[_HEADER_SIZE:end]), int.from_bytes(raw[4:7], "little")
        del raw[:end]
        self.sequence = (self.sequence + 1) & 0xFF
        return _inflate(body, size) if size else body

    def compress(self, data: bytes, *, more_follows: bool = False) -> bytes:
        """Return the packets for `data`; with `more_follows`, an incomplete packet waits for more data."""
        self._unsent += data
        packets = []
        while len(self._unsent) > _MAX_CONTENT_BYTES or (self._unsent and not more_follows):
            packets.append(self._packet(bytes(self._unsent[:_MAX_CONTENT_BYTES])))
            del self._unsent[:_MAX_CONTENT_BYTES]
        return b"".join(packets)

    def _packet(self, data: bytes) -> bytes:
        body, size = (
            (zlib.compress(data, _ZLIB_LEVEL), len(data)) if len(data) > _MIN_COMPRESSED_BYTES else (data, 0)
        )
        head = struct.pack("<I", len(body) | self.sequence << 24) + size.to_bytes(3, "little")
        self.sequence = (self.sequence + 1) & 0xFF
        return head + body


def _inflate(body: bytes, size: int) -> bytes:
    try:
        data = zlib.decompressobj().decompress(body, size + 1)
    except zlib.error as error:
        raise MalformedPacket(f"a compressed packet cannot be decompressed: {error}") from error
    if len(data) != size:
        raise MalformedPacket(f"a compressed packet does not hold the {size} bytes that it announces")
    return data
