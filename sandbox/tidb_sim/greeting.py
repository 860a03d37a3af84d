"""The two packets of the MySQL handshake: TiDB's greeting and the client's response."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, replace

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
OLD_PROTOCOL = (
    "Client does not support authentication protocol requested by server; consider upgrading MySQL client"
)

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
"""The capabilities that TiDB offers without TLS (pingcap/tidb pkg/server/server.go), except zstd."""

_RESPONSE_HEAD = struct.Struct("<IIB23x")
_SALT_BYTES = [value for value in range(1, 128) if value != ord("$")]


def new_salt() -> bytes:
    """Return 20 random bytes from 1 to 127 without `$`, as TiDB generates them."""
    return bytes(secrets.choice(_SALT_BYTES) for _ in range(20))


def build_greeting(
    version: str, connection_id: int, salt: bytes, *, offered: Capability = OFFERED_CAPABILITIES
) -> bytes:
    """Return the payload of the first packet to a client (protocol 10; pingcap/tidb pkg/server/conn.go)."""
    head = struct.pack("<I8sx", connection_id & 0xFFFFFFFF, salt[:8])
    tail = struct.pack("<HBHHB10x", offered & 0xFFFF, COLLATION_UTF8MB4_BIN, AUTOCOMMIT, offered >> 16, 21)
    return b"\x0a%b\0%b%b%b\0%b\0" % (version.encode(), head, tail, salt[8:], NATIVE_PASSWORD.encode())


@dataclass(frozen=True)
class ServerGreeting:
    """The relevant fields of MariaDB's greeting."""

    version: str
    connection_id: int
    capabilities: Capability


def parse_greeting(payload: bytes) -> ServerGreeting:
    """Parse a greeting of protocol 10. Raises MalformedPacket for anything else."""
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

    `auth_response` proves the password by the method `plugin`. `collation` is the lowest byte of its number.
    """

    capabilities: Capability
    collation: int
    user: str
    auth_response: bytes
    database: str
    plugin: str
    attributes: dict[str, str]


class LoginRefused(Exception):
    """The login failed. The client gets this ERR, and the connection is closed."""

    def __init__(self, code: int, message: str, state: str) -> None:
        self.code, self.message, self.state = code, message, state
        self.violation = ""  # Text about a protocol violation, if any; not sent to the client.
        super().__init__(f"{code} ({state}): {message}")


def parse_capabilities(payload: bytes) -> Capability:
    """Return the capabilities in a client's first packet: HandshakeResponse41, or the SSLRequest before it.

    Raises MalformedPacket, or LoginRefused without PROTOCOL_41.
    """
    if len(payload) >= 2 and not payload[1] & (Capability.PROTOCOL_41 >> 8):
        raise LoginRefused(1251, OLD_PROTOCOL, "08004")
    if len(payload) < _RESPONSE_HEAD.size:
        raise MalformedPacket(f"a handshake response of {len(payload)} bytes is too short")
    return Capability(_RESPONSE_HEAD.unpack_from(payload)[0])


def parse_handshake_response(payload: bytes) -> ClientLogin:
    """Parse a HandshakeResponse41 as TiDB does.

    Raises MalformedPacket, or LoginRefused without PROTOCOL_41.

    For the layout, and the special length byte 1, see pingcap/tidb pkg/server/internal/parse/parse.go.
    """
    capabilities = parse_capabilities(payload)
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
        capabilities, payload[8], _text(user), auth, _text(database), _text(plugin), attributes
    )


def parse_change_user(payload: bytes, previous: ClientLogin) -> ClientLogin:
    """Parse COM_CHANGE_USER. Like TiDB, ignore charset and attributes. Raises MalformedPacket."""
    user, at = read_nul_bytes(payload, 1)
    auth, at = _read_short_bytes(payload, at)
    database, at = read_nul_bytes(payload, at)
    plugin = b""
    if previous.capabilities & Capability.PLUGIN_AUTH and at + 2 < len(payload):
        plugin, at = read_nul_bytes(payload, at + 2)
    return replace(
        previous, user=_text(user), auth_response=auth, database=_text(database), plugin=_text(plugin)
    )


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _read_short_bytes(payload: bytes, at: int) -> tuple[bytes, int]:
    """Read a password with its length in one byte. Raises MalformedPacket if it is truncated."""
    end = at + 1 + payload[at] if at < len(payload) else at + 1
    if end > len(payload):
        raise MalformedPacket("the password is truncated")
    return payload[at + 1 : end], end


def _parse_auth_response(payload: bytes, at: int, capabilities: int) -> tuple[bytes, int]:
    if capabilities & Capability.LENENC_AUTH:
        if payload[at : at + 1] == b"\x01":
            return b"", at + 2
        return read_lenenc_bytes(payload, at)
    if capabilities & Capability.SECURE_CONNECTION:
        return _read_short_bytes(payload, at)
    return read_nul_bytes(payload, at)


def _parse_attributes(payload: bytes, at: int) -> dict[str, str]:
    """Parse connection attributes. If they are malformed, return none, because TiDB accepts such a login."""
    attributes: dict[str, str] = {}
    try:
        size, at = read_lenenc_int(payload, at)
        end = min(at + size, len(payload))
        while at < end:
            key, at = read_lenenc_bytes(payload, at)
            value, at = read_lenenc_bytes(payload, at)
            attributes[_text(key)] = _text(value)
    except MalformedPacket:
        return {}
    return attributes
