"""Tracks a server's response packet by packet, to find its end and its server status.

Sans-I/O. It parses packet headers, and payloads only to find out the kind of a packet. Rules for the end of a
response: MySQL client/server protocol, "COM_QUERY response", "OK packet", "EOF packet".
"""

from __future__ import annotations

import struct
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


class ResponseProgress(Enum):
    MORE = auto()
    DONE = auto()
    WANTS_FILE = auto()
    """LOAD DATA LOCAL: the client must send the file before the rest of the response follows."""


class _ExpectedPacket(Enum):
    SINGLE = auto()  # One packet of any kind.
    FIRST = auto()  # OK, ERR, LOCAL INFILE or a number of columns.
    DEFINITIONS = auto()  # A known number of column definitions, then rows.
    END_OF_DEFINITIONS = auto()
    ROWS = auto()
    PREPARE_HEAD = auto()  # The first packet of the response to a PREPARE.
    FIXED_COUNT = auto()  # A known number of packets, then the end.


_FIRST_EXPECTED: dict[int, _ExpectedPacket] = {
    MySqlCommand.QUERY: _ExpectedPacket.FIRST,
    MySqlCommand.STMT_EXECUTE: _ExpectedPacket.FIRST,
    MySqlCommand.STMT_FETCH: _ExpectedPacket.ROWS,
    MySqlCommand.FIELD_LIST: _ExpectedPacket.ROWS,
    MySqlCommand.STMT_PREPARE: _ExpectedPacket.PREPARE_HEAD,
}


class ResponseTracker:
    """Tracks the responses on one connection, one request at a time.

    `status`: the last server status; `sequence`: the number of the last packet; `prepared_id` and
    `parameter_count`: of the statement that this response has prepared; `has_failed`: whether the response
    ended with ERR.
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
        self._expected = _FIRST_EXPECTED.get(command, _ExpectedPacket.SINGLE)

    def feed(self, data: bytes) -> ResponseProgress:
        """Process the next bytes of the response, in chunks of any size."""
        if self._partial_packet:
            data, self._partial_packet = self._partial_packet + data, b""
        size = len(data)
        at = self._bytes_to_skip
        while at < size:
            if size - at <= HEADER_SIZE:
                self._partial_packet, at = data[at:], size
                break
            length = data[at] | data[at + 1] << 8 | data[at + 2] << 16
            # A row may also start with 0xfe if its first value has 16 MiB or more. Its packet is full then.
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
        expected, first = self._expected, payload[0] if payload else 0
        if expected is _ExpectedPacket.SINGLE and self._command == MySqlCommand.STATISTICS:
            return ResponseProgress.DONE  # A text, which may start with any byte.
        if first == 0xFF and expected is not _ExpectedPacket.FIXED_COUNT:
            return ResponseProgress.DONE
        match expected:
            case _ExpectedPacket.FIXED_COUNT:
                self._packets_left -= 1
                return ResponseProgress.MORE if self._packets_left else ResponseProgress.DONE
            case _ExpectedPacket.DEFINITIONS:
                self._packets_left -= 1
                if self._packets_left == 0:
                    self._expected = (
                        _ExpectedPacket.ROWS if self._deprecate_eof else _ExpectedPacket.END_OF_DEFINITIONS
                    )
                return ResponseProgress.MORE
            case _ExpectedPacket.END_OF_DEFINITIONS:
                self.status = int.from_bytes(payload[3:5], "little")
                self._expected = _ExpectedPacket.ROWS
                return ResponseProgress.DONE if self.status & CURSOR_EXISTS else ResponseProgress.MORE
            case _ExpectedPacket.ROWS:
                return self._on_rows_end(payload)
            case _ExpectedPacket.PREPARE_HEAD:
                return self._on_prepare_head(payload)
            case _ExpectedPacket.SINGLE:
                if first == 0x00:
                    self._read_ok_status(payload)
                elif first == 0xFE:
                    self._on_rows_end(payload)
                return ResponseProgress.DONE
        if first == 0x00:
            return self._read_ok_status(payload)
        if first == 0xFB:
            return ResponseProgress.WANTS_FILE
        self._packets_left, _ = read_lenenc_int(payload, 0)
        self._expected = _ExpectedPacket.DEFINITIONS
        return ResponseProgress.MORE

    def _on_prepare_head(self, payload: bytes) -> ResponseProgress:
        self.prepared_id, columns, self.parameter_count = struct.unpack_from("<IHH", payload, 1)
        ends = 0 if self._deprecate_eof else (columns > 0) + (self.parameter_count > 0)
        self._packets_left = columns + self.parameter_count + ends
        self._expected = _ExpectedPacket.FIXED_COUNT
        return ResponseProgress.MORE if self._packets_left else ResponseProgress.DONE

    def _on_rows_end(self, payload: bytes) -> ResponseProgress:
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
