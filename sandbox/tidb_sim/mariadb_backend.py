"""Connections to the MariaDB in which all simulated TiDB servers keep their data."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Self

from controlplane.address import split
from sandbox.tidb_sim.accounts import Account
from sandbox.tidb_sim.greeting import NATIVE_PASSWORD, ServerGreeting, parse_greeting
from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    MAX_PACKET_PAYLOAD,
    BadSequence,
    Capability,
    MalformedPacket,
    MySqlCommand,
    frame,
    read_lenenc_bytes,
    read_lenenc_int,
)
from sandbox.tidb_sim.stream import ConnectionClosed, PacketStream

_FORWARDED_CAPABILITIES = (
    Capability.FOUND_ROWS
    | Capability.LONG_FLAG
    | Capability.LOCAL_FILES
    | Capability.INTERACTIVE
    | Capability.TRANSACTIONS
    | Capability.MULTI_STATEMENTS
    | Capability.MULTI_RESULTS
    | Capability.DEPRECATE_EOF
)
"""The client's capabilities that change responses. MariaDB gets them too, so no response is translated."""

# LONG_PASSWORD also disables MariaDB's own protocol extensions (MariaDB calls this bit CLIENT_MYSQL).
_REQUIRED_CAPABILITIES = (
    Capability.LONG_PASSWORD | Capability.PROTOCOL_41 | Capability.SECURE_CONNECTION | Capability.PLUGIN_AUTH
)
_MAX_MARIADB_COLLATION = 247  # TiDB also has ids above it, such as 255 (utf8mb4_0900_ai_ci).
_UTF8MB4_GENERAL_CI = 45
_MAX_PACKET_BYTES = 1 << 30  # MariaDB's own `max_allowed_packet` limits what it sends.

BackendRow = tuple[bytes | None, ...]  # Values of one row as text; None is NULL.

SETUP_STATEMENTS = (
    # Health checks disconnect during the handshake. MariaDB must not block this host for that.
    "SET GLOBAL max_connect_errors = 4294967295",
    # A proxy may connect long before it logs in; TiDB allows that.
    "SET GLOBAL connect_timeout = 3600",
    # TiDB's default. The simulated server does not check this limit itself.
    "SET GLOBAL max_allowed_packet = 67108864",
    # The account that a new TiDB cluster has.
    "CREATE USER IF NOT EXISTS root@'%'",
    "GRANT ALL PRIVILEGES ON *.* TO root@'%' WITH GRANT OPTION",
)
"""Statements that prepare a MariaDB for simulated servers. They may run repeatedly and concurrently."""


class BackendUnavailable(Exception):
    """MariaDB cannot be reached, or its responses are not as expected."""


class BackendError(Exception):
    """MariaDB answered with ERR. `payload`: the ERR packet."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        super().__init__(payload[3:].decode(errors="replace"))


class BackendConnection:
    """One connection to MariaDB. Before `login` starts a session of root, it has only received a greeting.

    `status`: the server status flags of the last `execute`.
    """

    def __init__(self, stream: PacketStream, greeting: ServerGreeting) -> None:
        self.stream = stream
        self.greeting = greeting
        self.status = AUTOCOMMIT
        self._deprecate_eof = False

    @classmethod
    async def connect(cls, address: str) -> Self:
        """Connect to the path of a Unix socket (with a slash) or to `host:port`, and read the greeting.

        The client's session also uses the connection's id in the greeting. Raises BackendUnavailable.
        """
        loop = asyncio.get_running_loop()
        try:
            if "/" in address:
                _, stream = await loop.create_unix_connection(_backend_stream, address)
            else:
                _, stream = await loop.create_connection(_backend_stream, *split(address))
        except OSError as error:
            raise BackendUnavailable(f"MariaDB at {address} cannot be reached: {error}") from error
        try:
            payload = await stream.read()
            if payload[:1] == b"\xff":
                raise BackendUnavailable(f"MariaDB at {address} rejects us: {payload[3:].decode('latin-1')}")
            return cls(stream, parse_greeting(payload))
        except (ConnectionClosed, BadSequence, MalformedPacket) as error:
            await stream.close()
            raise BackendUnavailable(f"MariaDB at {address} sends no valid greeting: {error}") from error
        except BaseException:
            await stream.close()
            raise

    async def login(self, capabilities: Capability, collation: int) -> None:
        """Log in as root with the client's capabilities.

        Raises BackendUnavailable if MariaDB is too old, BackendError or ConnectionClosed.
        """
        forwarded = capabilities & _FORWARDED_CAPABILITIES
        if forwarded & Capability.DEPRECATE_EOF & ~self.greeting.capabilities:
            raise BackendUnavailable("this MariaDB is too old: it has no DEPRECATE_EOF")
        self._deprecate_eof = bool(forwarded & Capability.DEPRECATE_EOF)
        head = struct.pack(
            "<IIB23x", forwarded | _REQUIRED_CAPABILITIES, 1 << 30, _supported_collation(collation)
        )
        self.stream.send(head + b"root\0\0" + NATIVE_PASSWORD.encode() + b"\0")
        await self._finish_login()

    async def change_user(self, database: str, collation: int) -> None:
        """Start a fresh session in `database`. Raises BackendError or ConnectionClosed."""
        self.stream.sequence = 0
        tail = struct.pack("<H", _supported_collation(collation)) + NATIVE_PASSWORD.encode() + b"\0"
        self.stream.send(bytes((MySqlCommand.CHANGE_USER,)) + b"root\0\0" + database.encode() + b"\0" + tail)
        await self._finish_login()

    async def use_database(self, database: str) -> None:
        """Make `database` the current one. Raises BackendError or ConnectionClosed."""
        await self._request(MySqlCommand.INIT_DB, database)

    async def execute(self, statement: bytes | str) -> None:
        """Run a statement that returns no rows. Raises BackendError or ConnectionClosed."""
        response = await self._request(MySqlCommand.QUERY, statement)
        _, at = read_lenenc_int(response, 1)
        _, at = read_lenenc_int(response, at)
        self.status = int.from_bytes(response[at : at + 2], "little")

    async def rows(self, statement: bytes | str) -> list[BackendRow]:
        """Run a statement that returns rows. Raises BackendError or ConnectionClosed."""
        columns, _ = read_lenenc_int(await self._request(MySqlCommand.QUERY, statement), 0)
        for _ in range(columns + (not self._deprecate_eof)):
            await self.stream.read()
        rows: list[BackendRow] = []
        while True:
            row = await self.stream.read()
            if row[:1] == b"\xff":
                raise BackendError(row)
            # A row may begin with 0xfe, too, if its first value has 16 MiB or more.
            if row[:1] == b"\xfe" and len(row) < MAX_PACKET_PAYLOAD:
                return rows
            rows.append(parse_row(row, columns))

    async def prepare(self, statement: bytes) -> tuple[int, int]:
        """Prepare a statement; return its id and parameter count. Raises BackendError or ConnectionClosed."""
        head = await self._request(MySqlCommand.STMT_PREPARE, statement)
        statement_id, columns, parameters = struct.unpack_from("<IHH", head, 1)
        ends = 0 if self._deprecate_eof else (columns > 0) + (parameters > 0)
        for _ in range(columns + parameters + ends):
            await self.stream.read()
        return statement_id, parameters

    async def load_accounts(self, user: str) -> list[Account]:
        """Return all accounts named `user` (case-sensitive). Raises BackendError or ConnectionClosed."""
        name = user.encode().hex()
        rows = await self.rows(f"SELECT Host, Priv FROM mysql.global_priv WHERE BINARY User = x'{name}'")
        return [Account.from_row((host or b"").decode(), (priv or b"").decode()) for host, priv in rows]

    async def close(self) -> None:
        if not self.stream.transport.is_closing():
            self.stream.transport.write(frame(0, bytes((MySqlCommand.QUIT,))))
        await self.stream.close()

    async def _request(self, command: MySqlCommand, argument: bytes | str) -> bytes:
        self.stream.sequence = 0
        self.stream.send(bytes((command,)) + (argument.encode() if isinstance(argument, str) else argument))
        return await self._read_response()

    async def _read_response(self) -> bytes:
        payload = await self.stream.read()
        if payload[:1] == b"\xff":
            raise BackendError(payload)
        return payload

    async def _finish_login(self) -> None:
        response = await self._read_response()
        if response[:1] == b"\xfe":
            self.stream.send(b"")  # For every plugin, this means an empty password.
            await self._read_response()


def _backend_stream() -> PacketStream:
    return PacketStream(max_payload=_MAX_PACKET_BYTES)


def parse_row(row: bytes, columns: int) -> BackendRow:
    """Parse the values of a row's payload."""
    cells: list[bytes | None] = []
    at = 0
    for _ in range(columns):
        if row[at : at + 1] == b"\xfb":
            cells.append(None)
            at += 1
        else:
            value, at = read_lenenc_bytes(row, at)
            cells.append(value)
    return tuple(cells)


def _supported_collation(collation: int) -> int:
    return collation if 0 < collation <= _MAX_MARIADB_COLLATION else _UTF8MB4_GENERAL_CI


async def prepare_backend(address: str) -> None:
    """Run `SETUP_STATEMENTS`. Raises BackendUnavailable if MariaDB cannot be used at all."""
    async with _root_session(address) as backend:
        for statement in SETUP_STATEMENTS:
            await backend.execute(statement)


async def kill_connections(address: str, connection_ids: Iterable[int]) -> None:
    """Kill connections and their running statements. Connections that have ended are ignored."""
    async with _root_session(address) as backend:
        for connection_id in connection_ids:
            with suppress(BackendError):
                await backend.execute(f"KILL {connection_id}")


@asynccontextmanager
async def _root_session(address: str) -> AsyncIterator[BackendConnection]:
    backend = await BackendConnection.connect(address)
    try:
        await backend.login(Capability(0), _UTF8MB4_GENERAL_CI)
        yield backend
    except (BackendError, ConnectionClosed, BadSequence) as error:
        raise BackendUnavailable(f"MariaDB at {address} cannot be used as root: {error}") from error
    finally:
        await backend.close()
