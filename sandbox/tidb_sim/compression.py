"""The compressed protocol with zlib: compressed packets, with their own numbering, that contain MySQL
packets.

No I/O. The layout is from the MySQL client/server protocol, "Compression", the numbering from pingcap/tidb
pkg/server/internal/packetio.go.
"""

from __future__ import annotations

import struct
import zlib

from sandbox.tidb_sim.packets import BadSequence, MalformedPacket

_HEADER_SIZE = 7
_MAX_CONTENT_BYTES = 1 << 20
"""Size of the content of each packet that TiDB sends. Only the last packet of a response may be shorter.

Some clients rely on this: mysql-connector-python joins two packets at most.
"""
_MIN_COMPRESSED_BYTES = 50  # Content up to this size is sent uncompressed.
_ZLIB_LEVEL = 6


class Compression:
    """Both directions of one connection, which share `sequence`, the number of the next packet.

    `next_content` checks a packet's number only when its content is needed. A request that the client sends
    early is numbered from 0, but `sequence` is 0 again only after the response to the previous request.
    """

    def __init__(self) -> None:
        self.sequence = 0
        self._received = bytearray()
        self._unsent = bytearray()

    def __len__(self) -> int:
        """Return the number of received bytes that are not decompressed yet."""
        return len(self._received)

    def feed(self, data: bytes) -> None:
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
        if not size:
            return body
        try:
            data = zlib.decompressobj().decompress(body, size + 1)
        except zlib.error as error:
            raise MalformedPacket(f"a compressed packet cannot be decompressed: {error}") from error
        if len(data) != size:
            raise MalformedPacket(f"a compressed packet does not hold the {size} bytes that it announces")
        return data

    def compress(self, data: bytes, *, more_follows: bool = False) -> bytes:
        """Return the packets for `data`. With `more_follows`, keep an incomplete packet for later."""
        self._unsent += data
        packets = []
        while len(self._unsent) > _MAX_CONTENT_BYTES or (self._unsent and not more_follows):
            packets.append(self._packet(bytes(self._unsent[:_MAX_CONTENT_BYTES])))
            del self._unsent[:_MAX_CONTENT_BYTES]
        return b"".join(packets)

    def _packet(self, data: bytes) -> bytes:
        body, size = data, 0
        if len(data) > _MIN_COMPRESSED_BYTES:
            body, size = zlib.compress(data, _ZLIB_LEVEL), len(data)
        head = struct.pack("<I", len(body) | self.sequence << 24) + size.to_bytes(3, "little")
        self.sequence = (self.sequence + 1) & 0xFF
        return head + body
