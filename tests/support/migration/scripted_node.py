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
from sandbox.tidb_sim.greeting import OFFERED, greeting, new_salt
from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    FULL,
    Capability,
    Command,
    err,
    frame,
    frames,
    ok,
    one_row,
    result_set,
)
from tests.support.waiting import taken, until

JSON = 0xF5
OK = frame(1, ok(AUTOCOMMIT))
LET_IN = ok(AUTOCOMMIT)
STOPPING = err(1053, "Server shutdown in progress", "08S01")
CHECK = "select @a, row_count(), @@hostname"
CLIENT_HEAD = 36
"""Bytes of an SSLRequest."""


class Next(Enum):
    """What a node does when it may go on: it answers, that was done for it, or it is silent from then on."""

    ANSWER = 0
    SAID = 1
    NOTHING = 2


async def reset(connection: socket.socket, close: Callable[[], None]) -> None:
    """Has it end by RST, when `close` does; returns when that is done."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    close()
    await until(lambda: connection.fileno() == -1)


class Link:
    """One connection, as the node has it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter | None = None
        self.a, self.rows = "", 0
        self.arrived = False
        """It was let in by a token."""

    async def open(self, tls: ssl.SSLContext | None) -> None:
        """From here on bytes are buffered. TLS begins, if at all; OSError when that fails."""
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(limit=1 << 20)
        protocol = asyncio.StreamReaderProtocol(self.reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, self._connection, ssl=tls)
        self.writer = asyncio.StreamWriter(transport, protocol, self.reader, loop)

    async def head(self) -> bytes:
        """An SSLRequest, and nothing of what stands behind it."""
        loop, whole = asyncio.get_running_loop(), b""
        while len(whole) < CLIENT_HEAD:
            piece = await loop.sock_recv(self._connection, CLIENT_HEAD - len(whole))
            if not piece:
                raise EOFError
            whole += piece
        return whole

    async def command(self) -> bytes:
        """The payload of the next request, which may take several packets."""
        whole = b""
        while True:
            size = int.from_bytes((await self.reader.readexactly(4))[:3], "little")
            whole += await self.reader.readexactly(size)
            if size < FULL:
                return whole

    def send(self, data: bytes) -> None:
        """At once."""
        if self.writer is not None:
            self.writer.write(data)
        else:
            self._connection.send(data)

    async def drip(self, data: bytes) -> None:
        """Byte by byte, each of which is read alone."""
        assert self.writer is not None
        for byte in data:
            self.writer.write(bytes((byte,)))
            await taken(self.writer)

    async def taken(self) -> None:
        """Returns when all was read."""
        assert self.writer is not None
        await taken(self.writer)

    async def fin(self) -> None:
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
        await reset(self._connection, self.close)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
        else:
            self._connection.close()

    async def ended(self) -> None:
        """Returns when the other side has ended it, too, or broken it off."""
        with suppress(OSError):
            if self.writer is not None:
                while await self.reader.read(1 << 16):
                    pass
            elif self._connection.fileno() != -1:
                while await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16):
                    pass


@dataclass
class Gate:
    """Where a node waits. `link`: its connection, once it is there. `open` says how it goes on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    next: asyncio.Future[Next] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    link: Link | None = None
    bytewise: bool = False
    lasting: bool = False

    def open(self, how: Next = Next.ANSWER) -> None:
        if not self.next.done():
            self.next.set_result(how)

    async def here(self) -> Link:
        """The connection that has come here."""
        async with asyncio.timeout(20):
            await self.reached.wait()
        assert self.link is not None
        return self.link


class Actor:
    """A node. It stops where it is told to (`hold`): connect, tls, login, states, export, undo, statement."""

    def __init__(self, name: str, tls: ssl.SSLContext | None = None) -> None:
        self.name, self.endpoint = name, ""
        self.tls = tls
        self.said: list[bytes] = []
        """Beginnings of the statements of clients."""
        self.links: list[Link] = []
        self.open_links = 0
        self.waiting = 0
        """Connections that have come to where they wait."""
        self.arrived = asyncio.Event()
        """The last OK to a session that moves was said."""
        self.answers: dict[bytes, bytes] = {}
        """To statements, in place of the usual."""
        self.quits = self.exports = 0
        """How often it was told COM_QUIT, and asked for states."""
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._gates: dict[str, Gate] = {}
        self._every_gate: list[Gate] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def hold(self, step: str, *, bytewise: bool = False, lasting: bool = False) -> Gate:
        """The next connection that comes there waits; if `lasting`, all that do.

        `bytewise`: its answer comes byte by byte.
        """
        gate = self._gates[step] = Gate(bytewise=bytewise, lasting=lasting)
        self._every_gate.append(gate)
        return gate

    def release(self) -> None:
        """Whoever waits goes on, and nobody waits any more."""
        self._gates.clear()
        for gate in self._every_gate:
            gate.open()

    @asynccontextmanager
    async def listening(self, backlog: int = 256) -> AsyncIterator[Actor]:
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
                for link in self.links:
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
            link = Link(connection)
            self.links.append(link)
            self.open_links += 1
            task = loop.create_task(self._serve(link))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, link: Link) -> None:
        try:
            if await self._greet(link) and await self._let_in(link):
                while await self._answer(link):
                    pass
            await link.ended()
        except (OSError, EOFError):
            pass  # that is how most of them end
        finally:
            link.close()
            self.open_links -= 1

    async def _stop(self, step: str, link: Link, answer: bytes) -> bool:
        """Waits there, if it is to, and answers. False: nothing more is to be said."""
        gate = self._gates.get(step)
        if gate is not None:
            if not gate.lasting:
                del self._gates[step]
            gate.link = link
            gate.reached.set()
            self.waiting += 1
            how = await asyncio.shield(gate.next)
            if how is Next.NOTHING:
                return False
            if how is Next.SAID:
                return True
            if gate.bytewise:
                await link.drip(answer)
                return True
        link.send(answer)
        return True

    async def _greet(self, link: Link) -> bool:
        offered = OFFERED | (Capability.SSL if self.tls else Capability(0))
        hello = frame(0, greeting("8.0.11-TiDB-v8.5.3", 7, new_salt(), offered=offered))
        if self.tls is None:
            await link.open(None)
            return await self._stop("connect", link, hello)
        if not await self._stop("connect", link, hello):
            return False
        await link.head()
        if not await self._stop("tls", link, b""):
            return False
        await link.open(self.tls)
        return True

    async def _let_in(self, link: Link) -> bool:
        header = await link.reader.readexactly(4)
        login = await link.reader.readexactly(int.from_bytes(header[:3], "little"))
        link.arrived = b"tidb_session_token" in login
        answer = frame(header[3] + 1, LET_IN)
        return await self._stop("login" if link.arrived else "first login", link, answer)

    async def _answer(self, link: Link) -> bool:
        command = await link.command()
        text = command[1:200]
        if command[0] == Command.QUIT:
            self.quits += 1
            link.close()
            return False
        if text == b"SHOW SESSION_STATES":
            self.exports += 1
            answer = self.states(link, link.rows)
            link.rows = -1
            return await self._stop("export", link, answer)
        if text.startswith(b"SET SESSION_STATES"):
            self._restore(link, command[1:].decode())
            if not link.arrived:
                return await self._stop("undo", link, OK)
            link.arrived = False
            goes_on = await self._stop("states", link, OK)
            self.arrived.set()
            return goes_on
        if text.startswith(b"SET @@session.sql_mode=''"):
            return await self._stop("prepare", link, OK)
        if command[0] == Command.PING:
            return await self._stop("ping", link, OK)
        self.said.append(text)
        return await self._stop("statement", link, self._result(link, command))

    def _result(self, link: Link, command: bytes) -> bytes:
        statement = command[1:]
        if statement in self.answers:
            link.rows = -1
            return self.answers[statement]
        if found := re.fullmatch(rb"set @a = (\d+)", statement):
            link.a, link.rows = found[1].decode(), 0
            return OK
        if found := re.fullmatch(rb"insert (\d)", statement):
            link.rows = int(found[1])
            return frame(1, b"\0%c\0\x02\0\0\0" % link.rows)
        if statement == CHECK.encode():
            row = [("a", link.a), ("rows", str(link.rows)), ("node", self.name)]
        else:
            row = [("size", str(len(statement))), ("node", self.name)]
        link.rows = -1
        return frames(1, one_row(row, AUTOCOMMIT, deprecate_eof=False))

    @staticmethod
    def states(link: Link, rows: int, token: bytes | None = b'{"username":"root"}') -> bytes:
        """An answer to SHOW SESSION_STATES."""
        kept = {
            "user-var-values": {"a": link.a},
            "affected-rows": rows,
            "found-rows": 3,
            "sys-vars": {"sql_mode": ""},
        }
        return exported(json.dumps(kept).encode(), token)

    @staticmethod
    def _restore(link: Link, statement: str) -> None:
        text = statement.removeprefix("SET SESSION_STATES '").removesuffix("'")
        kept: dict[str, Any] = json.loads(text.replace("''", "'").replace("\\\\", "\\"))
        if "user-var-values" in kept:
            link.a = kept["user-var-values"]["a"]
        link.rows = kept.get("affected-rows", 0)


def exported(*row: bytes | None) -> bytes:
    """An answer to SHOW SESSION_STATES with this row."""
    columns = [("Session_states", JSON), ("Session_token", JSON)]
    return frames(1, result_set(columns, [row], AUTOCOMMIT, deprecate_eof=False))
