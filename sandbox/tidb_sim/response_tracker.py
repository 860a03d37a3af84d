"""Following a server's answer packet by packet, to know where it ends and which status it carries.

Sans-I/O. Only packet headers are looked at, and payload where the kind of packet must be known; rules of
recognising an end: MySQL client/server protocol, "COM_QUERY response", "OK packet", "EOF packet".
"""

from __future__ import annotations

from enum import Enum, auto

from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    CURSOR_EXISTS,
    FULL,
    HEADER_SIZE,
    MORE_RESULTS,
    Command,
    read_lenenc_int,
)

SILENT = frozenset({Command.QUIT, Command.STMT_SEND_LONG_DATA, Command.STMT_CLOSE})
"""Requests that get no answer."""

_RESULTS = frozenset({Command.QUERY, Command.STMT_EXECUTE})
_ROWS_ONLY = frozenset({Command.STMT_FETCH, Command.FIELD_LIST})


class Progress(Enum):
    """How far an answer has come."""

    MORE = auto()
    DONE = auto()
    WANTS_FILE = auto()
    """LOAD DATA LOCAL: the client must send the file; the rest of the answer follows that."""


class _Expect(Enum):
    SINGLE = auto()
    """One packet, whatever it is."""
    FIRST = auto()
    """OK, ERR, LOCAL INFILE or a number of columns."""
    DEFINITIONS = auto()
    """Column definitions that are counted, then rows."""
    END_OF_DEFINITIONS = auto()
    ROWS = auto()
    PREPARED = auto()
    """The head of the answer to a PREPARE."""
    COUNTED = auto()
    """A known number of packets, then the end."""


class ResponseTracker:
    """The answer to one request after the other, on one connection.

    `status` is the last server status that was seen, `sequence` the number of the last packet, `prepared` the
    statement that this answer tells of, if any, `parameters` how many that one has, `failed` whether the
    answer has ended with ERR.
    """

    def __init__(self, *, deprecate_eof: bool) -> None:
        self.status = AUTOCOMMIT
        self.sequence = 0
        self.prepared: int | None = None
        self.parameters = 0
        self.failed = False
        self._deprecate_eof = deprecate_eof
        self._expect = _Expect.SINGLE
        self._command: int = Command.PING
        self._packets_left = 0
        self._skip = 0
        self._held = b""
        self._continued = False

    def begin(self, command: int) -> None:
        """A request was sent whose answer is followed from now on."""
        self._command, self.prepared = command, None
        self._skip, self._held, self._continued = 0, b"", False
        if command in _RESULTS:
            self._expect = _Expect.FIRST
        elif command in _ROWS_ONLY:
            self._expect = _Expect.ROWS
        elif command == Command.STMT_PREPARE:
            self._expect = _Expect.PREPARED
        else:
            self._expect = _Expect.SINGLE

    def feed(self, data: bytes) -> Progress:
        """The next bytes of the answer, cut anywhere."""
        if self._held:
            data, self._held = self._held + data, b""
        size = len(data)
        at = self._skip
        while at < size:
            if size - at <= HEADER_SIZE:
                self._held, at = data[at:], size
                break
            length = data[at] | data[at + 1] << 8 | data[at + 2] << 16
            # A row may begin with 0xfe too: a value of 16 MiB or more, hence a packet that is full.
            if self._continued or (self._expect is _Expect.ROWS and (data[at + 4] < 0xFE or length == FULL)):
                self._continued = length == FULL
                at += HEADER_SIZE + length
                continue
            end = at + HEADER_SIZE + length
            if end > size:
                self._held, at = data[at:], size
                break
            self.sequence = data[at + 3]
            payload = data[at + HEADER_SIZE : end]
            progress = self._packet(payload)
            at = end
            if progress is not Progress.MORE:
                self._skip = 0
                self.failed = payload[:1] == b"\xff"
                return progress
        self._skip = at - size
        return Progress.MORE

    def _packet(self, payload: bytes) -> Progress:
        if self._expect is _Expect.COUNTED:
            return self._count_down()
        if self._expect is _Expect.DEFINITIONS:
            if payload[:1] == b"\xff":
                return Progress.DONE
            self._packets_left -= 1
            if self._packets_left == 0:
                self._expect = _Expect.ROWS if self._deprecate_eof else _Expect.END_OF_DEFINITIONS
            return Progress.MORE
        if self._expect is _Expect.ROWS:
            return self._end_of_rows(payload)
        if self._expect is _Expect.END_OF_DEFINITIONS:
            return self._end_of_definitions(payload)
        if self._expect is _Expect.PREPARED:
            return self._prepared(payload)
        if self._expect is _Expect.SINGLE:
            return self._single(payload)
        return self._first(payload)

    def _single(self, payload: bytes) -> Progress:
        if self._command == Command.STATISTICS:
            return Progress.DONE
        if payload[0] == 0x00:
            self._take_ok_status(payload)
        elif payload[0] == 0xFE:
            self._end_of_rows(payload)
        return Progress.DONE

    def _first(self, payload: bytes) -> Progress:
        first = payload[0]
        if first == 0x00:
            return self._take_ok_status(payload)
        if first == 0xFF:
            return Progress.DONE
        if first == 0xFB:
            return Progress.WANTS_FILE
        self._packets_left, _ = read_lenenc_int(payload, 0)
        self._expect = _Expect.DEFINITIONS
        return Progress.MORE

    def _prepared(self, payload: bytes) -> Progress:
        if payload[0] != 0x00:
            return Progress.DONE
        self.prepared = int.from_bytes(payload[1:5], "little")
        columns = int.from_bytes(payload[5:7], "little")
        self.parameters = int.from_bytes(payload[7:9], "little")
        ends = 0 if self._deprecate_eof else (columns > 0) + (self.parameters > 0)
        self._packets_left = columns + self.parameters + ends
        self._expect = _Expect.COUNTED
        return Progress.MORE if self._packets_left else Progress.DONE

    def _count_down(self) -> Progress:
        self._packets_left -= 1
        return Progress.MORE if self._packets_left else Progress.DONE

    def _end_of_definitions(self, payload: bytes) -> Progress:
        if payload[0] == 0xFF:
            return Progress.DONE
        self.status = int.from_bytes(payload[3:5], "little")
        self._expect = _Expect.ROWS
        return Progress.DONE if self.status & CURSOR_EXISTS else Progress.MORE

    def _end_of_rows(self, payload: bytes) -> Progress:
        if payload[0] == 0xFF:
            return Progress.DONE
        if len(payload) <= 5:
            self.status = int.from_bytes(payload[3:5], "little")
            return self._next_result()
        return self._take_ok_status(payload)

    def _take_ok_status(self, payload: bytes) -> Progress:
        _, at = read_lenenc_int(payload, 1)
        _, at = read_lenenc_int(payload, at)
        self.status = int.from_bytes(payload[at : at + 2], "little")
        return self._next_result()

    def _next_result(self) -> Progress:
        if self.status & MORE_RESULTS:
            self._expect = _Expect.FIRST
            return Progress.MORE
        return Progress.DONE
