"""Relays a session after its login: requests one by one to MariaDB, responses back as they arrive.

The requests' sequence numbers are checked and the responses are parsed (`response_tracker.py`) in chunks, as
the transports deliver them. Statements are buffered until complete, as in TiDB, because they may pin the
session; parameters and files are forwarded as they arrive. One request is in progress at a time; what a
client sends ahead waits here, as it would wait in TiDB's socket.
"""

from __future__ import annotations

import asyncio

from sandbox.tidb_sim.mariadb_backend import BackendConnection
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.packets import (
    HEADER_SIZE,
    IN_TRANSACTION,
    MAX_PACKET_PAYLOAD,
    SESSION_STATUS_FLAGS,
    BadSequence,
    MalformedPacket,
    MySqlCommand,
    err,
    frames,
    ok,
    parse_payload,
)
from sandbox.tidb_sim.relay_endpoints import RelayEndpoint, RelayPhase
from sandbox.tidb_sim.request_handler import PEEK_BYTES, BackendExchange, RequestHandler, SpecialCommand
from sandbox.tidb_sim.response_tracker import COMMANDS_WITHOUT_RESPONSE, ResponseProgress, ResponseTracker
from sandbox.tidb_sim.session_migration import ClientResponse
from sandbox.tidb_sim.stream import ConnectionClosed, PacketStream, PacketTooLarge

_STREAMABLE_COMMANDS = frozenset(
    {
        MySqlCommand.QUERY,
        MySqlCommand.STMT_PREPARE,
        MySqlCommand.STMT_EXECUTE,
        MySqlCommand.STMT_SEND_LONG_DATA,
    }
)
"""Requests that may be long: those with parameters are forwarded before they are complete."""
_MAX_BUFFERED_REQUEST_BYTES = 4096
"""Requests up to this size are always buffered until complete."""
_MAX_REQUEST_BYTES = 65 << 20
"""Longest request that is buffered until complete: TiDB's `max_allowed_packet` and its headers."""
_MAX_READ_AHEAD_BYTES = 256 * 1024
"""Bytes that a client may send ahead before reading from it is paused."""


class Relay:
    """A session from its login to its end, or to its next login (COM_CHANGE_USER)."""

    def __init__(
        self, node: SimNode, requests: RequestHandler, client: PacketStream, backend: BackendConnection
    ) -> None:
        self._node, self._requests = node, requests
        self._streams = (client, backend.stream)
        self._compression = client.compression
        self._client, self._backend = client.transport, backend.stream.transport
        self._tracker = ResponseTracker(deprecate_eof=requests.deprecate_eof)
        self._phase = RelayPhase.IDLE
        self._inbox = bytearray()
        self._backend_write_paused = False
        self._collects_request = False
        """Whether a long request is still incomplete."""
        self._prepare_response = b""
        """The part of the response to a PREPARE received so far."""
        self._exchange_task: asyncio.Task[None] | None = None
        """Queries MariaDB through its stream; the protocol stays ours, to control flow and detect a close."""
        # While a long request or a file is being forwarded:
        self._command = self._packet_bytes_left = self._next_sequence = 0
        self._packet_is_full = self._response_finished = False
        self._error_response: bytes | None = None
        """ERR for the request being received, which MariaDB then does not get."""
        self._result: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    @property
    def is_busy(self) -> bool:
        """Whether a graceful shutdown waits for it: it executes a statement or is in a transaction."""
        return self._phase is not RelayPhase.CLOSED and (
            self._phase is not RelayPhase.IDLE or self._in_transaction
        )

    @property
    def _in_transaction(self) -> bool:
        return bool(self._tracker.status & IN_TRANSACTION)

    async def run(self) -> bytes | None:
        """Serve until the end and return None, or until COM_CHANGE_USER and return its payload.

        The streams are closed when None is returned, and can be read from again otherwise.
        """
        client = self._streams[0]
        self._client.set_protocol(
            RelayEndpoint(client, self._on_client_data, self.close, self._on_client_write_paused)
        )
        self._backend.set_protocol(
            RelayEndpoint(self._streams[1], self._on_backend_data, self.close, self._on_backend_write_paused)
        )
        if self._client.is_closing() or self._backend.is_closing() or self._node.is_closing:
            self.close()
        early = client.take_buffered()
        self._reset_compressed_sequence()
        self._inbox += early
        self._process_inbox()
        self._update_client_reading()
        return await self._result

    def close(self) -> None:
        """Close the session now, with a FIN after what was already sent to the client."""
        if self._phase is RelayPhase.IDLE and not self._backend.is_closing():
            # Never after half a request: these bytes would complete it, and it would be executed.
            self._backend.write(frames(0, [bytes((MySqlCommand.QUIT,))]))
        self._finish(None)
        self._client.close()
        self._backend.close()

    def kill(self) -> None:
        """Close the session now, as TiDB closes remaining ones: with a FIN, after close_notify inside TLS.

        Data that the client has not received yet is lost.
        """
        if not self._client.get_write_buffer_size():
            self._client.close()
        self.abort()

    def abort(self) -> None:
        """Reset the session now and drop unsent data."""
        self._finish(None)
        for stream in self._streams:
            stream.abort()

    def _finish(self, result: bytes | None) -> None:
        self._phase = RelayPhase.CLOSED
        if self._exchange_task is not None:
            self._exchange_task.cancel()
        if not self._result.done():
            self._result.set_result(result)

    # Flow control: read from one side only while the other side accepts data.

    def _on_client_write_paused(self, paused: bool) -> None:
        (self._backend.pause_reading if paused else self._backend.resume_reading)()

    def _on_backend_write_paused(self, paused: bool) -> None:
        self._backend_write_paused = paused
        self._update_client_reading()

    def _update_client_reading(self) -> None:
        ahead = 0 if self._collects_request else len(self._inbox) + len(self._compression or ())
        if self._backend_write_paused or ahead > _MAX_READ_AHEAD_BYTES:
            self._client.pause_reading()
        else:
            self._client.resume_reading()

    # Data from the client.

    def _on_client_data(self, data: bytes) -> None:
        if (
            self._phase is RelayPhase.IDLE
            and self._compression is None
            and not self._inbox
            and HEADER_SIZE < len(data) <= _MAX_BUFFERED_REQUEST_BYTES
            and data[3] == 0
            and len(data) == HEADER_SIZE + int.from_bytes(data[:3], "little")
        ):
            self._handle_request(data[HEADER_SIZE:], data)
            return
        if self._phase is RelayPhase.CLOSED:
            return
        if self._compression is None:
            self._inbox += data
        else:
            self._compression.feed(data)
        self._process_inbox()
        self._update_client_reading()

    def _process_inbox(self) -> None:
        """Process the inbox as long as something can be processed now."""
        has_progressed = True
        while has_progressed and self._phase not in (RelayPhase.AWAITING_RESPONSE, RelayPhase.CLOSED):
            has_progressed = bool(self._inbox) and (
                self._take_request() if self._phase is RelayPhase.IDLE else self._forward()
            )
            has_progressed = has_progressed or self._decompress_next()

    def _decompress_next(self) -> bool:
        """Append the next compressed packet's content to the inbox, if one may be decompressed now."""
        if self._compression is None or self._phase in (RelayPhase.AWAITING_RESPONSE, RelayPhase.CLOSED):
            return False
        try:
            content = self._compression.next_content()
        except (BadSequence, MalformedPacket) as error:
            self._reject_violation(str(error), 0)
            return False
        self._inbox += content or b""
        return content is not None

    def _check_sequence(self, expected: int) -> bool:
        """Return whether the packet at the start of the inbox has this number; report a violation if not.

        Within compressed packets TiDB accepts any number, and MariaDB must get the right one
        (pingcap/tidb pkg/server/internal/packetio.go).
        """
        sequence = self._inbox[3]
        if self._compression is not None:
            self._inbox[3] = expected
        elif sequence != expected:
            self._reject_violation(f"invalid sequence {sequence} != {expected}", sequence)
            return False
        return True

    def _take_request(self) -> bool:
        if len(self._inbox) >= HEADER_SIZE and not any(self._inbox[:3]):
            self._reject_violation("an empty request", self._inbox[3])
            return False
        if len(self._inbox) <= HEADER_SIZE:
            return False
        size = HEADER_SIZE + int.from_bytes(self._inbox[:3], "little")
        command = self._inbox[4]
        if not self._check_sequence(0):
            return False
        if len(self._inbox) >= size and size < MAX_PACKET_PAYLOAD:
            request = bytes(self._inbox[:size])
            del self._inbox[:size]
            self._handle_request(request[HEADER_SIZE:], request)
            return True
        if size <= _MAX_BUFFERED_REQUEST_BYTES:
            return False
        if command not in _STREAMABLE_COMMANDS:
            self._reject_too_large()
            return False
        needed = self._requests.required_bytes(bytes(self._inbox[HEADER_SIZE : HEADER_SIZE + PEEK_BYTES]))
        if needed is None or self._is_shutting_down:
            return self._collect_request()
        if len(self._inbox) < HEADER_SIZE + needed:
            return False
        self._begin_response(command, RelayPhase.FORWARDING_REQUEST)
        head = slice(HEADER_SIZE, HEADER_SIZE + needed)
        self._inbox[head], self._error_response = self._requests.begin_long_request(bytes(self._inbox[head]))
        self._packet_bytes_left, self._packet_is_full, self._next_sequence = (
            size,
            size == HEADER_SIZE + MAX_PACKET_PAYLOAD,
            1,
        )
        return True

    def _collect_request(self) -> bool:
        """Take a long request once it is complete."""
        try:
            parsed = parse_payload(self._inbox, check_sequence=self._compression is None)
        except BadSequence as error:
            self._reject_violation(str(error), error.received)
            return False
        self._collects_request = parsed is None
        if parsed is None:
            if len(self._inbox) > _MAX_REQUEST_BYTES:
                self._reject_too_large()
            return False
        payload, size = parsed
        del self._inbox[:size]
        self._handle_request(payload)
        return True

    def _reject_too_large(self) -> None:
        self._send_payloads([err(1153, "Got a packet bigger than 'max_allowed_packet' bytes", "08S01")])
        self.close()

    def _forward(self) -> bool:
        """Forward the received part of a packet; at its end check whether another one follows."""
        if self._packet_bytes_left == 0:
            return self._next_packet()
        part = bytes(self._inbox[: self._packet_bytes_left])
        del self._inbox[: len(part)]
        self._packet_bytes_left -= len(part)
        if self._error_response is None:
            self._backend.write(part)
        if (
            self._packet_bytes_left == 0
            and self._phase is RelayPhase.FORWARDING_REQUEST
            and not self._packet_is_full
        ):
            self._on_request_sent()
        return True

    def _next_packet(self) -> bool:
        if len(self._inbox) < HEADER_SIZE or not self._check_sequence(self._next_sequence):
            return False
        length = int.from_bytes(self._inbox[:3], "little")
        self._next_sequence = (self._next_sequence + 1) & 0xFF
        if self._phase is RelayPhase.RECEIVING_FILE and length == 0 and not self._packet_is_full:
            self._backend.write(bytes(self._inbox[:HEADER_SIZE]))
            del self._inbox[:HEADER_SIZE]
            self._on_request_sent()
            return True
        self._packet_is_full = length == MAX_PACKET_PAYLOAD
        self._packet_bytes_left = HEADER_SIZE + length
        return True

    def _begin_response(self, command: int, phase: RelayPhase) -> None:
        self._command, self._phase, self._response_finished, self._error_response = (
            command,
            phase,
            False,
            None,
        )
        self._tracker.begin(command)

    def _on_request_sent(self) -> None:
        if (
            self._command in COMMANDS_WITHOUT_RESPONSE
            or self._response_finished
            or self._error_response is not None
        ):
            self._phase = RelayPhase.IDLE
            if self._error_response is not None:
                self._send_payloads([self._error_response])
            self._reset_compressed_sequence()
            self._close_if_shutting_down()
        else:
            self._phase = RelayPhase.AWAITING_RESPONSE

    def _handle_request(self, payload: bytes, packet: bytes | None = None) -> None:
        """Forward a complete request or answer it here.

        `packet`: the request's only packet, if it has one.
        """
        if self._close_if_shutting_down():
            return
        status = self._tracker.status & SESSION_STATUS_FLAGS
        match self._requests.handle(payload, status):
            case bytes(translated):
                same = packet if translated is payload else None
                self._backend.write(same or frames(0, [translated]))
                if payload[0] in COMMANDS_WITHOUT_RESPONSE:
                    self._reset_compressed_sequence()
                else:
                    self._begin_response(payload[0], RelayPhase.AWAITING_RESPONSE)
            case BackendExchange() as exchange:
                self._begin_response(MySqlCommand.QUERY, RelayPhase.AWAITING_RESPONSE)
                self._exchange_task = asyncio.get_running_loop().create_task(
                    self._run_exchange(exchange, status)
                )
            case SpecialCommand.QUIT:
                self.close()
            case SpecialCommand.CHANGE_USER:
                self._hand_over_change_user(payload)
            case SpecialCommand.SHUT_DOWN:
                self._send_payloads([ok(status)])
                self._node.shut_down()
            case response:
                self._send_payloads(response)

    async def _run_exchange(self, exchange: BackendExchange, status: int) -> None:
        """Query MariaDB ourselves, with its packets going to its stream meanwhile, and answer the client."""
        try:
            reply: ClientResponse | None = await exchange.run(status)
        except (ConnectionClosed, BadSequence, MalformedPacket, PacketTooLarge):
            reply = None
        except Exception as error:
            if not self._result.done():
                self._result.set_exception(error)  # A bug here must not look like a slow response.
            return
        self._exchange_task = None
        if reply is None or self._backend.is_closing():
            self.close()
            return
        self._tracker.status, self._phase = reply.status, RelayPhase.IDLE
        self._send_payloads(reply.payloads)
        self._resume()

    def _resume(self) -> None:
        """Continue after a response: process the next request if it has already arrived."""
        if not self._close_if_shutting_down() and (self._inbox or self._compression):
            self._process_inbox()
            self._update_client_reading()

    @property
    def _is_shutting_down(self) -> bool:
        """Whether the session must end because TiDB closes.

        A session outside a transaction then ends before its next read, or after it, and then drops the
        request (pingcap/tidb pkg/server/conn.go).
        """
        return self._node.is_closing and not self._in_transaction

    def _close_if_shutting_down(self) -> bool:
        """Close the session if the server is shutting down; return whether it did."""
        if self._is_shutting_down:
            self.close()
            return True
        return False

    def _hand_over_change_user(self, payload: bytes) -> None:
        if self._inbox or self._compression:
            self._reject_violation("bytes after COM_CHANGE_USER", 0)
            return
        for stream in self._streams:
            stream.transport.set_protocol(stream)
            stream.transport.resume_reading()
        self._finish(payload)

    def _send_payloads(self, payloads: list[bytes]) -> None:
        self._send_to_client(frames(1, payloads))
        self._reset_compressed_sequence()

    def _reset_compressed_sequence(self) -> None:
        """Restart the numbering of compressed packets, as each request does."""
        if self._compression is not None:
            self._compression.sequence = 0

    def _send_to_client(self, data: bytes, *, more: bool = False) -> None:
        if self._compression is not None:
            data = self._compression.compress(data, more_follows=more)
        self._client.write(data)

    def _reject_violation(self, what: str, sequence: int) -> None:
        self._node.record_violation(self._requests.client.peer, what)
        self._send_to_client(frames(sequence + 1, [err(8052, what, "HY000")]))
        self.close()

    # Data from MariaDB.

    def _on_backend_data(self, data: bytes) -> None:
        if self._phase in (RelayPhase.IDLE, RelayPhase.CLOSED):
            return  # MariaDB sends a reason when it closes an idle connection; TiDB just closes it.
        if self._exchange_task is not None:
            self._streams[1].data_received(data)
            return
        if self._response_finished:
            self._send_to_client(data)
            return
        progress = self._tracker.feed(data)
        if self._command == MySqlCommand.STMT_PREPARE:
            self._prepare_response += data
            if progress is ResponseProgress.MORE:
                return
            data, self._prepare_response = self._prepare_response, b""
        if progress is ResponseProgress.DONE:
            statement_id = self._requests.on_response_end(self._tracker)
            if statement_id is not None:
                data = data[: HEADER_SIZE + 1] + statement_id.to_bytes(4, "little") + data[HEADER_SIZE + 5 :]
        self._send_to_client(data, more=progress is ResponseProgress.MORE)
        if progress is ResponseProgress.DONE:
            self._response_finished = True
            if self._phase is RelayPhase.AWAITING_RESPONSE:
                self._phase = RelayPhase.IDLE
                self._reset_compressed_sequence()
                self._resume()
        elif progress is ResponseProgress.WANTS_FILE and self._phase is RelayPhase.AWAITING_RESPONSE:
            # The rest of the response starts like a response to a query.
            self._begin_response(MySqlCommand.QUERY, RelayPhase.RECEIVING_FILE)
            self._packet_bytes_left, self._packet_is_full = 0, False
            self._next_sequence = (self._tracker.sequence + 1) & 0xFF
            self._process_inbox()
            self._update_client_reading()
