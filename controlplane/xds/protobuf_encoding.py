"""Protobuf's wire format, as much as it takes to put serialised parts together without building messages.

A serialised message is the concatenation of its fields, so a part that is shared by many streams is
serialised once and a stream's own field is appended (protobuf.dev, "Encoding": message structure,
last-one-wins and concatenation).
"""

from __future__ import annotations

_VARINT, _LENGTH_DELIMITED = 0, 2


def varint(value: int) -> bytes:
    """A non-negative integer in base 128, least significant group first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def delimited(field: int, payload: bytes | str) -> bytes:
    """One length-delimited field: a string, bytes or an embedded message."""
    data = payload.encode() if isinstance(payload, str) else payload
    return varint(field << 3 | _LENGTH_DELIMITED) + varint(len(data)) + data


def true_field(field: int) -> bytes:
    """One boolean field that is true."""
    return varint(field << 3 | _VARINT) + varint(True)
