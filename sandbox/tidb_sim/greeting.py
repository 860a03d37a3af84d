"""The two packets of the MySQL handshake: TiDB's greeting and the client's response."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass

from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    COLLATION_UTF8MB4_BIN,
    Capability,
    MalformedPacket,
    read_lenenc_bytes,
    read_lenenc_int,
    read_nul_bytes,
)

NATIVE_PASSWORD = "mysql_native_password"

OFFERED_CAPABILITIES = (
    Capability.LONG_PASSWORD
    | Capability.FOUND_ROWS
    | Capability.LONG_FLAG
    | Capability.CONNECT_WITH_DB
    | Capability.COMPRESS
    | Capability.LOCAL_FILES
    | Capability.PROTOCOL_41
    | Capability.INTERACTIVE
    | Capability.TRANSACTIONS
    | Capability.SECURE_CONNECTION
    | Capability.MULTI_STATEMENTS
    | Capability.MULTI_RESULTS
    | Capability.PLUGIN_AUTH
    | Capability.CONNECT_ATTRS
    | Capability.DEPRECATE_EOF
)
"""What TiDB offers without TLS (pingcap/tidb pkg/server/server.go), except compression with zstd."""

_RESPONSE_HEAD = struct.Struct("<IIB23x")
_SALT_BYTES = [value for value in range(1, 128) if value != ord("$")]


def new_salt() -> bytes:
    """Return 20 random bytes from 1 to 127 without `$`, as TiDB generates them."""
    return bytes(secrets.choice(_SALT_BYTES) for _ in range(20))


def build_greeting(
    version: str,
    connection_id: int,
    salt: bytes,
    *,
    offered: Capability = OFFERED_CAPABILITIES,
    plugin: str = NATIVE_PASSWORD,
) -> bytes:
    """Return the payload of the first packet to a client (protocol 10; pingcap/tidb pkg/server/conn.go)."""
    return (
        b"\x0a"
        + version.encode()
        + b"\0"
        + struct.pack("<I", connection_id & 0xFFFFFFFF)
        + salt[:8]
        + b"\0"
        + struct.pack("<HBHHB10x", offered & 0xFFFF, COLLATION_UTF8MB4_BIN, AUTOCOMMIT, offered >> 16, 21)
        + salt[8:]
        + b"\0"
        + plugin.encode()
        + b"\0"
    )


@dataclass(frozen=True)
class ServerGreeting:
    """The relevant fields of another server's greeting."""

    version: str
    connection_id: int
    capabilities: Capability


def parse_greeting(payload: bytes) -> ServerGreeting:
    """Parse a protocol 10 greeting. Raises MalformedPacket if it is none."""
    if payload[:1] != b"\x0a":
        raise MalformedPacket("the greeting is not of protocol 10")
    version, at = read_nul_bytes(payload, 1)
    if len(payload) < at + 20:
        raise MalformedPacket("the greeting is truncated")
    connection_id, low, high = struct.unpack_from("<I9xH3xH", payload, at)
    return ServerGreeting(version.decode(), connection_id, Capability(low | high << 16))


@dataclass(frozen=True)
class ClientLogin:
    """A login request, from HandshakeResponse41 or COM_CHANGE_USER.

    `auth_response` is the client's proof of its password for the plugin `plugin`; `collation` one byte.
    """

    capabilities: Capability
    collation: int
    user: str
    auth_response: bytes
    database: str
    plugin: str
    attributes: dict[str, str]


class OldProtocolError(Exception):
    """The client does not speak protocol 4.1 (ERR 1251)."""


def parse_capabilities(payload: bytes) -> Capability:
    """Return the capabilities in a client's first packet, a HandshakeResponse41 or the SSLRequest before it.

    Raises MalformedPacket, or OldProtocolError without PROTOCOL_41.
    """
    if len(payload) >= 2 and not payload[1] & (Capability.PROTOCOL_41 >> 8):
        raise OldProtocolError
    if len(payload) < _RESPONSE_HEAD.size:
        raise MalformedPacket(f"a handshake response of {len(payload)} bytes is too short")
    return Capability(_RESPONSE_HEAD.unpack_from(payload)[0])


def parse_handshake_response(payload: bytes) -> ClientLogin:
    """Parse a HandshakeResponse41 as TiDB does.

    Raises MalformedPacket, or OldProtocolError without PROTOCOL_41.

    Layout and the odd length byte 1: pingcap/tidb pkg/server/internal/parse/parse.go.
    """
    capabilities, collation = parse_capabilities(payload), payload[8]
    user, at = read_nul_bytes(payload, _RESPONSE_HEAD.size)
    auth, at = _parse_auth_response(payload, at, capabilities)
    database, plugin = b"", b""
    attributes: dict[str, str] = {}
    if capabilities & Capability.CONNECT_WITH_DB and at < len(payload):
        database, at = read_nul_bytes(payload, at)
    if capabilities & Capability.PLUGIN_AUTH and at < len(payload):
        # Some drivers omit the last NUL.
        end = payload.find(b"\0", at)
        plugin, at = (payload[at:], len(payload)) if end < 0 else (payload[at:end], end + 1)
    if capabilities & Capability.CONNECT_ATTRS and at < len(payload):
        attributes = _parse_attributes(payload, at)
    return ClientLogin(
        capabilities,
        collation,
        user.decode(errors="replace"),
        auth,
        database.decode(errors="replace"),
        plugin.decode(errors="replace"),
        attributes,
    )


def parse_change_user(payload: bytes, previous: ClientLogin) -> ClientLogin:
    """Parse COM_CHANGE_USER as TiDB does, ignoring charset and attributes. Raises MalformedPacket."""
    user, at = read_nul_bytes(payload, 1)
    if at >= len(payload):
        raise MalformedPacket("COM_CHANGE_USER ends before the password")
    size = payload[at]
    if at + 1 + size > len(payload):
        raise MalformedPacket("the password of COM_CHANGE_USER is truncated")
    auth, at = payload[at + 1 : at + 1 + size], at + 1 + size
    database, at = read_nul_bytes(payload, at)
    plugin = b""
    if previous.capabilities & Capability.PLUGIN_AUTH and at + 2 < len(payload):
        plugin, at = read_nul_bytes(payload, at + 2)
    return ClientLogin(
        previous.capabilities,
        previous.collation,
        user.decode(errors="replace"),
        auth,
        database.decode(errors="replace"),
        plugin.decode(errors="replace"),
        previous.attributes,
    )


def _parse_auth_response(payload: bytes, at: int, capabilities: int) -> tuple[bytes, int]:
    if capabilities & Capability.LENENC_AUTH:
        if payload[at : at + 1] == b"\x01":
            return b"", at + 2
        return read_lenenc_bytes(payload, at)
    if capabilities & Capability.SECURE_CONNECTION:
        if at >= len(payload):
            raise MalformedPacket("the handshake response ends before the password")
        size = payload[at]
        if at + 1 + size > len(payload):
            raise MalformedPacket("the password is truncated")
        return payload[at + 1 : at + 1 + size], at + 1 + size
    return read_nul_bytes(payload, at)


def _parse_attributes(payload: bytes, at: int) -> dict[str, str]:
    """Parse connection attributes; malformed ones are dropped, as in TiDB, which only warns."""
    attributes: dict[str, str] = {}
    try:
        size, at = read_lenenc_int(payload, at)
        end = min(at + size, len(payload))
        while at < end:
            key, at = read_lenenc_bytes(payload, at)
            value, at = read_lenenc_bytes(payload, at)
            attributes[key.decode(errors="replace")] = value.decode(errors="replace")
    except MalformedPacket:
        return {}
    return attributes
