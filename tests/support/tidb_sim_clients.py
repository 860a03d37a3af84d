"""Clients of a simulated server in this process: a driver, and a client that can send any packet."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncmy

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.greeting import NATIVE_PASSWORD
from sandbox.tidb_sim.mariadb_backend import parse_row
from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    Capability,
    MySqlCommand,
    frame,
    frames,
    lenenc_bytes,
    ok,
    read_lenenc_int,
)
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.session import SessionRules

CAPABILITIES = (
    Capability.PROTOCOL_41
    | Capability.SECURE_CONNECTION
    | Capability.PLUGIN_AUTH
    | Capability.MULTI_STATEMENTS
    | Capability.MULTI_RESULTS
)


def session_rules(mariadb: MariaDb, **values: Any) -> SessionRules:
    """Return rules for sessions on this MariaDB. `values` are fields of SessionRules."""
    return SessionRules(str(mariadb.socket), **values)


async def connect_driver(sim: TidbSim, **options: Any) -> Any:
    """Connect a driver, as root unless `options` (of asyncmy.connect) say otherwise."""
    host, port = sim.sql_address.split(":")
    return await asyncmy.connect(
        **{"host": host, "port": int(port), "user": "root", "autocommit": True, **options}
    )


async def query_rows(driver: Any, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
    """Return the rows of a statement."""
    async with driver.cursor() as cursor:
        await cursor.execute(statement, arguments or None)
        return list(await cursor.fetchall())


class RawClient:
    """A client that can send any packet, and reads packet by packet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._deprecate_eof = False

    async def read_packet(self) -> tuple[int, bytes]:
        """Return the next packet's sequence number and payload."""
        header = await self.reader.readexactly(4)
        return header[3], await self.reader.readexactly(int.from_bytes(header[:3], "little"))

    async def login(self, capabilities: Capability = CAPABILITIES, plugin: str = NATIVE_PASSWORD) -> bytes:
        """Log in as root; return the payload of the response."""
        await self.read_packet()
        return await self.send_login(capabilities, plugin)

    async def send_login(
        self, capabilities: Capability = CAPABILITIES, plugin: str = NATIVE_PASSWORD
    ) -> bytes:
        """Send the login after the greeting was read. Return the payload of the response."""
        self._deprecate_eof = bool(capabilities & Capability.DEPRECATE_EOF)
        head = struct.pack("<IIB23x", capabilities, 1 << 24, 45)
        self.writer.write(frame(1, head + b"root\0\0" + plugin.encode() + b"\0"))
        return (await self.read_packet())[1]

    async def login_by_token(
        self,
        token: bytes,
        *,
        user: str = "root",
        database: str = "",
        capabilities: Capability = CAPABILITIES,
        collation: int = 45,
    ) -> bytes:
        """Log in as a proxy does for a migration; return the payload of the response."""
        capabilities |= Capability.LENENC_AUTH | (Capability.CONNECT_WITH_DB if database else Capability(0))
        self._deprecate_eof = bool(capabilities & Capability.DEPRECATE_EOF)
        await self.read_packet()
        body = (
            struct.pack("<IIB23x", capabilities, 0, collation) + user.encode() + b"\0" + lenenc_bytes(token)
        )
        body += database.encode() + b"\0" if database else b""
        self.writer.write(frame(1, body + b"tidb_session_token\0"))
        return (await self.read_packet())[1]

    async def send_command(self, command: int, body: bytes = b"") -> bytes:
        """Send one request; return the payload of the first response packet."""
        self.writer.write(frame(0, bytes((command,)) + body))
        sequence, payload = await self.read_packet()
        assert sequence == 1
        return payload

    async def read_until_eof(self, size: int) -> list[bytes]:
        """Return the payloads up to the first that starts with 0xfe and has at most `size` bytes."""
        payloads: list[bytes] = []
        while not payloads or payloads[-1][0] != 0xFE or len(payloads[-1]) > size:
            payloads.append((await self.read_packet())[1])
        return payloads

    async def query(self, statement: bytes | str) -> bytes:
        """Run a statement without rows; return the payload of its OK or ERR."""
        text = statement.encode() if isinstance(statement, str) else statement
        self.writer.write(frames(0, [bytes((MySqlCommand.QUERY,)) + text]))
        payload = (await self.read_packet())[1]
        assert payload[0] in (0x00, 0xFF), payload
        return payload

    async def rows(self, statement: bytes | str, codec: str = "utf-8") -> list[tuple[str | None, ...]]:
        """Run a statement with rows of at most one packet each; text is sent and received in `codec`."""
        text = statement.encode(codec) if isinstance(statement, str) else statement
        head = await self.send_command(MySqlCommand.QUERY, text)
        assert head[0] not in (0x00, 0xFF), head
        columns, _ = read_lenenc_int(head, 0)
        rows = [parse_row(row, columns) for row in await self._read_rows(columns)]
        return [
            tuple(None if cell is None else cell.decode(codec, errors="replace") for cell in row)
            for row in rows
        ]

    async def prepare(self, statement: bytes) -> int:
        """Prepare a statement in the binary protocol; return its id."""
        head = await self.send_command(MySqlCommand.STMT_PREPARE, statement)
        assert head[0] == 0x00, head
        statement_id, columns, parameters = struct.unpack_from("<IHH", head, 1)
        ends = 0 if self._deprecate_eof else (columns > 0) + (parameters > 0)
        for _ in range(columns + parameters + ends):
            await self.read_packet()
        return int(statement_id)

    async def execute(self, number: int, parameters: bytes = b"", *, flags: int = 0) -> list[bytes]:
        """Execute a statement that returns rows; return their payloads, none if a cursor is opened.

        `parameters`: the NULL bitmap, whether types follow, the types, the values.
        """
        body = struct.pack("<IBI", number, flags, 1) + parameters
        head = await self.send_command(MySqlCommand.STMT_EXECUTE, body)
        assert head[0] not in (0x00, 0xFF), head
        return await self._read_rows(head[0], cursor=bool(flags))

    async def close_statement(self, number: int) -> None:
        """Close a statement; there is no response."""
        self.writer.write(frame(0, struct.pack("<BI", MySqlCommand.STMT_CLOSE, number)))

    async def _read_rows(self, columns: int, *, cursor: bool = False) -> list[bytes]:
        """Return the rows of a result set after its definitions."""
        for _ in range(columns + (0 if self._deprecate_eof else 1)):
            await self.read_packet()
        if cursor and not self._deprecate_eof:
            return []
        return (await self.read_until_eof(9 if self._deprecate_eof else 5))[:-1]

    async def export_states(self, codec: str = "utf-8") -> tuple[dict[str, Any], bytes]:
        """Run SHOW SESSION_STATES; return the states, and the token as received."""
        ((states, token),) = await self.rows("show session_states", codec)
        assert states is not None
        return json.loads(states), (token or "").encode()

    async def set_states(self, states: dict[str, Any], codec: str = "utf-8") -> bytes:
        """Run SET SESSION_STATES, with the text escaped for a session with backslash escapes."""
        return await self.query(set_states_statement(states).encode(codec))


def set_states_statement(states: dict[str, Any]) -> str:
    """Return the SET SESSION_STATES statement for a session with backslash escapes."""
    text = json.dumps(states, ensure_ascii=False).replace("\\", "\\\\").replace("'", "\\'")
    return f"set session_states '{text}'"


def error_code(payload: bytes) -> int:
    """Return the code of an ERR packet; 0 for OK."""
    assert payload[0] in (0x00, 0xFF), payload
    return int.from_bytes(payload[1:3], "little") if payload[0] == 0xFF else 0


@asynccontextmanager
async def raw_connection(sim: TidbSim) -> AsyncIterator[RawClient]:
    """Connect without sending anything. Close the connection at the end."""
    host, port = sim.sql_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def raw_session(
    sim: TidbSim, *statements: str, capabilities: Capability = CAPABILITIES
) -> AsyncIterator[RawClient]:
    """Yield a session as root in which these statements have been executed."""
    async with raw_connection(sim) as client:
        assert await client.login(capabilities) == ok(AUTOCOMMIT)
        for statement in statements:
            await run_statement(client, statement)
        yield client


@asynccontextmanager
async def migrated_session(
    client: RawClient, sim: TidbSim, *, capabilities: Capability = CAPABILITIES, codec: str = "utf-8"
) -> AsyncIterator[RawClient]:
    """Yield the session after its migration to another simulated server."""
    states, token = await client.export_states(codec)
    async with raw_connection(sim) as other:
        database = states.get("current-db", "")
        response = await other.login_by_token(token, database=database, capabilities=capabilities)
        assert response == ok(AUTOCOMMIT)
        if codec != "utf-8":
            await run_statement(other, f"set names {codec}")
        assert (await other.set_states(states, codec))[0] == 0x00
        yield other


async def run_statement(client: RawClient, statement: str) -> None:
    """Run a statement, with or without rows, that must succeed."""
    if statement.startswith("select"):
        await client.rows(statement)
        return
    response = await client.query(statement)
    assert response[0] == 0x00, response
