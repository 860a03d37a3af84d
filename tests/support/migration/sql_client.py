"""A client that parses whole answers, so that tests can compare the answers of two sessions."""

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
from sandbox.tidb_sim.mariadb_backend import parse_row
from sandbox.tidb_sim.packets import (
    CURSOR_EXISTS,
    HEADER_SIZE,
    MAX_PACKET_PAYLOAD,
    MORE_RESULTS,
    Capability,
    MySqlCommand,
    frame,
    frames,
    lenenc_bytes,
    read_lenenc_int,
    read_nul_bytes,
)
from tests.support.tidb_sim_clients import CAPABILITIES
from tests.support.waiting import wait_until_read

COMMANDS_WITHOUT_RESPONSE = frozenset(
    {MySqlCommand.QUIT, MySqlCommand.STMT_CLOSE, MySqlCommand.STMT_SEND_LONG_DATA}
)
_COLLATION = 45  # utf8mb4_general_ci
_ANSWER_TIMEOUT_SECONDS = 30.0
_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class OkAnswer:
    """OK, or the EOF that answers COM_SET_OPTION."""

    status: int
    affected: int = 0
    insert_id: int = 0
    warnings: int = 0
    info: bytes = b""


@dataclass(frozen=True)
class ErrorAnswer:
    """ERR; `message` starts with the SQLSTATE."""

    code: int
    message: bytes


@dataclass(frozen=True)
class PrepareAnswer:
    """The answer to COM_STMT_PREPARE without the statement id: payloads of the definitions, and warnings."""

    columns: tuple[bytes, ...]
    parameters: tuple[bytes, ...]
    warnings: int


@dataclass(frozen=True)
class RowsAnswer:
    """A result set: payloads of the column definitions and of the rows."""

    columns: tuple[bytes, ...]
    rows: tuple[bytes, ...]
    status: int
    warnings: int

    def cells(self) -> list[tuple[bytes | None, ...]]:
        """Return the values of a text result."""
        return [parse_row(row, len(self.columns)) for row in self.rows]


AnswerPart = OkAnswer | ErrorAnswer | PrepareAnswer | RowsAnswer
Answer = tuple[AnswerPart, ...]
"""One part, or one for each statement of a text. No part if the command has no response."""


class LoginFailed(Exception):
    """The login failed. The argument is the payload of the server's response."""


class AnswerClient:
    """A session. `statement_id`: id of the last prepared statement. `load_data_packets`: data that the client
    sends for LOAD DATA LOCAL.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, capabilities: Capability
    ) -> None:
        self.reader, self.writer, self.capabilities = reader, writer, capabilities
        self.statement_id = 0
        self.load_data_packets: Sequence[bytes] = ()
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
    ) -> AnswerClient:
        """Log in, from the local address `source`. Raises LoginFailed with the server's error."""
        conditions = {
            Capability.SSL: tls is not None,
            Capability.CONNECT_WITH_DB: bool(database),
            Capability.CONNECT_ATTRS: attributes is not None,
        }
        capabilities |= reduce(or_, (flag for flag, on in conditions.items() if on), Capability(0))
        local = (source, 0) if source else None
        client = cls(*await asyncio.open_connection(host, port, local_addr=local), capabilities)
        greeting = await client._read_packet()
        _, at = read_nul_bytes(greeting, 1)
        client._salt = greeting[at + 4 : at + 12] + greeting[at + 31 : at + 43]
        head = struct.pack("<IIB23x", capabilities, 1 << 24, collation)
        if tls is not None:
            client._send_next(head)
            await client.writer.start_tls(tls, server_hostname="localhost")
        body = head + user.encode() + b"\0" + _length_prefixed(scramble_password(password, client._salt))
        body += database.encode() + b"\0" if database else b""
        body += NATIVE_PASSWORD.encode() + b"\0"
        body += _encode_attributes(attributes) if attributes is not None else b""
        client._send_next(body)
        await client._finish_login(password)
        return client

    async def change_user(
        self,
        user: str,
        password: str = "",
        database: str = "",
        *,
        plugin: str = NATIVE_PASSWORD,
        first_piece_bytes: int = MAX_PACKET_PAYLOAD,
    ) -> None:
        """Change the user. The server must switch another `plugin` to NATIVE_PASSWORD. Raises LoginFailed.

        The server reads `first_piece_bytes` of the request before the client sends the rest.
        """
        proof = scramble_password(password, self._salt if plugin == NATIVE_PASSWORD else b"")
        body = user.encode() + b"\0" + _length_prefixed(proof) + database.encode() + b"\0"
        body += struct.pack("<H", _COLLATION) + plugin.encode() + b"\0"
        body += (
            _encode_attributes({"changed": "yes"}) if self.capabilities & Capability.CONNECT_ATTRS else b""
        )
        packet = encode_command(MySqlCommand.CHANGE_USER, body)
        self._sequence = None
        self.writer.write(packet[:first_piece_bytes])
        if first_piece_bytes < len(packet):
            await wait_until_read(self.writer)
            self.writer.write(packet[first_piece_bytes:])
        await self._finish_login(password)

    async def query(self, text: str | bytes) -> Answer:
        """Run a text with one or several statements."""
        return await self.send_command(MySqlCommand.QUERY, text.encode() if isinstance(text, str) else text)

    async def query_row(self, text: str | bytes) -> tuple[bytes | None, ...]:
        """Return the only row of a statement."""
        (part,) = await self.query(text)
        assert isinstance(part, RowsAnswer), part
        (row,) = part.cells()
        return row

    async def send_command(self, command: int, body: bytes = b"") -> Answer:
        """Send any command and return its answer."""
        self.writer.write(encode_command(command, body))
        return await self.read_answer(command)

    async def read_answer(self, command: int) -> Answer:
        """Read the answer to a command that was sent separately."""
        self._sequence = None
        async with asyncio.timeout(_ANSWER_TIMEOUT_SECONDS):
            return await self._read_answer(command)

    async def _read_answer(self, command: int) -> Answer:
        if command in COMMANDS_WITHOUT_RESPONSE:
            return ()
        if command == MySqlCommand.STMT_PREPARE:
            return (await self._read_prepare_answer(),)
        parts: list[AnswerPart] = []
        while not parts or _has_more(parts[-1]):
            parts.append(await self._read_part(command))
        return tuple(parts)

    async def _read_part(self, command: int) -> AnswerPart:
        if command in (MySqlCommand.STMT_FETCH, MySqlCommand.FIELD_LIST):
            return await self._read_rows(())
        head = await self._read_packet()
        if head[0] == 0xFF:
            return _parse_error(head)
        if head[0] in (0x00, 0xFE):
            return _parse_ok(head)
        if head[0] == 0xFB:
            await self._upload()
            return await self._read_part(command)
        count, _ = read_lenenc_int(head, 0)
        columns = await self._read_packets(count)
        if not self._deprecate_eof:
            end = _parse_ok(await self._read_packet())
            if end.status & CURSOR_EXISTS:
                return RowsAnswer(columns, (), end.status, end.warnings)
        return await self._read_rows(columns)

    async def _read_rows(self, columns: tuple[bytes, ...]) -> AnswerPart:
        rows: list[bytes] = []
        longest = MAX_PACKET_PAYLOAD if self._deprecate_eof else 6
        while True:
            payload = await self._read_packet()
            if payload[0] == 0xFF:
                return _parse_error(payload)
            if payload[0] == 0xFE and len(payload) < longest:
                end = _parse_ok(payload)
                return RowsAnswer(columns, tuple(rows), end.status, end.warnings)
            rows.append(payload)

    async def _read_prepare_answer(self) -> AnswerPart:
        head = await self._read_packet()
        if head[0] == 0xFF:
            return _parse_error(head)
        self.statement_id, columns, parameters, warnings = struct.unpack_from("<IHHxH", head, 1)
        definitions = []
        for count in (parameters, columns):
            definitions.append(await self._read_packets(count))
            if count and not self._deprecate_eof:
                await self._read_packet()
        return PrepareAnswer(definitions[1], definitions[0], warnings)

    async def _upload(self) -> None:
        """Send `load_data_packets` as the requested file."""
        assert self._sequence is not None
        packets = frames(self._sequence, [*self.load_data_packets, b""])
        self._sequence = (packets[-1] + 1) & 0xFF
        self.writer.write(packets)

    async def _read_packets(self, count: int) -> tuple[bytes, ...]:
        return tuple([await self._read_packet() for _ in range(count)])

    @property
    def _deprecate_eof(self) -> bool:
        return bool(self.capabilities & Capability.DEPRECATE_EOF)

    async def _finish_login(self, password: str) -> None:
        payload = await self._read_packet()
        if payload[0] == 0xFE:
            plugin, at = read_nul_bytes(payload, 1)
            assert plugin.decode() == NATIVE_PASSWORD
            self._salt = payload[at : at + 20]
            self._send_next(scramble_password(password, self._salt))
            payload = await self._read_packet()
        if payload[0] != 0x00:
            raise LoginFailed(payload)

    def _send_next(self, payload: bytes) -> None:
        """Send the next packet of an exchange."""
        assert self._sequence is not None
        self.writer.write(frame(self._sequence, payload))
        self._sequence = (self._sequence + 1) & 0xFF

    async def _read_packet(self) -> bytes:
        """Return the next payload, which may take several packets."""
        while (payload := self._next_payload()) is None:
            chunk = await self.reader.read(_CHUNK_BYTES)
            if not chunk:
                raise asyncio.IncompleteReadError(bytes(self._buffer[:1000]), None)
            self._buffer += chunk
        return payload

    def _next_payload(self) -> bytes | None:
        """Return the next payload if it is complete. Sequence numbers continue within an answer."""
        buffer, parts, at = self._buffer, [], 0
        sequence = self._sequence
        while True:
            end = at + HEADER_SIZE + int.from_bytes(buffer[at : at + 3], "little")
            if len(buffer) < at + HEADER_SIZE or len(buffer) < end:
                return None
            assert sequence in (None, buffer[at + 3]), f"packet {buffer[at + 3]}, not {sequence}"
            sequence = (buffer[at + 3] + 1) & 0xFF
            parts.append(slice(at + HEADER_SIZE, end))
            full, at = end - at == HEADER_SIZE + MAX_PACKET_PAYLOAD, end
            if not full:
                break
        payload = b"".join(buffer[part] for part in parts)
        del buffer[:at]
        self._sequence = sequence
        return payload

    async def quit(self) -> None:
        """Send COM_QUIT and wait until the server has closed the connection."""
        self.writer.write(encode_command(MySqlCommand.QUIT))
        async with asyncio.timeout(_ANSWER_TIMEOUT_SECONDS):
            remaining = self._buffer + await self.reader.read()
        assert not remaining, bytes(remaining[:1000])
        self.writer.close()


def encode_command(command: int, body: bytes = b"") -> bytes:
    """Build the packets of a command."""
    return frames(0, [bytes((command,)) + body])


class ParameterSource(Enum):
    """How a parameter's value is sent if not with COM_STMT_EXECUTE."""

    LONG_DATA = auto()


Value = int | bytes | None | ParameterSource


def execute_body(statement_id: int, values: Sequence[Value], *, types: bool = True, flags: int = 0) -> bytes:
    """Build the body of COM_STMT_EXECUTE with INT64, string and NULL parameters.

    `types`: whether the types are sent.
    """
    body = struct.pack("<IBI", statement_id, flags, 1)
    if values:
        nulls = sum(1 << at for at, value in enumerate(values) if value is None)
        body += nulls.to_bytes((len(values) + 7) // 8, "little") + bytes((types,))
    if values and types:
        body += b"".join(b"\x08\0" if isinstance(value, int) else b"\xfd\0" for value in values)
    return body + b"".join(map(_value, values))


def long_data_body(statement_id: int, parameter: int, data: bytes) -> bytes:
    """Build the body of COM_STMT_SEND_LONG_DATA."""
    return struct.pack("<IH", statement_id, parameter) + data


def fetch_body(statement_id: int, rows: int) -> bytes:
    """Build the body of COM_STMT_FETCH."""
    return struct.pack("<II", statement_id, rows)


def scramble_password(password: str, salt: bytes) -> bytes:
    """Compute the proof of a password (mysql_native_password)."""
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


def _length_prefixed(proof: bytes) -> bytes:
    return bytes((len(proof),)) + proof


def _encode_attributes(attributes: Mapping[str, str]) -> bytes:
    return lenenc_bytes(b"".join(lenenc_bytes(text.encode()) for pair in attributes.items() for text in pair))


def _has_more(part: AnswerPart) -> bool:
    return isinstance(part, OkAnswer | RowsAnswer) and bool(part.status & MORE_RESULTS)


def _parse_error(payload: bytes) -> ErrorAnswer:
    return ErrorAnswer(int.from_bytes(payload[1:3], "little"), payload[3:])


def _parse_ok(payload: bytes) -> OkAnswer:
    if payload[0] == 0xFE and len(payload) == 5:
        warnings, status = struct.unpack_from("<HH", payload, 1)
        return OkAnswer(status, warnings=warnings)
    affected, at = read_lenenc_int(payload, 1)
    insert_id, at = read_lenenc_int(payload, at)
    status, warnings = struct.unpack_from("<HH", payload, at)
    return OkAnswer(status, affected, insert_id, warnings, payload[at + 4 :])
