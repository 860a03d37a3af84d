"""Encode protobuf messages: as bytes, inside `google.protobuf.Any`, or joined from serialised parts.

A serialised message is the concatenation of its fields (protobuf.dev, "Encoding"). The fields that are the
same on all streams are therefore serialised once, and each stream appends only its nonce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envoy.config.core.v3 import address_pb2
from google.protobuf import any_pb2, struct_pb2
from xds.type.v3 import typed_struct_pb2

from controlplane import address as addresses

TYPE_URL_PREFIX = "type.googleapis.com/"

_VARINT, _LENGTH_DELIMITED = 0, 2


def serialise(message: Any) -> bytes:
    """Serialise a protobuf message with its maps in a fixed order."""
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def pack(message: Any) -> Any:
    """Wrap a message into an `Any`."""
    return any_pb2.Any(type_url=f"{TYPE_URL_PREFIX}{message.DESCRIPTOR.full_name}", value=serialise(message))


def pack_typed_struct(name: str, fields: Mapping[str, Any]) -> Any:
    """Return an `Any` with a message whose class `xds-protos` does not have.

    `name` is the full name of the message, `fields` its JSON form, which Envoy converts to the message.
    """
    value = struct_pb2.Struct()
    value.update(fields)
    return pack(typed_struct_pb2.TypedStruct(type_url=f"{TYPE_URL_PREFIX}{name}", value=value))


def socket_address(address: str) -> Any:
    """Return the `core.v3.Address` of `host:port`; the host must be a literal IP address."""
    host, port = addresses.split(address)
    return address_pb2.Address(
        # `[::]` means all addresses of the machine, including its IPv4 addresses.
        socket_address=address_pb2.SocketAddress(address=host, port_value=port, ipv4_compat=host == "::")
    )


def varint(value: int) -> bytes:
    """Encode a non-negative integer as a varint."""
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
