"""Relays a session after its login: requests to MariaDB, one by one, and responses back as they arrive.

This module checks the sequence numbers of requests, and parses responses in chunks (`response_tracker.py`).
As in TiDB, a request is buffered until it is complete, but the file of a LOAD DATA LOCAL is forwarded as it
arrives. Only one request is in progress. Later requests wait here; in TiDB, they would wait in the socket.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from sandbox.tidb_sim.mariadb_backend import BackendConnection, BackendError
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
    parse_payload,
)
from sandbox.tidb_sim.request_handler import BackendExchange, RequestHandler, SpecialCommand
from sandbox.tidb_sim.response_tracker import COMMANDS_WITHOUT_RESPONSE, ResponseProgress, ResponseTracker
from sandbox.tidb_sim.session_migration import ClientResponse
from sandbox.tidb_sim.stream import ConnectionClosed, PacketStream, PacketTooLarge

_MAX_REQUEST_BYTES = 65 << 20  # TiDB's `max_allowed_packet` (64 MiB) and the packet headers.
_MAX_READ_AHEAD_BYTES = 256 * 1024  # Reading pauses when a client has sent more than this in advance.


class _Phase(Enum):
    IDLE = auto()
    AWAITING_RESPONSE = auto()  # MariaDB's response is awaited or forwarded.
    RECEIVING_FILE = auto()  # LOAD DATA LOCAL: the client sends the file.
    CLOSED = auto()


class Relay(asyncio.Protocol):
    """A session from its login until it ends or logs in again (COM_CHANGE_USER).

    It is the asyncio protocol of the client's connection.
    """

    def __init__(
        self, node: SimNode, requests: RequestHandler, client: PacketStream, backend: BackendConnection
    ) -> None:
        self._node, self._requests = node, requests
        self._streams = (client, backend.stream)
        self._compression = client.compression
        self._client, self._backend = client.transport, backend.stream.transport
        self._tracker = ResponseTracker(deprecate_eof=requests.deprecate_eof)
        self._phase = _Phase.IDLE
        self._inbox = bytearray()
        self._backend_write_paused = False
        self._has_incomplete_request = False  # Whether the request at the start of the inbox is incomplete.
        self._prepare_response = b""  # The received part of the response to a PREPARE.
        self._exchange_task: asyncio.Task[None] | None = None
        """The task that runs a BackendExchange. It reads MariaDB's stream, which `on_backend_data` feeds."""
        self._command: int = MySqlCommand.PING
        # Used while a file is forwarded.
        self._file_packet_bytes_left = self._next_sequence = 0
        self._is_file_packet_full = self._response_finished = False
        self._result: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    @property
    def is_busy(self) -> bool:
        """Whether a shutdown waits for this session: it executes a statement or is in a transaction."""
        return self._phase is not _Phase.CLOSED and (self._phase is not _Phase.IDLE or self._in_transaction)

    @property
    def _in_transaction(self) -> bool:
        return bool(self._tracker.status & IN_TRANSACTION)

    async def run(self) -> bytes | None:
        """Serve the session. Return None at its end, or the payload of a COM_CHANGE_USER.

        After None, the streams are closed; otherwise, the caller can read from them again.
        """
        client, backend = self._streams
        self._client.set_protocol(self)
        self._backend.set_protocol(_BackendProtocol(self, backend))
        if self._client.is_closing() or self._backend.is_closing() or self._node.is_ending_idle_sessions:
            self.close()
        self._inbox += client.take_buffered()
        self._reset_compressed_sequence()
        self._process_inbox()
        self._update_client_reading()
        return await self._result

    def close(self) -> None:
        """Close the session now. The client gets what was already sent, then a FIN."""
        if self._phase is _Phase.IDLE and not self._backend.is_closing():
            # Only if idle: if MariaDB has received half a request, QUIT might complete the request.
            self._backend.write(frames(0, [bytes((MySqlCommand.QUIT,))]))
        self._finish(None)
        self._client.close()
        self._backend.close()

    def kill(self) -> None:
        """Close the session now, as TiDB's shutdown does: with a FIN, after close_notify if TLS is in use.

        The client loses data that it has not received yet.
        """
        if not self._client.get_write_buffer_size():
            self._client.close()
        self.abort()

    def abort(self) -> None:
        """Reset both connections now and drop unsent data."""
        self._finish(None)
        for stream in self._streams:
            stream.abort()

    def _finish(self, result: bytes | None) -> None:
        self._phase = _Phase.CLOSED
        if self._exchange_task is not None:
            self._exchange_task.cancel()
        if not self._result.done():
            self._result.set_result(result)

    # Flow control: read from one side only while the other side accepts data.

    def pause_writing(self) -> None:
        self._backend.pause_reading()

    def resume_writing(self) -> None:
        self._backend.resume_reading()

    def on_backend_write_paused(self, paused: bool) -> None:
        """Pause reading from the client while MariaDB's connection accepts no data."""
        self._backend_write_paused = paused
        self._update_client_reading()

    def _update_client_reading(self) -> None:
        ahead = 0 if self._has_incomplete_request else len(self._inbox) + len(self._compression or ())
        if self._backend_write_paused or ahead > _MAX_READ_AHEAD_BYTES:
            self._client.pause_reading()
        else:
            self._client.resume_reading()

    # Data from the client.

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.CLOSED:
            return
        if self._compression is None:
            self._inbox += data
        else:
            self._compression.feed(data)
        self._process_inbox()
        self._update_client_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._streams[0].connection_lost(error)
        self.close()

    def _process_inbox(self) -> None:
        """Process the inbox until nothing more can be processed now."""
        has_progressed = True
        while has_progressed and self._phase not in (_Phase.AWAITING_RESPONSE, _Phase.CLOSED):
            has_progressed = bool(self._inbox) and (
                self._take_request() if self._phase is _Phase.IDLE else self._forward_file_part()
            )
            has_progressed = has_progressed or self._decompress_next()

    def _decompress_next(self) -> bool:
        """Append the content of the next compressed packet to the inbox, if it may be decompressed now."""
        if self._compression is None or self._phase in (_Phase.AWAITING_RESPONSE, _Phase.CLOSED):
            return False
        try:
            content = self._compression.next_content()
        except (BadSequence, MalformedPacket) as error:
            self._reject_violation(str(error), 0)
            return False
        self._inbox += content or b""
        return content is not None

    def _check_sequence(self, expected: int) -> bool:
        """Return whether the first packet in the inbox has the expected number. If not, report a violation.

        Inside compressed packets, TiDB accepts any number (pingcap/tidb pkg/server/internal/packetio.go).
        Then the number is corrected for MariaDB.
        """
        sequence = self._inbox[3]
        if self._compression is not None:
            self._inbox[3] = expected
        elif sequence != expected:
            self._reject_violation(f"invalid sequence {sequence} != {expected}", sequence)
            return False
        return True

    def _take_request(self) -> bool:
        """Take and handle the request at the start of the inbox if it is complete."""
        if len(self._inbox) >= HEADER_SIZE and not any(self._inbox[:3]):
            self._reject_violation("an empty request", self._inbox[3])
            return False
        if len(self._inbox) <= HEADER_SIZE or not self._check_sequence(0):
            return False
        try:
            complete = parse_payload(self._inbox, check_sequence=self._compression is None)
        except BadSequence as error:
            self._reject_violation(str(error), error.received)
            return False
        self._has_incomplete_request = complete is None
        if complete is None:
            if len(self._inbox) > _MAX_REQUEST_BYTES:
                too_large = err(1153, "Got a packet bigger than 'max_allowed_packet' bytes", "08S01")
                self._send_payloads([too_large])
                self.close()
            return False
        payload, size = complete
        del self._inbox[:size]
        self._handle_request(payload)
        return True

    def _forward_file_part(self) -> bool:
        """Forward the received part of a file's packet, or handle the start of the next packet."""
        if self._file_packet_bytes_left == 0:
            return self._begin_file_packet()
        part = bytes(self._inbox[: self._file_packet_bytes_left])
        del self._inbox[: len(part)]
        self._file_packet_bytes_left -= len(part)
        self._backend.write(part)
        return True

    def _begin_file_packet(self) -> bool:
        if len(self._inbox) < HEADER_SIZE or not self._check_sequence(self._next_sequence):
            return False
        length = int.from_bytes(self._inbox[:3], "little")
        self._next_sequence = (self._next_sequence + 1) & 0xFF
        if length == 0 and not self._is_file_packet_full:
            self._backend.write(bytes(self._inbox[:HEADER_SIZE]))
            del self._inbox[:HEADER_SIZE]
            self._on_file_sent()
            return True
        self._is_file_packet_full = length == MAX_PACKET_PAYLOAD
        self._file_packet_bytes_left = HEADER_SIZE + length
        return True

    def _begin_response(self, command: int, phase: _Phase) -> None:
        self._command, self._phase = command, phase
        self._response_finished = False
        self._tracker.begin(command)

    def _on_file_sent(self) -> None:
        if not self._response_finished:
            self._phase = _Phase.AWAITING_RESPONSE
            return
        self._phase = _Phase.IDLE
        self._reset_compressed_sequence()
        self._close_if_shutting_down()

    def _handle_request(self, payload: bytes) -> None:
        if self._close_if_shutting_down():
            return
        status = self._tracker.status & SESSION_STATUS_FLAGS
        match self._requests.handle(payload, status):
            case bytes(translated):
                self._backend.write(frames(0, [translated]))
                if payload[0] in COMMANDS_WITHOUT_RESPONSE:
                    self._reset_compressed_sequence()
                else:
                    self._begin_response(payload[0], _Phase.AWAITING_RESPONSE)
            case SpecialCommand.QUIT:
                self.close()
            case SpecialCommand.CHANGE_USER:
                self._hand_over_change_user(payload)
            case list(response):
                self._send_payloads(response)
            case exchange:
                self._begin_response(MySqlCommand.QUERY, _Phase.AWAITING_RESPONSE)
                self._exchange_task = asyncio.create_task(self._run_exchange(exchange, status))

    async def _run_exchange(self, exchange: BackendExchange, status: int) -> None:
        """Run the exchange, then answer the client. Meanwhile, `on_backend_data` feeds MariaDB's stream."""
        try:
            reply: ClientResponse | None = await exchange(status)
        except BackendError as error:
            reply = ClientResponse([error.payload], status)
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
        self._tracker.status, self._phase = reply.status, _Phase.IDLE
        self._send_payloads(reply.payloads)
        self._resume()

    def _resume(self) -> None:
        """Continue after a response with the next request, if it has arrived."""
        if not self._close_if_shutting_down() and (self._inbox or self._compression):
            self._process_inbox()
            self._update_client_reading()

    def _close_if_shutting_down(self) -> bool:
        """Close the session if the server is shutting down; return whether it was closed.

        Outside a transaction, TiDB ends a session before its next read, or drops the request after the read
        (pingcap/tidb pkg/server/conn.go).
        """
        if not self._node.is_ending_idle_sessions or self._in_transaction:
            return False
        self.close()
        return True

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
        """Number compressed packets from 0 again, because each request restarts their numbering."""
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

    def on_backend_data(self, data: bytes) -> None:
        """Handle the next part of a response."""
        if self._phase in (_Phase.IDLE, _Phase.CLOSED):
            return  # MariaDB sends a reason when it closes an idle connection. TiDB does not.
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
            if self._phase is _Phase.AWAITING_RESPONSE:
                self._phase = _Phase.IDLE
                self._reset_compressed_sequence()
                self._resume()
        elif progress is ResponseProgress.WANTS_FILE and self._phase is _Phase.AWAITING_RESPONSE:
            # The rest of the response starts like a response to a query.
            self._begin_response(MySqlCommand.QUERY, _Phase.RECEIVING_FILE)
            self._file_packet_bytes_left, self._is_file_packet_full = 0, False
            self._next_sequence = (self._tracker.sequence + 1) & 0xFF
            self._process_inbox()
            self._update_client_reading()


class _BackendProtocol(asyncio.Protocol):
    """The protocol of MariaDB's connection. It passes events to the relay, and a close also to the stream."""

    def __init__(self, relay: Relay, stream: PacketStream) -> None:
        self._relay, self._stream = relay, stream

    def data_received(self, data: bytes) -> None:
        self._relay.on_backend_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._stream.connection_lost(error)
        self._relay.close()

    def pause_writing(self) -> None:
        self._relay.on_backend_write_paused(True)

    def resume_writing(self) -> None:
        self._relay.on_backend_write_paused(False)
