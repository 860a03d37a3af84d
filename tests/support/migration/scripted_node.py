"""A node that stops before each step of a move until it may go on, so that something can fail there.

It keeps of a session what can be seen of a move: a variable, and ROW_COUNT(), which its export disturbs.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from controlplane import address as addresses
from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES, build_greeting, new_salt
from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    MAX_PACKET_PAYLOAD,
    Capability,
    MySqlCommand,
    err,
    frame,
    frames,
    ok,
    result_set,
    single_row_result,
)
from tests.support.waiting import wait_until, wait_until_read

COLUMN_TYPE_JSON = 0xF5
OK_PACKET = frame(1, ok(AUTOCOMMIT))
LOGIN_OK = ok(AUTOCOMMIT)
SHUTDOWN_ERROR = err(1053, "Server shutdown in progress", "08S01")
CHECK_STATEMENT = "select @a, row_count(), @@hostname"
SSL_REQUEST_BYTES = 36
"""Bytes of an SSLRequest."""


class GateAction(Enum):
    """What a node does when it may go on: it answers, that was done for it, or it is silent from then on."""

    ANSWER = 0
    ALREADY_ANSWERED = 1
    STAY_SILENT = 2


async def reset_connection(connection: socket.socket, close: Callable[[], None]) -> None:
    """Has it end by RST, when `close` does; returns when that is done."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    close()
    await wait_until(lambda: connection.fileno() == -1)


class NodeConnection:
    """One connection, as the node has it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter | None = None
        self.user_variable, self.row_count = "", 0
        self.logged_in_by_token = False
        """It was let in by a token."""

    async def open(self, tls: ssl.SSLContext | None) -> None:
        """From here on bytes are buffered. TLS begins, if at all; OSError when that fails."""
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(limit=1 << 20)
        protocol = asyncio.StreamReaderProtocol(self.reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, self._connection, ssl=tls)
        self.writer = asyncio.StreamWriter(transport, protocol, self.reader, loop)

    async def read_ssl_request(self) -> bytes:
        """An SSLRequest, and nothing of what stands behind it."""
        loop, whole = asyncio.get_running_loop(), b""
        while len(whole) < SSL_REQUEST_BYTES:
            piece = await loop.sock_recv(self._connection, SSL_REQUEST_BYTES - len(whole))
            if not piece:
                raise EOFError
            whole += piece
        return whole

    async def read_command(self) -> bytes:
        """The payload of the next request, which may take several packets."""
        whole = b""
        while True:
            size = int.from_bytes((await self.reader.readexactly(4))[:3], "little")
            whole += await self.reader.readexactly(size)
            if size < MAX_PACKET_PAYLOAD:
                return whole

    def send(self, data: bytes) -> None:
        """At once."""
        if self.writer is not None:
            self.writer.write(data)
        else:
            self._connection.send(data)

    async def send_bytewise(self, data: bytes) -> None:
        """Byte by byte, each of which is read alone."""
        assert self.writer is not None
        for byte in data:
            self.writer.write(bytes((byte,)))
            await wait_until_read(self.writer)

    async def wait_until_read(self) -> None:
        """Returns when all was read."""
        assert self.writer is not None
        await wait_until_read(self.writer)

    async def send_fin(self) -> None:
        """Ends it."""
        if self.writer is None:
            self._connection.shutdown(socket.SHUT_WR)
        elif self.writer.can_write_eof():
            with suppress(OSError):  # it may have been ended there
                self.writer.write_eof()
        else:
            self.writer.close()

    async def reset(self) -> None:
        """Breaks it off; returns when that is done."""
        await reset_connection(self._connection, self.close)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
        else:
            self._connection.close()

    async def wait_until_closed(self) -> None:
        """Returns when the other side has ended it, too, or broken it off."""
        with suppress(OSError):
            if self.writer is not None:
                while await self.reader.read(1 << 16):
                    pass
            elif self._connection.fileno() != -1:
                while await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16):
                    pass


@dataclass
class StepGate:
    """Where a node waits. `link`: its connection, once it is there. `open` says how it goes on."""

    was_reached: asyncio.Event = field(default_factory=asyncio.Event)
    action: asyncio.Future[GateAction] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    connection: NodeConnection | None = None
    bytewise: bool = False
    stays_closed: bool = False

    def proceed(self, action: GateAction = GateAction.ANSWER) -> None:
        if not self.action.done():
            self.action.set_result(action)

    async def wait_reached(self) -> NodeConnection:
        """The connection that has come here."""
        async with asyncio.timeout(20):
            await self.was_reached.wait()
        assert self.connection is not None
        return self.connection


class ScriptedNode:
    """A node. It stops where it is told to (`hold`): connect, tls, login, states, export, undo, statement."""

    def __init__(self, name: str, tls: ssl.SSLContext | None = None) -> None:
        self.name, self.endpoint = name, ""
        self.tls = tls
        self.statements: list[bytes] = []
        """Beginnings of the statements of clients."""
        self.connections: list[NodeConnection] = []
        self.open_connections = 0
        self.waiting_count = 0
        """Connections that have come to where they wait."""
        self.migration_completed = asyncio.Event()
        """The last OK to a session that moves was said."""
        self.canned_answers: dict[bytes, bytes] = {}
        """To statements, in place of the usual."""
        self.quit_count = self.export_count = 0
        """How often it was told COM_QUIT, and asked for states."""
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._gates: dict[str, StepGate] = {}
        self._all_gates: list[StepGate] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def hold_at(self, step: str, *, bytewise: bool = False, stays_closed: bool = False) -> StepGate:
        """The next connection that comes there waits; if `lasting`, all that do.

        `bytewise`: its answer comes byte by byte.
        """
        gate = self._gates[step] = StepGate(bytewise=bytewise, stays_closed=stays_closed)
        self._all_gates.append(gate)
        return gate

    def release_all(self) -> None:
        """Whoever waits goes on, and nobody waits any more."""
        self._gates.clear()
        for gate in self._all_gates:
            gate.proceed()

    @asynccontextmanager
    async def listening(self, backlog: int = 256) -> AsyncIterator[ScriptedNode]:
        """On a port of its own; all is cut at the end."""
        with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listener:
            listener.setblocking(False)
            self.endpoint = addresses.join("127.0.0.1", listener.getsockname()[1])
            self._listener = listener
            self._accepting = asyncio.create_task(self._accept(listener))
            try:
                yield self
            finally:
                every = [self._accepting, *self._tasks]
                for task in every:
                    task.cancel()
                await asyncio.gather(*every, return_exceptions=True)
                for link in self.connections:
                    link.close()

    async def stop_listening(self) -> None:
        """Refuse new connections, like a node whose process has ended; open connections stay."""
        assert self._accepting is not None
        assert self._listener is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = NodeConnection(connection)
            self.connections.append(link)
            self.open_connections += 1
            task = loop.create_task(self._serve(link))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, link: NodeConnection) -> None:
        try:
            if await self._greet(link) and await self._accept_login(link):
                while await self._serve_command(link):
                    pass
            await link.wait_until_closed()
        except (OSError, EOFError):
            pass  # that is how most of them end
        finally:
            link.close()
            self.open_connections -= 1

    async def _pass_gate(self, step: str, link: NodeConnection, answer: bytes) -> bool:
        """Waits there, if it is to, and answers. False: nothing more is to be said."""
        gate = self._gates.get(step)
        if gate is not None:
            if not gate.stays_closed:
                del self._gates[step]
            gate.connection = link
            gate.was_reached.set()
            self.waiting_count += 1
            how = await asyncio.shield(gate.action)
            if how is GateAction.STAY_SILENT:
                return False
            if how is GateAction.ALREADY_ANSWERED:
                return True
            if gate.bytewise:
                await link.send_bytewise(answer)
                return True
        link.send(answer)
        return True

    async def _greet(self, link: NodeConnection) -> bool:
        offered = OFFERED_CAPABILITIES | (Capability.SSL if self.tls else Capability(0))
        hello = frame(0, build_greeting("8.0.11-TiDB-v8.5.3", 7, new_salt(), offered=offered))
        if self.tls is None:
            await link.open(None)
            return await self._pass_gate("connect", link, hello)
        if not await self._pass_gate("connect", link, hello):
            return False
        await link.read_ssl_request()
        if not await self._pass_gate("tls", link, b""):
            return False
        await link.open(self.tls)
        return True

    async def _accept_login(self, link: NodeConnection) -> bool:
        header = await link.reader.readexactly(4)
        login = await link.reader.readexactly(int.from_bytes(header[:3], "little"))
        link.logged_in_by_token = b"tidb_session_token" in login
        answer = frame(header[3] + 1, LOGIN_OK)
        return await self._pass_gate("login" if link.logged_in_by_token else "first login", link, answer)

    async def _serve_command(self, link: NodeConnection) -> bool:
        command = await link.read_command()
        text = command[1:200]
        if command[0] == MySqlCommand.QUIT:
            self.quit_count += 1
            link.close()
            return False
        if text == b"SHOW SESSION_STATES":
            self.export_count += 1
            answer = self.states_result(link, link.row_count)
            link.row_count = -1
            return await self._pass_gate("export", link, answer)
        if text.startswith(b"SET SESSION_STATES"):
            self._restore(link, command[1:].decode())
            if not link.logged_in_by_token:
                return await self._pass_gate("undo", link, OK_PACKET)
            link.logged_in_by_token = False
            goes_on = await self._pass_gate("states", link, OK_PACKET)
            self.migration_completed.set()
            return goes_on
        if text.startswith(b"SET @@session.sql_mode=''"):
            return await self._pass_gate("prepare", link, OK_PACKET)
        if command[0] == MySqlCommand.PING:
            return await self._pass_gate("ping", link, OK_PACKET)
        self.statements.append(text)
        return await self._pass_gate("statement", link, self._result(link, command))

    def _result(self, link: NodeConnection, command: bytes) -> bytes:
        statement = command[1:]
        if statement in self.canned_answers:
            link.row_count = -1
            return self.canned_answers[statement]
        if found := re.fullmatch(rb"set @a = (\d+)", statement):
            link.user_variable, link.row_count = found[1].decode(), 0
            return OK_PACKET
        if found := re.fullmatch(rb"insert (\d)", statement):
            link.row_count = int(found[1])
            return frame(1, b"\0%c\0\x02\0\0\0" % link.row_count)
        if statement == CHECK_STATEMENT.encode():
            row = [("a", link.user_variable), ("rows", str(link.row_count)), ("node", self.name)]
        else:
            row = [("size", str(len(statement))), ("node", self.name)]
        link.row_count = -1
        return frames(1, single_row_result(row, AUTOCOMMIT, deprecate_eof=False))

    @staticmethod
    def states_result(link: NodeConnection, rows: int, token: bytes | None = b'{"username":"root"}') -> bytes:
        """An answer to SHOW SESSION_STATES."""
        kept = {
            "user-var-values": {"a": link.user_variable},
            "affected-rows": rows,
            "found-rows": 3,
            "sys-vars": {"sql_mode": ""},
        }
        return session_states_result(json.dumps(kept).encode(), token)

    @staticmethod
    def _restore(link: NodeConnection, statement: str) -> None:
        text = statement.removeprefix("SET SESSION_STATES '").removesuffix("'")
        kept: dict[str, Any] = json.loads(text.replace("''", "'").replace("\\\\", "\\"))
        if "user-var-values" in kept:
            link.user_variable = kept["user-var-values"]["a"]
        link.row_count = kept.get("affected-rows", 0)


def session_states_result(*row: bytes | None) -> bytes:
    """An answer to SHOW SESSION_STATES with this row."""
    columns = [("Session_states", COLUMN_TYPE_JSON), ("Session_token", COLUMN_TYPE_JSON)]
    return frames(1, result_set(columns, [row], AUTOCOMMIT, deprecate_eof=False))
