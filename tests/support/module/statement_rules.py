"""A node that records statements, and clients that try to get forbidden ones past the module."""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    MAX_PACKET_PAYLOAD,
    Capability,
    MySqlCommand,
    frame,
    frames,
    lenenc_bytes,
    ok,
)
from tests.support.fake_servers import Handler
from tests.support.module.envoy import accept_login, greeting_packet, with_timeout
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until_read

BLOCK_FORBIDDEN = {
    "name": "no-forbidden",
    "pattern": r"delete from forbidden_\d+",
    "block": {},
}
QUERY_ATTRIBUTES = Capability(1 << 27)
LAST_PREPARED = 0xFFFF_FFFF
LOAD_DATA = b"load data local"
BLOCKED, UNKNOWN_STATEMENT, TOO_LONG = 1148, 1243, 1153

_PAUSES = 0.05  # how often a client pauses between two writes
_SPACES = (" ", "\t", "\n", "\r\n")
_COMMENTS = ("/* c */", "/**/", "-- c\n", "#c\n", "/*!40101 */", "/*T![ttl] */", "/*M! c */")
_EXECUTED = ("/*! {} */", "/*!40101 {} */", "/*T! {} */", "/*T![ttl] {} */")
_OTHER_STATEMENTS = ("select 1", "select 'forbidden'", "begin", "set @a = '/*'", "insert into t values (1)")


def error_of(payload: bytes) -> int:
    """Return the error code of a response; 0: it is OK."""
    return int.from_bytes(payload[1:3], "little") if payload[0] == 0xFF else 0


async def read_message(client: RawClient) -> tuple[int, bytes]:
    """Return the last sequence number and the payload of a message, which may have several packets."""
    payload = b""
    while True:
        sequence, part = await client.read_packet()
        payload += part
        if len(part) < MAX_PACKET_PAYLOAD:
            return sequence, payload


@dataclass
class RecordingNode:
    """A node that answers every command with OK, and keeps the payloads of all requests with statements."""

    attributes: bool = False
    offered: Capability = OFFERED_CAPABILITIES
    requests: list[bytes] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """If set, statements that contain `slow` are answered only while this event is set."""
    slow_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a statement waits for `gate`."""
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def handler(self) -> Handler:
        return self._serve

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        offered = self.offered | (QUERY_ATTRIBUTES if self.attributes else Capability(0))
        node = await accept_login(reader, writer, greeting_packet(offered=offered))
        while True:
            sequence, payload = await read_message(node)
            command = payload[0]
            if command == MySqlCommand.STMT_CLOSE:
                continue
            if command in {MySqlCommand.QUERY, MySqlCommand.STMT_PREPARE, MySqlCommand.STMT_EXECUTE}:
                self.requests.append(payload)
            if self.gate is not None and b"slow" in payload:
                self.slow_arrived.set()
                await self.gate.wait()
            if payload[1:].startswith(LOAD_DATA):
                writer.write(frame(sequence + 1, b"\xfbfile"))
                while payload:
                    sequence, payload = await read_message(node)
            answer = ok(AUTOCOMMIT)
            if command == MySqlCommand.STMT_PREPARE:
                answer = struct.pack("<BIHHBH", 0, next(self._ids), 0, 0, 0, 0)
            writer.write(frame(sequence + 1, answer))


@dataclass(frozen=True)
class Request:
    """A request of a client. `error`: the code that it must get, 0: OK."""

    payload: bytes
    error: int = 0

    @property
    def packets(self) -> bytes:
        return frames(0, [self.payload])

    @property
    def response_sequence(self) -> int:
        return len(self.payload) // MAX_PACKET_PAYLOAD + 1


class StatementGenerator:
    """Makes requests with forbidden statements in all disguises, and with similar ones that are allowed.

    `large`: how often a statement has more than 64 KiB. `huge`: how often it has more than 16 MiB.
    """

    def __init__(self, seed: int, *, attributes: bool, large: float = 0.01, huge: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._attributes, self._large, self._huge = attributes, large, huge
        self._numbers = itertools.count()
        self._has_last_prepared = False

    def text(self, *, forbidden: bool) -> str:
        """Return the text of a request; with `forbidden`, one of its statements is forbidden."""
        statements = self._random.choices(_OTHER_STATEMENTS, k=self._random.choice((0, 0, 0, 1, 2)))
        statements.insert(self._random.randint(0, len(statements)), self._statement(forbidden=forbidden))
        text = self._random.choice((";", "; ", " ;\n")).join(statements) + self._random.choice(("", "", ";"))
        if self._random.random() < self._huge:
            text += f" /* {'x' * MAX_PACKET_PAYLOAD} */"
        elif self._random.random() < self._large:
            text += f" -- {'x' * self._random.randint(65_536, 300_000)}"
        return text

    def _statement(self, *, forbidden: bool) -> str:
        words = ["delete", "from", f"{'forbidden' if forbidden else 'allowed'}_{next(self._numbers)}"]
        words = [word.upper() if self._random.random() < 0.3 else word for word in words]
        kind = self._random.random()
        if kind < 0.2:
            words[0] = self._random.choice(_EXECUTED).format(words[0])
        if kind < 0.1:
            words[2] = self._random.choice(_EXECUTED).format(words[2])
        text = self._space(0) + (self._space(1)).join(words) + self._space(0)
        if self._random.random() < 0.1:
            quoted = text.replace("'", "''")
            return f"prepare s from{self._space(1)}'{quoted}'"
        return text

    def _space(self, least: int) -> str:
        return "".join(self._random.choices((*_SPACES, *_COMMENTS), k=self._random.randint(least, least + 2)))

    def query(self, *, forbidden: bool) -> Request:
        text = self.text(forbidden=forbidden).encode() + self._end()
        head = b""
        if self._attributes:
            values = self._random.choices(("", "delete from", "x" * 300), k=self._random.randint(0, 9))
            head = lenenc_int_pair(len(values)) + (attribute_block(values) if values else b"")
        return Request(bytes((MySqlCommand.QUERY,)) + head + text, BLOCKED if forbidden else 0)

    def prepare(self, *, forbidden: bool) -> Request:
        start = self._random.choice((b"", b"", b";"))
        text = (
            start + self._statement(forbidden=forbidden).encode() + self._random.choice((b"", b"; ", b";;"))
        )
        text += self._end()
        return Request(bytes((MySqlCommand.STMT_PREPARE,)) + text, BLOCKED if forbidden else 0)

    def _end(self) -> bytes:
        return self._random.choice((b"", b"", b"\0"))

    def round(self) -> list[Request]:
        """Return requests that a client sends ahead, without waiting for responses."""
        requests: list[Request] = []
        for _ in range(self._random.randint(1, 8)):
            forbidden = self._random.random() < 0.5
            kind = self._random.random()
            if kind < 0.55:
                requests.append(self.query(forbidden=forbidden))
            elif kind < 0.75:
                requests.append(self.prepare(forbidden=forbidden))
                self._has_last_prepared = not forbidden
            elif kind < 0.85:
                error = 0 if self._has_last_prepared else UNKNOWN_STATEMENT
                requests.append(Request(execute(LAST_PREPARED), error))
            elif kind < 0.9:
                requests.append(Request(execute(self._random.randint(1 << 20, 1 << 21)), UNKNOWN_STATEMENT))
            else:
                requests.append(Request(bytes((MySqlCommand.PING,))))
        return requests

    def pauses(self) -> bool:
        """Return whether what a client has sent is read before it sends more."""
        return self._random.random() < _PAUSES

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Split the bytes as a network may."""
        if self._random.random() < 0.3:
            yield data
            return
        while data:
            length = self._random.choice((1, 3, 4, 5, 40, 1000, 70_000))
            yield data[:length]
            data = data[length:]


def execute(statement: int) -> bytes:
    """Return COM_STMT_EXECUTE without parameters."""
    return struct.pack("<BIBI", MySqlCommand.STMT_EXECUTE, statement, 0, 1)


def lenenc_int_pair(count: int) -> bytes:
    """Return the number of attributes and the number of their sets."""
    return bytes((count, 1))


def attribute_block(values: Sequence[str]) -> bytes:
    """Return the attributes of a query: strings."""
    types = b"".join(struct.pack("<BB", 0xFD, 0) + lenenc_bytes(b"name") for _ in values)
    nulls = bytes((len(values) + 7) // 8)
    return nulls + b"\x01" + types + b"".join(lenenc_bytes(value.encode()) for value in values)


async def run_round(client: RawClient, generator: StatementGenerator) -> int:
    """Send a round of requests and check all responses; return the number of requests."""
    requests = generator.round()
    data = b"".join(request.packets for request in requests)

    async def send() -> None:
        for piece in generator.pieces(data):
            client.writer.write(piece)
            await client.writer.drain()
            if generator.pauses():
                await wait_until_read(client.writer)

    async def read() -> None:
        for request in requests:
            sequence, payload = await with_timeout(client.read_packet())
            error = struct.unpack("<H", payload[1:3])[0] if payload[0] == 0xFF else 0
            expected = request.error, request.response_sequence
            assert (error, sequence) == expected, (request.payload[:300], payload)

    await asyncio.gather(send(), read())
    return len(requests)
