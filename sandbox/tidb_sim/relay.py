"""Requests one by one to MariaDB, answers back as they come: a session after its login.

The requests' sequence numbers are checked and the answers are followed (`responses.py`) by chunks, as the
transports hand them over. Statements are collected, as TiDB does it, for they may pin the session; parameters
and files are passed on as they come. One request is under way at a time; what a client sends ahead waits
here, as it would wait in TiDB's socket.
"""

from __future__ import annotations

import asyncio

from sandbox.tidb_sim.mariadb_backend import Backing
from sandbox.tidb_sim.node import Node
from sandbox.tidb_sim.packets import (
    FULL,
    HEADER_SIZE,
    IN_TRANSACTION,
    OF_THE_SESSION,
    BadSequence,
    Command,
    MalformedPacket,
    err,
    frames,
    joined,
    ok,
)
from sandbox.tidb_sim.relay_endpoints import End, Phase
from sandbox.tidb_sim.request_handler import LOOK, Deed, Requests, Talk
from sandbox.tidb_sim.response_tracker import SILENT, Progress, ResponseTracker
from sandbox.tidb_sim.session_migration import Reply
from sandbox.tidb_sim.stream import ConnectionClosed, PacketStream, PacketTooLarge

_LONG = frozenset({Command.QUERY, Command.STMT_PREPARE, Command.STMT_EXECUTE, Command.STMT_SEND_LONG_DATA})
"""Requests that may be long: those with parameters are passed on before they are complete."""
_WHOLE = 4096
"""Requests up to so many bytes are always looked at as a whole."""
_LARGEST = 65 << 20
"""Bytes of the longest request that is looked at as a whole: TiDB's `max_allowed_packet`, and its headers."""
_AHEAD = 256 * 1024
"""Bytes that a client may send ahead before it is read no more."""


class Relay:
    """A session between its login and its end, or its next login (COM_CHANGE_USER)."""

    def __init__(self, node: Node, requests: Requests, client: PacketStream, backing: Backing) -> None:
        self._node, self._requests = node, requests
        self._streams = (client, backing.stream)
        self._compression = client.compression
        self._client, self._backing = client.transport, backing.stream.transport
        self._tracker = ResponseTracker(deprecate_eof=requests.deprecate_eof)
        self._phase = Phase.IDLE
        self._inbox = bytearray()
        self._backing_full = False
        self._collecting = False
        """Whether a long request waits for its end."""
        self._held = b""
        """The answer to a PREPARE, as far as it has come."""
        self._talking: asyncio.Task[None] | None = None
        """Asks MariaDB by its stream; the protocol stays ours, for flow control and to hear of an end."""
        # While a long request or a file is on its way:
        self._command = self._left = self._next_sequence = 0
        self._full_packet = self._answered = False
        self._refusal: bytes | None = None
        """ERR for what is on its way, which MariaDB then does not get."""
        self._over: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    @property
    def busy(self) -> bool:
        """Whether a graceful shutdown waits for it: it executes something or is in a transaction."""
        return self._phase is not Phase.OVER and (self._phase is not Phase.IDLE or self._in_transaction)

    @property
    def _in_transaction(self) -> bool:
        return bool(self._tracker.status & IN_TRANSACTION)

    async def run(self) -> bytes | None:
        """Serve until the end, and return None; or until COM_CHANGE_USER, and return its payload.

        The streams are closed when None is returned, and can be read from again otherwise.
        """
        client = self._streams[0]
        self._client.set_protocol(End(client, self._from_client, self.close, self._set_client_full))
        self._backing.set_protocol(
            End(self._streams[1], self._from_backing, self.close, self._set_backing_full)
        )
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
        if self._phase is Phase.IDLE and not self._backing.is_closing():
            # Never behind half a request: these bytes would complete it, and it would be executed.
            self._backing.write(frames(0, [bytes((Command.QUIT,))]))
        self._finish(None)
        self._client.close()
        self._backing.close()

    def kill(self) -> None:
        """End it now, as TiDB ends what is left: with a FIN, behind close_notify inside TLS.

        What the client has not taken is lost.
        """
        if not self._client.get_write_buffer_size():
            self._client.close()
        self.abort()

    def abort(self) -> None:
        """End it now, whatever is still to be sent."""
        self._finish(None)
        for stream in self._streams:
            stream.abort()

    def _finish(self, result: bytes | None) -> None:
        self._phase = Phase.OVER
        if self._talking is not None:
            self._talking.cancel()
        if not self._over.done():
            self._over.set_result(result)

    # Flow control: read from one side only while the other one takes it.

    def _set_client_full(self, full: bool) -> None:
        (self._backing.pause_reading if full else self._backing.resume_reading)()

    def _set_backing_full(self, full: bool) -> None:
        self._backing_full = full
        self._read_on()

    def _read_on(self) -> None:
        ahead = 0 if self._collecting else len(self._inbox) + len(self._compression or ())
        if self._backing_full or ahead > _AHEAD:
            self._client.pause_reading()
        else:
            self._client.resume_reading()

    # From the client.

    def _from_client(self, data: bytes) -> None:
        if (
            self._phase is Phase.IDLE
            and self._compression is None
            and not self._inbox
            and HEADER_SIZE < len(data) <= _WHOLE
            and data[3] == 0
            and len(data) == HEADER_SIZE + int.from_bytes(data[:3], "little")
        ):
            self._request(data[HEADER_SIZE:], data)
            return
        if self._phase is Phase.OVER:
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
        while moved and self._phase not in (Phase.WAITING, Phase.OVER):
            moved = bool(self._inbox) and (
                self._take_request() if self._phase is Phase.IDLE else self._pass_on()
            )
            moved = moved or self._open_next()

    def _open_next(self) -> bool:
        """Put the next compressed packet's content into the inbox, if there is one that may be opened."""
        if self._compression is None or self._phase in (Phase.WAITING, Phase.OVER):
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
            self._request(request[HEADER_SIZE:], request)
            return True
        if size <= _WHOLE:
            return False
        if command not in _LONG:
            self._too_large()
            return False
        needed = self._requests.needed(bytes(self._inbox[HEADER_SIZE : HEADER_SIZE + LOOK]))
        if needed is None or self._ending:
            return self._collect()
        if len(self._inbox) < HEADER_SIZE + needed:
            return False
        self._begin(command, Phase.SENDING)
        head = slice(HEADER_SIZE, HEADER_SIZE + needed)
        self._inbox[head], self._refusal = self._requests.begin(bytes(self._inbox[head]))
        self._left, self._full_packet, self._next_sequence = size, size == HEADER_SIZE + FULL, 1
        return True

    def _collect(self) -> bool:
        """Take a long request once all of it is there."""
        try:
            found = joined(self._inbox, numbered=self._compression is None)
        except BadSequence as error:
            self._violation(str(error), error.got)
            return False
        self._collecting = found is None
        if found is None:
            if len(self._inbox) > _LARGEST:
                self._too_large()
            return False
        payload, size = found
        del self._inbox[:size]
        self._request(payload)
        return True

    def _too_large(self) -> None:
        self._reply([err(1153, "Got a packet bigger than 'max_allowed_packet' bytes", "08S01")])
        self.close()

    def _pass_on(self) -> bool:
        """Pass on what is there of a packet; at its end find out whether another one follows."""
        if self._left == 0:
            return self._next_packet()
        part = bytes(self._inbox[: self._left])
        del self._inbox[: len(part)]
        self._left -= len(part)
        if self._refusal is None:
            self._backing.write(part)
        if self._left == 0 and self._phase is Phase.SENDING and not self._full_packet:
            self._sent()
        return True

    def _next_packet(self) -> bool:
        if len(self._inbox) < HEADER_SIZE or not self._numbered(self._next_sequence):
            return False
        length = int.from_bytes(self._inbox[:3], "little")
        self._next_sequence = (self._next_sequence + 1) & 0xFF
        if self._phase is Phase.LOADING and length == 0 and not self._full_packet:
            self._backing.write(bytes(self._inbox[:HEADER_SIZE]))
            del self._inbox[:HEADER_SIZE]
            self._sent()
            return True
        self._full_packet = length == FULL
        self._left = HEADER_SIZE + length
        return True

    def _begin(self, command: int, phase: Phase) -> None:
        self._command, self._phase, self._answered, self._refusal = command, phase, False, None
        self._tracker.begin(command)

    def _sent(self) -> None:
        if self._command in SILENT or self._answered or self._refusal is not None:
            self._phase = Phase.IDLE
            if self._refusal is not None:
                self._reply([self._refusal])
            self._ready()
            self._must_end()
        else:
            self._phase = Phase.WAITING

    def _request(self, payload: bytes, packet: bytes | None = None) -> None:
        """A whole request, in `packet` if that is its only one: pass it on, or answer it here."""
        if self._must_end():
            return
        status = self._tracker.status & OF_THE_SESSION
        match self._requests.judge(payload, status):
            case bytes(wanted):
                same = packet if wanted is payload else None
                self._backing.write(same or frames(0, [wanted]))
                if payload[0] in SILENT:
                    self._ready()
                else:
                    self._begin(payload[0], Phase.WAITING)
            case Talk() as talk:
                self._begin(Command.QUERY, Phase.WAITING)
                self._talking = asyncio.get_running_loop().create_task(self._talk(talk, status))
            case Deed.QUIT:
                self.close()
            case Deed.CHANGE_USER:
                self._leave(payload)
            case Deed.SHUT_DOWN:
                self._reply([ok(status)])
                self._node.shut_down()
            case answer:
                self._reply(answer)

    async def _talk(self, talk: Talk, status: int) -> None:
        """Ask MariaDB ourselves, its packets going to its stream meanwhile, and answer the client."""
        try:
            reply: Reply | None = await talk.ask(status)
        except (ConnectionClosed, BadSequence, MalformedPacket, PacketTooLarge):
            reply = None
        except Exception as error:
            if not self._over.done():
                self._over.set_exception(error)  # a mistake of ours, which must not look like a slow answer
            return
        self._talking = None
        if reply is None or self._backing.is_closing():
            self.close()
            return
        self._tracker.status, self._phase = reply.status, Phase.IDLE
        self._reply(reply.payloads)
        self._go_on()

    def _go_on(self) -> None:
        """A request has been answered: take the next one, if it is there already."""
        if not self._must_end() and (self._inbox or self._compression):
            self._step()
            self._read_on()

    @property
    def _ending(self) -> bool:
        """Once TiDB closes, a session outside a transaction ends before its next read, or after it: then
        the request is dropped (pingcap/tidb pkg/server/conn.go)."""
        return self._node.closing and not self._in_transaction

    def _must_end(self) -> bool:
        """Whether the session has been ended for that."""
        if self._ending:
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
        self._node.violation(self._requests.who.peer, what)
        self._to_client(frames(sequence + 1, [err(8052, what, "HY000")]))
        self.close()

    # From MariaDB.

    def _from_backing(self, data: bytes) -> None:
        if self._phase in (Phase.IDLE, Phase.OVER):
            return  # MariaDB says why it closes an idle connection; TiDB just closes it
        if self._talking is not None:
            self._streams[1].data_received(data)
            return
        if self._answered:
            self._to_client(data)
            return
        progress = self._tracker.feed(data)
        if self._command == Command.STMT_PREPARE:
            self._held += data
            if progress is Progress.MORE:
                return
            data, self._held = self._held, b""
        if progress is Progress.DONE:
            number = self._requests.answered(self._tracker)
            if number is not None:
                data = data[: HEADER_SIZE + 1] + number.to_bytes(4, "little") + data[HEADER_SIZE + 5 :]
        self._to_client(data, more=progress is Progress.MORE)
        if progress is Progress.DONE:
            self._answered = True
            if self._phase is Phase.WAITING:
                self._phase = Phase.IDLE
                self._ready()
                self._go_on()
        elif progress is Progress.WANTS_FILE and self._phase is Phase.WAITING:
            # The rest of the answer begins like one to a query.
            self._begin(Command.QUERY, Phase.LOADING)
            self._left, self._full_packet = 0, False
            self._next_sequence = (self._tracker.sequence + 1) & 0xFF
            self._step()
            self._read_on()
