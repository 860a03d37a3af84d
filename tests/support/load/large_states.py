"""A fake node whose sessions export session states of any size. All sessions export the same bytes.

The only real state of a session is `ROW_COUNT()`: SHOW SESSION_STATES changes it, and SET SESSION_STATES sets
it. The node does not use asyncio's streams, because they copy data that does not fit into the socket.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    MAX_PACKET_PAYLOAD,
    TYPE_JSON,
    MySqlCommand,
    err,
    frame,
    frames,
    ok,
    result_set,
    single_row_result,
)
from tests.support.module.envoy import greeting_packet

ROW_COUNT = b"select row_count()"
INSERT = b"insert"
INSERTED_ROWS = 2
"""The value of ROW_COUNT() after INSERT."""
_TOKEN = json.dumps({"username": "root", "signature": "s" * 400}).encode()
_LOGIN_OK = ok(AUTOCOMMIT)
_OK = frame(1, _LOGIN_OK)
_INSERTED = frame(1, b"\0%c\0\x02\0\0\0" % INSERTED_ROWS)
_DENIED = err(1045, "Access denied", "28000")
_REPEATED_VALUE = b"0123456789abcd''"
"""The value of a variable repeats this text. SET SESSION_STATES must escape the quotes."""


def build_states(size: int) -> bytes:
    """Return JSON of `size` bytes, with TiDB's order of keys."""
    head = b'{"affected-rows": %d, "user-var-values": {"a": "' % INSERTED_ROWS
    tail = b'"}, "warnings": []}'
    room = size - len(head) - len(tail)
    return head + (_REPEATED_VALUE * (room // len(_REPEATED_VALUE) + 1))[:room] + tail


@dataclass
class LargeStatesNode:
    """A node. `size`: bytes of each session's states. `denies_tokens`: whether it denies logins by token."""

    size: int = 0
    denies_tokens: bool = False
    endpoint: str = ""
    export_count: int = 0
    """Number of state exports."""
    undone_count: int = 0
    """Number of sessions in which the changes of an export were undone."""
    restored_count: int = 0
    """Number of sessions that were restored with all of their states."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of errors."""
    expected: bytes = b""
    """The states that restored sessions must have."""
    _export: memoryview = field(init=False)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        columns = [("Session_states", TYPE_JSON), ("Session_token", TYPE_JSON)]
        row = [build_states(self.size), _TOKEN]
        self._export = memoryview(frames(1, result_set(columns, [row], AUTOCOMMIT, deprecate_eof=False)))

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[LargeStatesNode]:
        """Listen on a free port; all connections are closed at the end."""
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            listener.setblocking(False)
            self.endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
            accept_task = asyncio.create_task(self._accept(listener))
            try:
                yield self
            finally:
                all_tasks = [accept_task, *self._serving]
                for task in all_tasks:
                    task.cancel()
                for result in await asyncio.gather(*all_tasks, return_exceptions=True):
                    if isinstance(result, Exception):
                        self.problems.append(repr(result))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serving.add(asyncio.create_task(self._serve(connection)))

    async def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError):
            packets = _PacketConnection(connection)
            await packets.send(greeting_packet())
            login, sequence = await packets.read_message()
            has_token = b"tidb_session_token" in login
            await packets.send(
                frame(sequence + 1, _DENIED if has_token and self.denies_tokens else _LOGIN_OK)
            )
            rows = 0
            while True:
                command, _ = await packets.read_message()
                text = command[1:]
                if command[0] == MySqlCommand.QUIT:
                    return
                if text == b"SHOW SESSION_STATES":
                    self.export_count += 1
                    rows = -1
                    await packets.send(self._export)
                elif text.startswith(b"SET SESSION_STATES"):
                    rows = self._check_restored(text, has_token)
                    has_token = False
                    await packets.send(_OK)
                elif text == ROW_COUNT:
                    row = [("row_count()", str(rows)), ("node", self.endpoint)]
                    rows = -1
                    await packets.send(frames(1, single_row_result(row, AUTOCOMMIT, deprecate_eof=False)))
                elif text == INSERT:
                    rows = INSERTED_ROWS
                    await packets.send(_INSERTED)
                else:
                    await packets.send(_OK)

    def _check_restored(self, text: bytes, has_token: bool) -> int:
        """Check the states in a SET SESSION_STATES, and return the value of ROW_COUNT() that they set.

        With `has_token`, the statement must set all states, otherwise only those that an export changes.
        """
        literal = text.removeprefix(b"SET SESSION_STATES '").removesuffix(b"'")
        json_text = literal.replace(b"''", b"'").replace(b"\\\\", b"\\")
        if not has_token:
            self.undone_count += 1
            if json_text != b'{"affected-rows":%d,"warnings":[]}' % INSERTED_ROWS:
                self.problems.append(f"undone by {text[:100]!r}")
        elif json_text == self.expected:
            self.restored_count += 1
        else:
            self.problems.append(f"{len(json_text)} bytes of states, not {len(self.expected)}")
        match = re.match(rb'{"affected-rows": ?(-?\d+)', json_text)
        return 0 if match is None else int(match[1])


class _PacketConnection:
    """An unbuffered packet connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes | memoryview) -> None:
        await self._loop.sock_sendall(self._connection, data)

    async def read_message(self) -> tuple[bytes, int]:
        """Return the payload of the next message, and the sequence number of its last packet."""
        parts = []
        while True:
            head = await self._read_exactly(4)
            size = int.from_bytes(head[:3], "little")
            parts.append(await self._read_exactly(size))
            if size < MAX_PACKET_PAYLOAD:
                return b"".join(parts), head[3]

    async def _read_exactly(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            count = await self._loop.sock_recv_into(self._connection, view)
            if not count:
                raise EOFError
            view = view[count:]
        return buffer
