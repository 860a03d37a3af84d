"""The parts of protobuf's wire format that join serialised parts without building messages.

A serialised message is the concatenation of its fields: a part shared by many streams is serialised once,
and a stream's own field is appended (protobuf.dev, "Encoding": message structure, last-one-wins and
concatenation).
"""

from __future__ import annotations

_VARINT, _LENGTH_DELIMITED = 0, 2


def varint(value: int) -> bytes:
    """Encode a non-negative integer in base 128, least significant group first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def delimited(field: int, payload: bytes | str) -> bytes:
    """Encode one length-delimited field: a string, bytes or an embedded message."""
    data = payload.encode() if isinstance(payload, str) else payload
    return varint(field << 3 | _LENGTH_DELIMITED) + varint(len(data)) + data


def true_field(field: int) -> bytes:
    """Encode one boolean field with the value true."""
    return varint(field << 3 | _VARINT) + varint(True)
