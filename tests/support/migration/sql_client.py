"""A client that takes whole answers apart, so that those of two sessions can be compared."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import reduce
from operator import or_

from sandbox.tidb_sim.greeting import NATIVE_PASSWORD
from sandbox.tidb_sim.mariadb_backend import cells_of
from sandbox.tidb_sim.packets import (
    CURSOR_EXISTS,
    FULL,
    HEADER_SIZE,
    MORE_RESULTS,
    Capability,
    Command,
    frame,
    frames,
    lenenc_bytes,
    read_lenenc_int,
    read_nul_bytes,
)
from tests.support.tidb_sim_clients import CAPABILITIES
from tests.support.waiting import taken

SILENT = frozenset({Command.QUIT, Command.STMT_CLOSE, Command.STMT_SEND_LONG_DATA})
"""Nothing answers these."""
_COLLATION = 45  # utf8mb4_general_ci
_SECONDS = 30.0
"""No answer may take longer."""
_CHUNK = 256 * 1024
"""Bytes that are read at a time."""


@dataclass(frozen=True)
class Ok:
    """OK, or the EOF that answers COM_SET_OPTION."""

    status: int
    affected: int = 0
    insert_id: int = 0
    warnings: int = 0
    info: bytes = b""


@dataclass(frozen=True)
class Failed:
    """ERR; `text` begins with the SQLSTATE."""

    code: int
    text: bytes


@dataclass(frozen=True)
class Prepared:
    """The answer to COM_STMT_PREPARE but for the number of the statement. Definitions, as their payloads."""

    columns: tuple[bytes, ...]
    parameters: tuple[bytes, ...]
    warnings: int


@dataclass(frozen=True)
class Rows:
    """A result set. `columns`: their definitions; both are payloads."""

    columns: tuple[bytes, ...]
    rows: tuple[bytes, ...]
    status: int
    warnings: int

    def cells(self) -> list[tuple[bytes | None, ...]]:
        """The values of a text result."""
        return [cells_of(row, len(self.columns)) for row in self.rows]


Part = Ok | Failed | Prepared | Rows
Answer = tuple[Part, ...]
"""One part, or several of a text with several statements."""


class Refused(Exception):
    """The login failed."""


class Wire:
    """A session. `number`: of the statement prepared last; `file`: what LOAD DATA LOCAL gets, by packets."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, capabilities: Capability
    ) -> None:
        self.reader, self.writer, self.capabilities = reader, writer, capabilities
        self.number = 0
        self.file: Sequence[bytes] = ()
        self._salt = b""
        self._buffer = bytearray()
        self._sequence: int | None = None

    @classmethod
    async def login(
        cls,
        host: str,
        port: int,
        capabilities: Capability = CAPABILITIES,
        *,
        tls: ssl.SSLContext | None = None,
        user: str = "root",
        password: str = "",
        database: str = "",
        attributes: Mapping[str, str] | None = None,
        collation: int = _COLLATION,
        source: str = "",
    ) -> Wire:
        """Log in, from that address of ours. Refused: with the server's error."""
        wanted = {
            Capability.SSL: tls is not None,
            Capability.CONNECT_WITH_DB: bool(database),
            Capability.CONNECT_ATTRS: attributes is not None,
        }
        capabilities |= reduce(or_, (flag for flag, on in wanted.items() if on), Capability(0))
        local = (source, 0) if source else None
        wire = cls(*await asyncio.open_connection(host, port, local_addr=local), capabilities)
        greeting = await wire._packet()
        _, at = read_nul_bytes(greeting, 1)
        wire._salt = greeting[at + 4 : at + 12] + greeting[at + 31 : at + 43]
        head = struct.pack("<IIB23x", capabilities, 1 << 24, collation)
        if tls is not None:
            wire._goes_on(head)
            await wire.writer.start_tls(tls, server_hostname="localhost")
        body = head + user.encode() + b"\0" + _with_length(scrambled(password, wire._salt))
        body += database.encode() + b"\0" if database else b""
        body += NATIVE_PASSWORD.encode() + b"\0"
        body += _packed(attributes) if attributes is not None else b""
        wire._goes_on(body)
        await wire._admitted(password)
        return wire

    async def change_user(
        self,
        user: str,
        password: str = "",
        database: str = "",
        *,
        plugin: str = NATIVE_PASSWORD,
        cut: int = FULL,
    ) -> None:
        """COM_CHANGE_USER; with another plugin the server must ask for ours. Refused.

        The other side has so many bytes of it before the rest is sent.
        """
        proof = scrambled(password, self._salt if plugin == NATIVE_PASSWORD else b"")
        body = user.encode() + b"\0" + _with_length(proof) + database.encode() + b"\0"
        body += struct.pack("<H", _COLLATION) + plugin.encode() + b"\0"
        body += _packed({"changed": "yes"}) if self.capabilities & Capability.CONNECT_ATTRS else b""
        packet = request(Command.CHANGE_USER, body)
        self._sequence = None
        self.writer.write(packet[:cut])
        if cut < len(packet):
            await taken(self.writer)
            self.writer.write(packet[cut:])
        await self._admitted(password)

    async def query(self, text: str | bytes) -> Answer:
        """A text of one statement or several."""
        return await self.ask(Command.QUERY, text.encode() if isinstance(text, str) else text)

    async def one(self, text: str | bytes) -> tuple[bytes | None, ...]:
        """The only row of a statement."""
        (part,) = await self.query(text)
        assert isinstance(part, Rows), part
        (row,) = part.cells()
        return row

    async def ask(self, command: int, body: bytes = b"") -> Answer:
        """Any command, and its answer."""
        self.writer.write(request(command, body))
        return await self.answer(command)

    async def answer(self, command: int) -> Answer:
        """The answer to what was sent by other ways."""
        self._sequence = None
        async with asyncio.timeout(_SECONDS):
            return await self._answer(command)

    async def _answer(self, command: int) -> Answer:
        if command in SILENT:
            return ()
        if command == Command.STMT_PREPARE:
            return (await self._prepared(),)
        parts: list[Part] = []
        while not parts or _has_more(parts[-1]):
            parts.append(await self._part(command))
        return tuple(parts)

    async def _part(self, command: int) -> Part:
        if command in (Command.STMT_FETCH, Command.FIELD_LIST):
            return await self._rows(())
        head = await self._packet()
        if head[0] == 0xFF:
            return _failed(head)
        if head[0] in (0x00, 0xFE):
            return _ok(head)
        if head[0] == 0xFB:
            await self._upload()
            return await self._part(command)
        count, _ = read_lenenc_int(head, 0)
        columns = await self._several(count)
        if not self._deprecate_eof:
            end = _ok(await self._packet())
            if end.status & CURSOR_EXISTS:
                return Rows(columns, (), end.status, end.warnings)
        return await self._rows(columns)

    async def _rows(self, columns: tuple[bytes, ...]) -> Part:
        rows: list[bytes] = []
        longest = FULL if self._deprecate_eof else 6
        while True:
            payload = await self._packet()
            if payload[0] == 0xFF:
                return _failed(payload)
            if payload[0] == 0xFE and len(payload) < longest:
                end = _ok(payload)
                return Rows(columns, tuple(rows), end.status, end.warnings)
            rows.append(payload)

    async def _prepared(self) -> Part:
        head = await self._packet()
        if head[0] == 0xFF:
            return _failed(head)
        self.number, columns, parameters, warnings = struct.unpack_from("<IHHxH", head, 1)
        found = []
        for count in (parameters, columns):
            found.append(await self._several(count))
            if count and not self._deprecate_eof:
                await self._packet()
        return Prepared(found[1], found[0], warnings)

    async def _upload(self) -> None:
        """The file that was asked for."""
        assert self._sequence is not None
        packets = frames(self._sequence, [*self.file, b""])
        self._sequence = (packets[-1] + 1) & 0xFF
        self.writer.write(packets)

    async def _several(self, count: int) -> tuple[bytes, ...]:
        return tuple([await self._packet() for _ in range(count)])

    @property
    def _deprecate_eof(self) -> bool:
        return bool(self.capabilities & Capability.DEPRECATE_EOF)

    async def _admitted(self, password: str) -> None:
        payload = await self._packet()
        if payload[0] == 0xFE:
            plugin, at = read_nul_bytes(payload, 1)
            assert plugin.decode() == NATIVE_PASSWORD
            self._salt = payload[at : at + 20]
            self._goes_on(scrambled(password, self._salt))
            payload = await self._packet()
        if payload[0] != 0x00:
            raise Refused(payload)

    def _goes_on(self, payload: bytes) -> None:
        """A packet within a dialogue."""
        assert self._sequence is not None
        self.writer.write(frame(self._sequence, payload))
        self._sequence = (self._sequence + 1) & 0xFF

    async def _packet(self) -> bytes:
        """The next payload, however many packets it takes."""
        while (payload := self._whole()) is None:
            chunk = await self.reader.read(_CHUNK)
            if not chunk:
                raise asyncio.IncompleteReadError(bytes(self._buffer[:1000]), None)
            self._buffer += chunk
        return payload

    def _whole(self) -> bytes | None:
        """The next payload, if all of it has come. Within an answer the sequence numbers go on."""
        buffer, parts, at = self._buffer, [], 0
        sequence = self._sequence
        while True:
            end = at + HEADER_SIZE + int.from_bytes(buffer[at : at + 3], "little")
            if len(buffer) < at + HEADER_SIZE or len(buffer) < end:
                return None
            assert sequence in (None, buffer[at + 3]), f"packet {buffer[at + 3]}, not {sequence}"
            sequence = (buffer[at + 3] + 1) & 0xFF
            parts.append(slice(at + HEADER_SIZE, end))
            full, at = end - at == HEADER_SIZE + FULL, end
            if not full:
                break
        payload = b"".join(buffer[part] for part in parts)
        del buffer[:at]
        self._sequence = sequence
        return payload

    async def leave(self) -> None:
        """COM_QUIT; returns when the other side has closed."""
        self.writer.write(request(Command.QUIT))
        async with asyncio.timeout(_SECONDS):
            rest = self._buffer + await self.reader.read()
        assert not rest, bytes(rest[:1000])
        self.writer.close()


def request(command: int, body: bytes = b"") -> bytes:
    """The packets of a command."""
    return frames(0, [bytes((command,)) + body])


class Sent(Enum):
    """How a parameter's value comes, when it does not come with COM_STMT_EXECUTE."""

    LONG_DATA = auto()


Value = int | bytes | None | Sent


def executed(number: int, values: Sequence[Value], *, types: bool = True, flags: int = 0) -> bytes:
    """The body of COM_STMT_EXECUTE with such parameters: INT64, strings, NULL.

    `types`: whether they are told once more.
    """
    body = struct.pack("<IBI", number, flags, 1)
    if values:
        nulls = sum(1 << at for at, value in enumerate(values) if value is None)
        body += nulls.to_bytes((len(values) + 7) // 8, "little") + bytes((types,))
    if values and types:
        body += b"".join(b"\x08\0" if isinstance(value, int) else b"\xfd\0" for value in values)
    return body + b"".join(map(_value, values))


def long_data(number: int, parameter: int, data: bytes) -> bytes:
    """The body of COM_STMT_SEND_LONG_DATA."""
    return struct.pack("<IH", number, parameter) + data


def fetched(number: int, rows: int) -> bytes:
    """The body of COM_STMT_FETCH."""
    return struct.pack("<II", number, rows)


def scrambled(password: str, salt: bytes) -> bytes:
    """What proves a password (mysql_native_password)."""
    if not password:
        return b""
    once = hashlib.sha1(password.encode()).digest()
    mask = hashlib.sha1(salt + hashlib.sha1(once).digest()).digest()
    return bytes(left ^ right for left, right in zip(once, mask, strict=True))


def _value(value: Value) -> bytes:
    match value:
        case int():
            return struct.pack("<q", value)
        case bytes():
            return lenenc_bytes(value)
    return b""


def _with_length(proof: bytes) -> bytes:
    return bytes((len(proof),)) + proof


def _packed(attributes: Mapping[str, str]) -> bytes:
    return lenenc_bytes(b"".join(lenenc_bytes(text.encode()) for pair in attributes.items() for text in pair))


def _has_more(part: Part) -> bool:
    return isinstance(part, Ok | Rows) and bool(part.status & MORE_RESULTS)


def _failed(payload: bytes) -> Failed:
    return Failed(int.from_bytes(payload[1:3], "little"), payload[3:])


def _ok(payload: bytes) -> Ok:
    if payload[0] == 0xFE and len(payload) == 5:
        warnings, status = struct.unpack_from("<HH", payload, 1)
        return Ok(status, warnings=warnings)
    affected, at = read_lenenc_int(payload, 1)
    insert_id, at = read_lenenc_int(payload, at)
    status, warnings = struct.unpack_from("<HH", payload, at)
    return Ok(status, affected, insert_id, warnings, payload[at + 4 :])
