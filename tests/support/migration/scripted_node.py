"""A fake node that can wait before each step of a migration, so that tests can inject faults there.

A session has only two states: a variable, and ROW_COUNT(), which an export (SHOW SESSION_STATES) changes.
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


class GateAction(Enum):
    """What a node does after its gate: send its answer, go on after the test's answer, or stop serving."""

    ANSWER = 0
    TEST_ANSWERED = 1
    SEND_NOTHING = 2


async def reset_and_wait(connection: socket.socket, close: Callable[[], None]) -> None:
    """Call `close` so that it resets the connection. Wait until the socket is closed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    close()
    await wait_until(lambda: connection.fileno() == -1)


class NodeConnection:
    """One connection on the node's side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter | None = None
        self.user_variable, self.row_count = "", 0
        self.has_exported = False
        """Whether its session states were requested."""
        self.logged_in_by_token = False
        """Whether the session has logged in with a session token, and its states were not restored yet."""
        self.awaits_completion = False
        """Whether all states were restored, and some of them will be set once more."""

    async def open(self, tls: ssl.SSLContext | None) -> None:
        """Create reader and writer, with TLS if `tls` is set. Raises OSError if the handshake fails."""
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(limit=1 << 20)
        protocol = asyncio.StreamReaderProtocol(self.reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, self._connection, ssl=tls)
        self.writer = asyncio.StreamWriter(transport, protocol, self.reader, loop)

    async def read_ssl_request(self) -> bytes:
        """Read an SSLRequest, and nothing after it."""
        loop, data = asyncio.get_running_loop(), b""
        while len(data) < SSL_REQUEST_BYTES:
            chunk = await loop.sock_recv(self._connection, SSL_REQUEST_BYTES - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    async def read_command(self) -> bytes:
        """Return the payload of the next request, which may take several packets."""
        payload = b""
        while True:
            size = int.from_bytes((await self.reader.readexactly(4))[:3], "little")
            payload += await self.reader.readexactly(size)
            if size < MAX_PACKET_PAYLOAD:
                return payload

    def send(self, data: bytes) -> None:
        """Send data without waiting."""
        if self.writer is not None:
            self.writer.write(data)
        else:
            self._connection.send(data)

    async def send_bytewise(self, data: bytes) -> None:
        """Send byte by byte. Wait until the peer has read a byte before sending the next."""
        assert self.writer is not None
        for byte in data:
            self.writer.write(bytes((byte,)))
            await wait_until_read(self.writer)

    async def wait_until_read(self) -> None:
        """Wait until the peer has read everything."""
        assert self.writer is not None
        await wait_until_read(self.writer)

    async def send_fin(self) -> None:
        if self.writer is None:
            self._connection.shutdown(socket.SHUT_WR)
        elif self.writer.can_write_eof():
            with suppress(OSError):  # The peer may have closed the connection.
                self.writer.write_eof()
        else:
            self.writer.close()

    async def reset(self) -> None:
        """Reset the connection and wait until its socket is closed."""
        await reset_and_wait(self._connection, self.close)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
        else:
            self._connection.close()

    async def wait_until_closed(self) -> None:
        """Wait until the peer has closed or reset the connection."""
        with suppress(OSError):
            if self.writer is not None:
                while await self.reader.read(1 << 16):
                    pass
            elif self._connection.fileno() != -1:
                while await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16):
                    pass


@dataclass
class StepGate:
    """A point where a connection of a node waits. `proceed` ends the wait. `connection` is set on arrival."""

    was_reached: asyncio.Event = field(default_factory=asyncio.Event)
    action: asyncio.Future[GateAction] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    connection: NodeConnection | None = None
    bytewise: bool = False
    pauses_all: bool = False

    def proceed(self, action: GateAction = GateAction.ANSWER) -> None:
        if not self.action.done():
            self.action.set_result(action)

    async def wait_reached(self) -> NodeConnection:
        """Wait for a connection to arrive here and return it."""
        async with asyncio.timeout(20):
            await self.was_reached.wait()
        assert self.connection is not None
        return self.connection


class ScriptedNode:
    """A node that waits at steps selected by `pause_at`.

    The steps are connect, tls, first login, login, states, export, undo, prepare, ping and statement.
    """

    def __init__(self, name: str, tls: ssl.SSLContext | None = None) -> None:
        self.name, self.endpoint = name, ""
        self.tls = tls
        self.statements: list[bytes] = []
        """The first 199 bytes of each statement of a client."""
        self.connections: list[NodeConnection] = []
        self.open_connections = 0
        self.waiting_count = 0
        """Number of connections that have arrived at a gate."""
        self.migration_completed = asyncio.Event()
        """Set when the last OK of a migration was sent."""
        self.canned_answers: dict[bytes, bytes] = {}
        """Answers that replace the usual answers to these statements."""
        self.quit_count = self.export_count = 0
        """Numbers of COM_QUIT and of state exports."""
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._gates: dict[str, StepGate] = {}
        self._all_gates: list[StepGate] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def pause_at(self, step: str, *, bytewise: bool = False, pauses_all: bool = False) -> StepGate:
        """Make the next connection wait at a step; with `pauses_all`, make every connection wait.

        With `bytewise`, the node sends its answer byte by byte.
        """
        gate = self._gates[step] = StepGate(bytewise=bytewise, pauses_all=pauses_all)
        self._all_gates.append(gate)
        return gate

    def release_all(self) -> None:
        """Open and remove all gates."""
        self._gates.clear()
        for gate in self._all_gates:
            gate.proceed()

    @asynccontextmanager
    async def listening(self, backlog: int = 256) -> AsyncIterator[ScriptedNode]:
        """Listen on a free port; all connections are reset at the end."""
        with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listener:
            listener.setblocking(False)
            self.endpoint = addresses.join("127.0.0.1", listener.getsockname()[1])
            self._listener = listener
            self._accepting = asyncio.create_task(self._accept(listener))
            try:
                yield self
            finally:
                all_tasks = [self._accepting, *self._tasks]
                for task in all_tasks:
                    task.cancel()
                await asyncio.gather(*all_tasks, return_exceptions=True)
                for connection in self.connections:
                    connection.close()

    async def stop_listening(self) -> None:
        """Refuse new connections, like a node whose process has exited; open connections stay."""
        assert self._accepting is not None
        assert self._listener is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(listener)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = NodeConnection(accepted)
            self.connections.append(connection)
            self.open_connections += 1
            task = loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: NodeConnection) -> None:
        try:
            if await self._greet(connection) and await self._accept_login(connection):
                while await self._serve_command(connection):
                    pass
            await connection.wait_until_closed()
        except (OSError, EOFError):
            pass  # Most connections end this way.
        finally:
            connection.close()
            self.open_connections -= 1

    async def _pass_gate(self, step: str, connection: NodeConnection, answer: bytes) -> bool:
        """Wait at the step's gate, if any, and send the answer. Return False if the node must stop."""
        gate = self._gates.get(step)
        if gate is not None:
            if not gate.pauses_all:
                del self._gates[step]
            gate.connection = connection
            gate.was_reached.set()
            self.waiting_count += 1
            action = await asyncio.shield(gate.action)
            if action is GateAction.SEND_NOTHING:
                return False
            if action is GateAction.TEST_ANSWERED:
                return True
            if gate.bytewise:
                await connection.send_bytewise(answer)
                return True
        connection.send(answer)
        return True

    async def _greet(self, connection: NodeConnection) -> bool:
        offered = OFFERED_CAPABILITIES | (Capability.SSL if self.tls else Capability(0))
        greeting = frame(0, build_greeting("8.0.11-TiDB-v8.5.3", 7, new_salt(), offered=offered))
        if self.tls is None:
            await connection.open(None)
            return await self._pass_gate("connect", connection, greeting)
        if not await self._pass_gate("connect", connection, greeting):
            return False
        await connection.read_ssl_request()
        if not await self._pass_gate("tls", connection, b""):
            return False
        await connection.open(self.tls)
        return True

    async def _accept_login(self, connection: NodeConnection) -> bool:
        header = await connection.reader.readexactly(4)
        login = await connection.reader.readexactly(int.from_bytes(header[:3], "little"))
        connection.logged_in_by_token = b"tidb_session_token" in login
        answer = frame(header[3] + 1, LOGIN_OK)
        return await self._pass_gate(
            "login" if connection.logged_in_by_token else "first login", connection, answer
        )

    async def _serve_command(self, connection: NodeConnection) -> bool:
        command = await connection.read_command()
        text = command[1:200]
        if command[0] == MySqlCommand.QUIT:
            self.quit_count += 1
            connection.close()
            return False
        if text == b"SHOW SESSION_STATES":
            self.export_count += 1
            connection.has_exported = True
            answer = self.states_result(connection, connection.row_count)
            connection.row_count = -1
            return await self._pass_gate("export", connection, answer)
        if text.startswith(b"SET SESSION_STATES"):
            self._restore(connection, command[1:].decode())
            if connection.logged_in_by_token:
                connection.logged_in_by_token, connection.awaits_completion = False, True
                connection.send(OK_PACKET)
                return True
            if connection.awaits_completion:
                connection.awaits_completion = False
                continues = await self._pass_gate("states", connection, OK_PACKET)
                self.migration_completed.set()
                return continues
            return await self._pass_gate("undo", connection, OK_PACKET)
        if text.startswith(b"SET @@session.sql_mode=''"):
            return await self._pass_gate("prepare", connection, OK_PACKET)
        if command[0] == MySqlCommand.PING:
            return await self._pass_gate("ping", connection, OK_PACKET)
        self.statements.append(text)
        return await self._pass_gate("statement", connection, self._result(connection, command))

    def _result(self, connection: NodeConnection, command: bytes) -> bytes:
        statement = command[1:]
        if statement in self.canned_answers:
            connection.row_count = -1
            return self.canned_answers[statement]
        if match := re.fullmatch(rb"set @a = (\d+)", statement):
            connection.user_variable, connection.row_count = match[1].decode(), 0
            return OK_PACKET
        if match := re.fullmatch(rb"insert (\d)", statement):
            connection.row_count = int(match[1])
            return frame(1, b"\0%c\0\x02\0\0\0" % connection.row_count)
        if statement == CHECK_STATEMENT.encode():
            row = [("a", connection.user_variable), ("rows", str(connection.row_count)), ("node", self.name)]
        else:
            row = [("size", str(len(statement))), ("node", self.name)]
        connection.row_count = -1
        return frames(1, single_row_result(row, AUTOCOMMIT, deprecate_eof=False))

    @staticmethod
    def states_result(
        connection: NodeConnection, rows: int, token: bytes | None = b'{"username":"root"}'
    ) -> bytes:
        """Build a response to SHOW SESSION_STATES."""
        states = {
            "user-var-values": {"a": connection.user_variable},
            "affected-rows": rows,
            "found-rows": 3,
            "sys-vars": {"sql_mode": ""},
        }
        return session_states_result(json.dumps(states).encode(), token)

    @staticmethod
    def _restore(connection: NodeConnection, statement: str) -> None:
        text = statement.removeprefix("SET SESSION_STATES '").removesuffix("'")
        states: dict[str, Any] = json.loads(text.replace("''", "'").replace("\\\\", "\\"))
        if "user-var-values" in states:
            connection.user_variable = states["user-var-values"]["a"]
        connection.row_count = states.get("affected-rows", 0)


def session_states_result(*row: bytes | None) -> bytes:
    """Build a response to SHOW SESSION_STATES with this row."""
    columns = [("Session_states", COLUMN_TYPE_JSON), ("Session_token", COLUMN_TYPE_JSON)]
    return frames(1, result_set(columns, [row], AUTOCOMMIT, deprecate_eof=False))
