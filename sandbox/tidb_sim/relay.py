"""Requests one by one to MariaDB, answers back as they come: a session after its login.

The requests' sequence numbers are checked, the answers are followed (`responses.py`), and neither is copied
or awaited: both transports hand over chunks. One request is under way at a time; what a client sends ahead
waits here, as it would wait in TiDB's socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from sandbox.tidb_sim.answers import Client
from sandbox.tidb_sim.greeting import Login
from sandbox.tidb_sim.node import Node
from sandbox.tidb_sim.packets import (
    FULL,
    HEADER_SIZE,
    IN_TRANSACTION,
    BadSequence,
    Capability,
    Command,
    MalformedPacket,
    err,
    frames,
    ok,
)
from sandbox.tidb_sim.requests import Deed, Requests
from sandbox.tidb_sim.responses import SILENT, Progress, ResponseTracker
from sandbox.tidb_sim.statements import LONG_DATA_HEAD, Statements
from sandbox.tidb_sim.stream import PacketStream

_STREAMED = frozenset(
    {Command.QUERY, Command.STMT_PREPARE, Command.STMT_EXECUTE, Command.STMT_SEND_LONG_DATA}
)
"""Requests that are passed on before they are complete, when they are long."""
_WHOLE = 4096
"""Requests up to so many bytes are looked at as a whole."""
_AHEAD = 64 * 1024
"""Bytes that a client may send ahead before it is read no more."""


class _Phase(Enum):
    IDLE = auto()
    SENDING = auto()
    """A long request is on its way to MariaDB."""
    WAITING = auto()
    """The answer is on its way."""
    LOADING = auto()
    """LOAD DATA LOCAL: the client sends the file."""
    OVER = auto()


class _End(asyncio.Protocol):
    """One of the two connections: hands everything to the relay, and its loss to its stream as well."""

    def __init__(
        self,
        stream: PacketStream,
        receive: Callable[[bytes], None],
        lost: Callable[[], None],
        full: Callable[[bool], None],
    ) -> None:
        self._stream, self._receive, self._lost, self._full = stream, receive, lost, full

    def data_received(self, data: bytes) -> None:
        self._receive(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._stream.connection_lost(error)
        self._lost()

    def pause_writing(self) -> None:
        self._full(True)

    def resume_writing(self) -> None:
        self._full(False)


class Relay:
    """A session between its login and its end, or its next login (COM_CHANGE_USER)."""

    def __init__(
        self, node: Node, login: Login, who: Client, client: PacketStream, backing: PacketStream
    ) -> None:
        self._node, self._who = node, who
        self._streams = (client, backing)
        self._compression = client.compression
        self._client, self._backing = client.transport, backing.transport
        deprecate_eof = bool(login.capabilities & Capability.DEPRECATE_EOF)
        self._tracker = ResponseTracker(deprecate_eof=deprecate_eof)
        self._statements = Statements()
        self._requests = Requests(node, who, self._statements, deprecate_eof)
        self._phase = _Phase.IDLE
        self._inbox = bytearray()
        self._backing_full = False
        # While a long request or a file is on its way:
        self._command = 0
        self._left = 0
        self._full_packet = False
        self._next_sequence = 0
        self._answered = False
        self._refusal: bytes | None = None
        """ERR for what is on its way, which MariaDB then does not get."""
        self._over: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    @property
    def busy(self) -> bool:
        """Whether a graceful shutdown waits for it: it executes something or is in a transaction."""
        return self._phase is not _Phase.OVER and (self._phase is not _Phase.IDLE or self._in_transaction)

    @property
    def _in_transaction(self) -> bool:
        return bool(self._tracker.status & IN_TRANSACTION)

    async def run(self) -> bytes | None:
        """Serve until the end, and return None; or until COM_CHANGE_USER, and return its payload.

        The streams are closed when None is returned, and can be read from again otherwise.
        """
        client, backing = self._streams
        self._client.set_protocol(_End(client, self._from_client, self.close, self._set_client_full))
        self._backing.set_protocol(_End(backing, self._from_backing, self.close, self._set_backing_full))
        if self._client.is_closing() or self._backing.is_closing() or self._node.closing:
            self.close()
        early = client.take_rest()
        self._ready()
        self._inbox += early
        self._step()
        self._read_on()
        return await self._over

    def close(self) -> None:
        """End it now, with a FIN behind what was sent to the client already."""
        if self._phase is _Phase.IDLE and not self._backing.is_closing():
            # Never behind half a request: these bytes would complete it, and it would be executed.
            self._backing.write(frames(0, [bytes((Command.QUIT,))]))
        self._finish(None)
        self._client.close()
        self._backing.close()

    def abort(self) -> None:
        """End it now, whatever is still to be sent."""
        self._finish(None)
        for stream in self._streams:
            stream.abort()

    def _finish(self, result: bytes | None) -> None:
        self._phase = _Phase.OVER
        if not self._over.done():
            self._over.set_result(result)

    # Flow control: read from one side only while the other one takes it.

    def _set_client_full(self, full: bool) -> None:
        if full:
            self._backing.pause_reading()
        else:
            self._backing.resume_reading()

    def _set_backing_full(self, full: bool) -> None:
        self._backing_full = full
        self._read_on()

    def _read_on(self) -> None:
        if self._backing_full or len(self._inbox) + len(self._compression or ()) > _AHEAD:
            self._client.pause_reading()
        else:
            self._client.resume_reading()

    # From the client.

    def _from_client(self, data: bytes) -> None:
        if (
            self._phase is _Phase.IDLE
            and self._compression is None
            and not self._inbox
            and HEADER_SIZE < len(data) <= _WHOLE
            and data[3] == 0
            and len(data) == HEADER_SIZE + int.from_bytes(data[:3], "little")
        ):
            self._request(data)
            return
        if self._phase is _Phase.OVER:
            return
        if self._compression is None:
            self._inbox += data
        else:
            self._compression.feed(data)
        self._step()
        self._read_on()

    def _step(self) -> None:
        """Take from the inbox as long as there is something that may be taken now."""
        moved = True
        while moved and self._phase not in (_Phase.WAITING, _Phase.OVER):
            moved = bool(self._inbox) and (
                self._take_request() if self._phase is _Phase.IDLE else self._pass_on()
            )
            moved = moved or self._open_next()

    def _open_next(self) -> bool:
        """Put the next compressed packet's content into the inbox, if there is one that may be opened."""
        if self._compression is None or self._phase in (_Phase.WAITING, _Phase.OVER):
            return False
        try:
            content = self._compression.pull()
        except (BadSequence, MalformedPacket) as error:
            self._violation(str(error), 0)
            return False
        self._inbox += content or b""
        return content is not None

    def _numbered(self, expected: int) -> bool:
        """Whether the packet that begins in the inbox has this number; a violation if not.

        Within compressed packets TiDB takes any, and MariaDB shall get the right one
        (pingcap/tidb pkg/server/internal/packetio.go).
        """
        sequence = self._inbox[3]
        if self._compression is not None:
            self._inbox[3] = expected
        elif sequence != expected:
            self._violation(f"invalid sequence {sequence} != {expected}", sequence)
            return False
        return True

    def _take_request(self) -> bool:
        if len(self._inbox) >= HEADER_SIZE and not any(self._inbox[:3]):
            self._violation("an empty request", self._inbox[3])
            return False
        if len(self._inbox) <= HEADER_SIZE:
            return False
        size = HEADER_SIZE + int.from_bytes(self._inbox[:3], "little")
        command = self._inbox[4]
        if not self._numbered(0):
            return False
        if len(self._inbox) >= size and size < FULL:
            request = bytes(self._inbox[:size])
            del self._inbox[:size]
            self._request(request)
            return True
        if size <= _WHOLE:
            return False
        if command not in _STREAMED:
            self._reply([err(1153, "Got a packet bigger than 'max_allowed_packet' bytes", "08S01")])
            self.close()
            return False
        if command == Command.STMT_SEND_LONG_DATA and len(self._inbox) < HEADER_SIZE + LONG_DATA_HEAD:
            return False
        if self._must_end():
            return False
        self._begin(command, _Phase.SENDING)
        if command == Command.STMT_SEND_LONG_DATA:
            head = bytes(self._inbox[HEADER_SIZE : HEADER_SIZE + LONG_DATA_HEAD])
            self._refusal = self._statements.judge(head)[1]
        self._left, self._full_packet, self._next_sequence = size, size == HEADER_SIZE + FULL, 1
        return True

    def _pass_on(self) -> bool:
        """Pass on what is there of a packet; at its end find out whether another one follows."""
        if self._left == 0:
            return self._next_packet()
        part = bytes(self._inbox[: self._left])
        del self._inbox[: len(part)]
        self._left -= len(part)
        if self._refusal is None:
            self._backing.write(part)
        if self._left == 0 and self._phase is _Phase.SENDING and not self._full_packet:
            self._sent()
        return True

    def _next_packet(self) -> bool:
        if len(self._inbox) < HEADER_SIZE:
            return False
        if not self._numbered(self._next_sequence):
            return False
        length = int.from_bytes(self._inbox[:3], "little")
        self._next_sequence = (self._next_sequence + 1) & 0xFF
        if self._phase is _Phase.LOADING and length == 0 and not self._full_packet:
            self._backing.write(bytes(self._inbox[:HEADER_SIZE]))
            del self._inbox[:HEADER_SIZE]
            self._sent()
            return True
        self._full_packet = length == FULL
        self._left = HEADER_SIZE + length
        return True

    def _begin(self, command: int, phase: _Phase) -> None:
        self._command, self._phase, self._answered, self._refusal = command, phase, False, None
        self._tracker.begin(command)

    def _sent(self) -> None:
        if self._command in SILENT or self._answered:
            self._phase = _Phase.IDLE
            if self._refusal is not None:
                self._reply([self._refusal])
            self._ready()
            self._must_end()
        else:
            self._phase = _Phase.WAITING

    def _request(self, request: bytes) -> None:
        """A whole request: pass it on, or answer it here."""
        if self._must_end():
            return
        match self._requests.judge(request, self._tracker.status):
            case bytes(wanted):
                self._backing.write(wanted)
                command = request[HEADER_SIZE]
                if command in SILENT:
                    self._ready()
                else:
                    self._begin(command, _Phase.WAITING)
            case Deed.QUIT:
                self.close()
            case Deed.CHANGE_USER:
                self._leave(request[HEADER_SIZE:])
            case Deed.SHUT_DOWN:
                self._reply([ok(self._tracker.status)])
                self._node.shut_down()
            case answer:
                self._reply(answer)

    def _must_end(self) -> bool:
        """Once TiDB closes, a session outside a transaction ends before its next read, or after it: then
        the request is dropped (pingcap/tidb pkg/server/conn.go)."""
        if self._node.closing and not self._in_transaction:
            self.close()
            return True
        return False

    def _leave(self, payload: bytes) -> None:
        if self._inbox or self._compression:
            self._violation("bytes behind COM_CHANGE_USER", 0)
            return
        for stream in self._streams:
            stream.transport.set_protocol(stream)
            stream.transport.resume_reading()
        self._finish(payload)

    def _reply(self, payloads: list[bytes]) -> None:
        self._to_client(frames(1, payloads))
        self._ready()

    def _ready(self) -> None:
        """The numbers of compressed packets begin again with each request."""
        if self._compression is not None:
            self._compression.sequence = 0

    def _to_client(self, data: bytes, *, more: bool = False) -> None:
        if self._compression is not None:
            data = self._compression.pack(data, more=more)
        self._client.write(data)

    def _violation(self, what: str, sequence: int) -> None:
        self._node.violation(self._who.peer, what)
        self._to_client(frames(sequence + 1, [err(8052, what, "HY000")]))
        self.close()

    # From MariaDB.

    def _from_backing(self, data: bytes) -> None:
        if self._phase in (_Phase.IDLE, _Phase.OVER):
            return  # MariaDB says why it closes an idle connection; TiDB just closes it
        if self._answered:
            self._to_client(data)
            return
        progress = self._tracker.feed(data)
        self._to_client(data, more=progress is Progress.MORE)
        if progress is Progress.DONE:
            self._answered = True
            if self._tracker.prepared is not None:
                self._statements.add(self._tracker.prepared)
            if self._phase is _Phase.WAITING:
                self._phase = _Phase.IDLE
                self._ready()
                if not self._must_end() and (self._inbox or self._compression):
                    self._step()
                    self._read_on()
        elif progress is Progress.WANTS_FILE and self._phase is _Phase.WAITING:
            # The rest of the answer begins like one to a query.
            self._begin(Command.QUERY, _Phase.LOADING)
            self._left, self._full_packet = 0, False
            self._next_sequence = (self._tracker.sequence + 1) & 0xFF
            self._step()
            self._read_on()
