"""Encode protobuf messages as bytes and inside `google.protobuf.Any`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envoy.config.core.v3 import address_pb2
from google.protobuf import any_pb2, struct_pb2
from xds.type.v3 import typed_struct_pb2

from controlplane import address as addresses

TYPE_URL_PREFIX = "type.googleapis.com/"


def serialise(message: Any) -> bytes:
    """Serialise a protobuf message, maps in a fixed order."""
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def pack(message: Any) -> Any:
    """Wrap a message into an `Any`."""
    return any_pb2.Any(type_url=f"{TYPE_URL_PREFIX}{message.DESCRIPTOR.full_name}", value=serialise(message))


def pack_typed_struct(name: str, fields: Mapping[str, Any]) -> Any:
    """Wrap a message that `xds-protos` does not have, by full name and JSON form, into an `Any`.

    Envoy unpacks a TypedStruct into the message that it names.
    """
    value = struct_pb2.Struct()
    value.update(fields)
    return pack(typed_struct_pb2.TypedStruct(type_url=f"{TYPE_URL_PREFIX}{name}", value=value))


def socket_address(address: str) -> Any:
    """Return the `core.v3.Address` of `host:port`; the host must be a literal IP address."""
    host, port = addresses.split(address)
    return address_pb2.Address(
        # `[::]` means every address of the machine, including those of IPv4.
        socket_address=address_pb2.SocketAddress(address=host, port_value=port, ipv4_compat=host == "::")
    )
