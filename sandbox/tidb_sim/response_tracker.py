"""Tracks a server's response packet by packet, to detect its end and the status it carries.

Sans-I/O. Only packet headers are parsed, and payload where the kind of packet must be known; rules for
detecting the end: MySQL client/server protocol, "COM_QUERY response", "OK packet", "EOF packet".
"""

from __future__ import annotations

from enum import Enum, auto

from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    CURSOR_EXISTS,
    HEADER_SIZE,
    MAX_PACKET_PAYLOAD,
    MORE_RESULTS,
    MySqlCommand,
    read_lenenc_int,
)

COMMANDS_WITHOUT_RESPONSE = frozenset(
    {MySqlCommand.QUIT, MySqlCommand.STMT_SEND_LONG_DATA, MySqlCommand.STMT_CLOSE}
)
"""Requests that get no response."""

_RESULT_SET_COMMANDS = frozenset({MySqlCommand.QUERY, MySqlCommand.STMT_EXECUTE})
_ROWS_ONLY_COMMANDS = frozenset({MySqlCommand.STMT_FETCH, MySqlCommand.FIELD_LIST})


class ResponseProgress(Enum):
    """The progress of a response."""

    MORE = auto()
    DONE = auto()
    WANTS_FILE = auto()
    """LOAD DATA LOCAL: the client must send the file; the rest of the response follows it."""


class _ExpectedPacket(Enum):
    SINGLE = auto()
    """One packet of any kind."""
    FIRST = auto()
    """OK, ERR, LOCAL INFILE or a number of columns."""
    DEFINITIONS = auto()
    """A known number of column definitions, then rows."""
    END_OF_DEFINITIONS = auto()
    ROWS = auto()
    PREPARE_HEAD = auto()
    """The first packet of the response to a PREPARE."""
    FIXED_COUNT = auto()
    """A known number of packets, then the end."""


class ResponseTracker:
    """The responses to one request after the other, on one connection.

    `status` is the last server status, `sequence` the number of the last packet, `prepared_id` the statement
    that this response has prepared, if any, `parameter_count` its number of parameters, `has_failed` whether
    the response ended with ERR.
    """

    def __init__(self, *, deprecate_eof: bool) -> None:
        self.status = AUTOCOMMIT
        self.sequence = 0
        self.prepared_id: int | None = None
        self.parameter_count = 0
        self.has_failed = False
        self._deprecate_eof = deprecate_eof
        self._expected = _ExpectedPacket.SINGLE
        self._command: int = MySqlCommand.PING
        self._packets_left = 0
        self._bytes_to_skip = 0
        self._partial_packet = b""
        self._in_long_packet = False

    def begin(self, command: int) -> None:
        """Start tracking the response to a request."""
        self._command, self.prepared_id = command, None
        self._bytes_to_skip, self._partial_packet, self._in_long_packet = 0, b"", False
        if command in _RESULT_SET_COMMANDS:
            self._expected = _ExpectedPacket.FIRST
        elif command in _ROWS_ONLY_COMMANDS:
            self._expected = _ExpectedPacket.ROWS
        elif command == MySqlCommand.STMT_PREPARE:
            self._expected = _ExpectedPacket.PREPARE_HEAD
        else:
            self._expected = _ExpectedPacket.SINGLE

    def feed(self, data: bytes) -> ResponseProgress:
        """Process the next bytes of the response, split anywhere."""
        if self._partial_packet:
            data, self._partial_packet = self._partial_packet + data, b""
        size = len(data)
        at = self._bytes_to_skip
        while at < size:
            if size - at <= HEADER_SIZE:
                self._partial_packet, at = data[at:], size
                break
            length = data[at] | data[at + 1] << 8 | data[at + 2] << 16
            # A row may also start with 0xfe: a value of 16 MiB or more, hence in a full packet.
            if self._in_long_packet or (
                self._expected is _ExpectedPacket.ROWS
                and (data[at + 4] < 0xFE or length == MAX_PACKET_PAYLOAD)
            ):
                self._in_long_packet = length == MAX_PACKET_PAYLOAD
                at += HEADER_SIZE + length
                continue
            end = at + HEADER_SIZE + length
            if end > size:
                self._partial_packet, at = data[at:], size
                break
            self.sequence = data[at + 3]
            payload = data[at + HEADER_SIZE : end]
            progress = self._on_packet(payload)
            at = end
            if progress is not ResponseProgress.MORE:
                self._bytes_to_skip = 0
                self.has_failed = payload[:1] == b"\xff"
                return progress
        self._bytes_to_skip = at - size
        return ResponseProgress.MORE

    def _on_packet(self, payload: bytes) -> ResponseProgress:
        if self._expected is _ExpectedPacket.FIXED_COUNT:
            return self._count_down()
        if self._expected is _ExpectedPacket.DEFINITIONS:
            if payload[:1] == b"\xff":
                return ResponseProgress.DONE
            self._packets_left -= 1
            if self._packets_left == 0:
                self._expected = (
                    _ExpectedPacket.ROWS if self._deprecate_eof else _ExpectedPacket.END_OF_DEFINITIONS
                )
            return ResponseProgress.MORE
        if self._expected is _ExpectedPacket.ROWS:
            return self._on_rows_end(payload)
        if self._expected is _ExpectedPacket.END_OF_DEFINITIONS:
            return self._on_definitions_end(payload)
        if self._expected is _ExpectedPacket.PREPARE_HEAD:
            return self._on_prepare_head(payload)
        if self._expected is _ExpectedPacket.SINGLE:
            return self._on_single_packet(payload)
        return self._on_first_packet(payload)

    def _on_single_packet(self, payload: bytes) -> ResponseProgress:
        if self._command == MySqlCommand.STATISTICS:
            return ResponseProgress.DONE
        if payload[0] == 0x00:
            self._read_ok_status(payload)
        elif payload[0] == 0xFE:
            self._on_rows_end(payload)
        return ResponseProgress.DONE

    def _on_first_packet(self, payload: bytes) -> ResponseProgress:
        first = payload[0]
        if first == 0x00:
            return self._read_ok_status(payload)
        if first == 0xFF:
            return ResponseProgress.DONE
        if first == 0xFB:
            return ResponseProgress.WANTS_FILE
        self._packets_left, _ = read_lenenc_int(payload, 0)
        self._expected = _ExpectedPacket.DEFINITIONS
        return ResponseProgress.MORE

    def _on_prepare_head(self, payload: bytes) -> ResponseProgress:
        if payload[0] != 0x00:
            return ResponseProgress.DONE
        self.prepared_id = int.from_bytes(payload[1:5], "little")
        columns = int.from_bytes(payload[5:7], "little")
        self.parameter_count = int.from_bytes(payload[7:9], "little")
        ends = 0 if self._deprecate_eof else (columns > 0) + (self.parameter_count > 0)
        self._packets_left = columns + self.parameter_count + ends
        self._expected = _ExpectedPacket.FIXED_COUNT
        return ResponseProgress.MORE if self._packets_left else ResponseProgress.DONE

    def _count_down(self) -> ResponseProgress:
        self._packets_left -= 1
        return ResponseProgress.MORE if self._packets_left else ResponseProgress.DONE

    def _on_definitions_end(self, payload: bytes) -> ResponseProgress:
        if payload[0] == 0xFF:
            return ResponseProgress.DONE
        self.status = int.from_bytes(payload[3:5], "little")
        self._expected = _ExpectedPacket.ROWS
        return ResponseProgress.DONE if self.status & CURSOR_EXISTS else ResponseProgress.MORE

    def _on_rows_end(self, payload: bytes) -> ResponseProgress:
        if payload[0] == 0xFF:
            return ResponseProgress.DONE
        if len(payload) <= 5:
            self.status = int.from_bytes(payload[3:5], "little")
            return self._next_result()
        return self._read_ok_status(payload)

    def _read_ok_status(self, payload: bytes) -> ResponseProgress:
        _, at = read_lenenc_int(payload, 1)
        _, at = read_lenenc_int(payload, at)
        self.status = int.from_bytes(payload[at : at + 2], "little")
        return self._next_result()

    def _next_result(self) -> ResponseProgress:
        if self.status & MORE_RESULTS:
            self._expected = _ExpectedPacket.FIRST
            return ResponseProgress.MORE
        return ResponseProgress.DONE
