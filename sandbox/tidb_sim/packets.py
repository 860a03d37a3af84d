"""MySQL packets as bytes: framing, length-encoded values, and some payloads that a server sends.

Layouts: MySQL client/server protocol. Differences in TiDB: pingcap/tidb pkg/server/conn.go.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, IntFlag

HEADER_SIZE = 4
MAX_PACKET_PAYLOAD = 0xFFFFFF  # A payload of this many bytes or more continues in the next packet.

AUTOCOMMIT = 0x0002
IN_TRANSACTION = 0x0001
MORE_RESULTS = 0x0008
CURSOR_EXISTS = 0x0040
LAST_ROW_SENT = 0x0080
NO_BACKSLASH_ESCAPES = 0x0200
SESSION_STATUS_FLAGS = IN_TRANSACTION | AUTOCOMMIT | NO_BACKSLASH_ESCAPES
"""The status flags that persist after the statement that reported them."""

TYPE_LONGLONG = 0x08
TYPE_JSON = 0xF5
TYPE_VAR_STRING = 0xFD
_COLLATION_BINARY = 63
COLLATION_UTF8MB4_BIN = 46


class Capability(IntFlag):
    """Capability bits in the handshake packets of both sides (TiDB: pkg/parser/mysql/const.go)."""

    LONG_PASSWORD = 1 << 0
    FOUND_ROWS = 1 << 1
    LONG_FLAG = 1 << 2
    CONNECT_WITH_DB = 1 << 3
    COMPRESS = 1 << 5
    LOCAL_FILES = 1 << 7
    PROTOCOL_41 = 1 << 9
    INTERACTIVE = 1 << 10
    SSL = 1 << 11
    TRANSACTIONS = 1 << 13
    SECURE_CONNECTION = 1 << 15
    MULTI_STATEMENTS = 1 << 16
    MULTI_RESULTS = 1 << 17
    PLUGIN_AUTH = 1 << 19
    CONNECT_ATTRS = 1 << 20
    LENENC_AUTH = 1 << 21
    DEPRECATE_EOF = 1 << 24


class MySqlCommand(IntEnum):
    """The first byte of the requests that TiDB serves."""

    QUIT = 0x01
    INIT_DB = 0x02
    QUERY = 0x03
    FIELD_LIST = 0x04
    STATISTICS = 0x09
    PING = 0x0E
    CHANGE_USER = 0x11
    STMT_PREPARE = 0x16
    STMT_EXECUTE = 0x17
    STMT_SEND_LONG_DATA = 0x18
    STMT_CLOSE = 0x19
    STMT_RESET = 0x1A
    SET_OPTION = 0x1B
    STMT_FETCH = 0x1C
    RESET_CONNECTION = 0x1F


class MalformedPacket(Exception):
    """The content of a packet does not match its layout."""


class BadSequence(Exception):
    """The sequence number of a packet differs from the expected number (ERR 8052)."""

    def __init__(self, received: int, expected: int, kind: str = "") -> None:
        self.received, self.expected = received, expected
        super().__init__(f"invalid {kind}sequence {received} != {expected}")


def frame(sequence: int, payload: bytes) -> bytes:
    """Build one packet; the payload must be shorter than `MAX_PACKET_PAYLOAD`."""
    return struct.pack("<I", len(payload) | (sequence & 0xFF) << 24) + payload


def frames(sequence: int, payloads: Iterable[bytes]) -> bytes:
    """Build packets with consecutive numbers from `sequence` on; a long payload needs several packets."""
    parts = (part for payload in payloads for part in _split_payload(payload))
    return b"".join(frame(sequence + number, part) for number, part in enumerate(parts))


def parse_payload(data: bytearray, *, check_sequence: bool) -> tuple[bytes, int] | None:
    """Return the first payload in `data` and the size of its packets in bytes; None if it is incomplete.

    Raises BadSequence if `check_sequence` is set and the packets are not numbered from 0.
    """
    parts: list[slice] = []
    at = 0
    while len(data) >= at + HEADER_SIZE:
        if check_sequence and data[at + 3] != len(parts) & 0xFF:
            raise BadSequence(data[at + 3], len(parts) & 0xFF)
        length = int.from_bytes(data[at : at + 3], "little")
        end = at + HEADER_SIZE + length
        if len(data) < end:
            return None
        parts.append(slice(at + HEADER_SIZE, end))
        at = end
        if length < MAX_PACKET_PAYLOAD:
            return b"".join(bytes(data[part]) for part in parts), at
    return None


def _split_payload(payload: bytes) -> Iterator[bytes]:
    """Yield the content of each packet. After a full packet, another one follows, even if it is empty."""
    if len(payload) < MAX_PACKET_PAYLOAD:
        yield payload
        return
    for at in range(0, len(payload) + 1, MAX_PACKET_PAYLOAD):
        yield payload[at : at + MAX_PACKET_PAYLOAD]


def lenenc_int(value: int) -> bytes:
    if value < 0xFB:
        return bytes((value,))
    if value < 1 << 16:
        return b"\xfc" + value.to_bytes(2, "little")
    if value < 1 << 24:
        return b"\xfd" + value.to_bytes(3, "little")
    return b"\xfe" + value.to_bytes(8, "little")


def lenenc_bytes(value: bytes) -> bytes:
    return lenenc_int(len(value)) + value


def read_lenenc_int(data: bytes, offset: int) -> tuple[int, int]:
    """Return the integer at `offset` and the offset after it. Raises MalformedPacket if there is none."""
    if offset >= len(data):
        raise MalformedPacket(f"a length is missing at offset {offset}")
    first = data[offset]
    if first < 0xFB:
        return first, offset + 1
    width = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(first)
    if width is None or offset + 1 + width > len(data):
        raise MalformedPacket(f"no length-encoded integer at offset {offset}")
    return int.from_bytes(data[offset + 1 : offset + 1 + width], "little"), offset + 1 + width


def read_lenenc_bytes(data: bytes, offset: int) -> tuple[bytes, int]:
    """Return the byte string at `offset` and the offset after it.

    Raises MalformedPacket if it is truncated.
    """
    size, offset = read_lenenc_int(data, offset)
    if offset + size > len(data):
        raise MalformedPacket(
            f"{size} bytes announced at offset {offset}, only {len(data) - offset} received"
        )
    return data[offset : offset + size], offset + size


def read_nul_bytes(data: bytes, offset: int) -> tuple[bytes, int]:
    """Return the bytes before the next NUL and the offset after it. Raises MalformedPacket without a NUL."""
    end = data.find(b"\0", offset)
    if end < 0:
        raise MalformedPacket(f"the text at offset {offset} has no terminating NUL")
    return data[offset:end], end + 1


def ok(status: int, header: int = 0x00) -> bytes:
    """Build an OK payload without affected rows, insert id or info, as TiDB sends after a login."""
    return struct.pack("<BBBHH", header, 0, 0, status, 0)


def eof(status: int) -> bytes:
    """Build an EOF payload, for clients without DEPRECATE_EOF."""
    return struct.pack("<BHH", 0xFE, 0, status)


def err(code: int, message: str, state: str | None) -> bytes:
    """Build an ERR payload.

    `state`: None if the client's PROTOCOL_41 bit is not known yet. TiDB then sends no SQLSTATE.
    """
    marker = f"#{state}" if state is not None else ""
    return b"\xff" + code.to_bytes(2, "little") + (marker + message).encode()


def single_row_result(
    row: Sequence[tuple[str, str | int]], status: int, *, deprecate_eof: bool
) -> list[bytes]:
    """Return the payloads of a text result set with one row, given as column names and values."""
    columns = [(name, TYPE_LONGLONG if isinstance(value, int) else TYPE_VAR_STRING) for name, value in row]
    values = [str(value).encode() for _, value in row]
    return result_set(columns, [values], status, deprecate_eof=deprecate_eof)


def result_set(
    columns: Sequence[tuple[str, int]],
    rows: Iterable[Sequence[bytes | None]],
    status: int,
    *,
    deprecate_eof: bool,
) -> list[bytes]:
    """Return the payloads of a text result set. `columns`: name and type; in `rows`, None is NULL."""
    head = [
        lenenc_int(len(columns)),
        *(_column_definition(name, column_type) for name, column_type in columns),
    ]
    values = [b"".join(b"\xfb" if cell is None else lenenc_bytes(cell) for cell in row) for row in rows]
    if deprecate_eof:
        return [*head, *values, ok(status, header=0xFE)]
    return [*head, eof(status), *values, eof(status)]


def _column_definition(column: str, column_type: int) -> bytes:
    is_text = column_type == TYPE_VAR_STRING
    return (
        b"".join(lenenc_bytes(part) for part in (b"def", b"", b"", b"", column.encode(), b""))
        + b"\x0c"
        + struct.pack(
            "<HIBHBH", COLLATION_UTF8MB4_BIN if is_text else _COLLATION_BINARY, 1024, column_type, 0, 0, 0
        )
    )
