"""One session that asks a small statement again and again and knows how long each answer took.

`python -m bench.migration.stopwatch` is a program of its own, so that nothing else that a benchmark does delays it. It
asks for CONNECTION_ID(), in turn as text and as a prepared statement: another answer than before tells that
the session has moved in between. SIGTERM ends it; it prints what it has seen as its last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import socket
import ssl
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from sandbox.tidb_sim.packets import Capability, MySqlCommand, frame, read_lenenc_bytes

READY_LINE = "ready"
_STATEMENT = b"select connection_id()"
_CAPABILITIES = (
    Capability.LONG_PASSWORD
    | Capability.PROTOCOL_41
    | Capability.TRANSACTIONS
    | Capability.SECURE_CONNECTION
    | Capability.PLUGIN_AUTH
)
_COLLATION = 45  # utf8mb4_general_ci
_OK, _ERR, _EOF = 0x00, 0xFF, 0xFE
_ANSWER_TIMEOUT_SECONDS = 60.0  # seconds for one answer


StatementTiming = tuple[float, float, bool]
"""When a statement was sent (time.monotonic), how long its answer took (seconds), and whether the session was
elsewhere when the one before was answered."""


class UnexpectedAnswer(Exception):
    """The server said what it must not say, or has gone."""


class StopwatchSession:
    """Logged in as root, who has no password. OSError, Broken."""

    def __init__(self, port: int, ca: Path | None) -> None:
        plain = socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_TIMEOUT_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket: socket.socket = plain
        # Not one byte more than the greeting is read before TLS begins: the server waits behind it.
        self._file: BinaryIO = plain.makefile("rb")
        self._read_packet()
        sequence, capabilities = 1, _CAPABILITIES
        if ca is not None:
            capabilities |= Capability.SSL
            plain.sendall(frame(sequence, _login_head(capabilities)))
            context = ssl.create_default_context(cafile=str(ca))
            self._socket = context.wrap_socket(plain, server_hostname="127.0.0.1")
            self._file = self._socket.makefile("rb")
            sequence += 1
        login = _login_head(capabilities) + b"root\0\0mysql_native_password\0"
        self._socket.sendall(frame(sequence, login))
        if self._read_packet()[0] != _OK:
            raise UnexpectedAnswer("root without a password is not let in")
        self._statement_id = -1

    def prepare(self) -> None:
        """From now on `executed` is possible."""
        self._send(MySqlCommand.STMT_PREPARE, _STATEMENT)
        answer = self._read_packet()
        if answer[0] != _OK:
            raise UnexpectedAnswer(f"the statement cannot be prepared: {answer!r}")
        self._statement_id = int.from_bytes(answer[1:5], "little")
        self._read_packet()  # the column
        self._read_packet()  # EOF

    def query_connection_id(self) -> int:
        """The answer to the statement as text."""
        self._send(MySqlCommand.QUERY, _STATEMENT)
        return int(read_lenenc_bytes(self._read_single_row(), 0)[0])

    def execute_connection_id(self) -> int:
        """The same of the prepared statement."""
        self._send(MySqlCommand.STMT_EXECUTE, struct.pack("<IBI", self._statement_id, 0, 1))
        return int.from_bytes(self._read_single_row()[2:], "little")

    def _send(self, command: MySqlCommand, body: bytes) -> None:
        self._socket.sendall(frame(0, bytes((command,)) + body))

    def _read_single_row(self) -> bytes:
        """The only row of a result with one column."""
        if self._read_packet() != b"\x01":
            raise UnexpectedAnswer("the answer does not have one column")
        self._read_packet()  # the column
        self._read_packet()  # EOF
        row = self._read_packet()
        if self._read_packet()[0] != _EOF:
            raise UnexpectedAnswer("the answer does not have one row")
        return row

    def _read_packet(self) -> bytes:
        header = self._read_exactly(4)
        payload = self._read_exactly(int.from_bytes(header[:3], "little"))
        if payload[:1] == bytes((_ERR,)):
            text = payload[3:].decode(errors="replace")
            raise UnexpectedAnswer(f"error {int.from_bytes(payload[1:3], 'little')}: {text}")
        return payload

    def _read_exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise UnexpectedAnswer("the connection has ended")
        return data


def measure(
    session: StopwatchSession, interval: float, prepared: bool, stop_requested: Sequence[object]
) -> list[StatementTiming]:
    """Ask until `ended` is not empty, one statement in `every` seconds."""
    timings: list[StatementTiming] = []
    due, last = time.monotonic(), session.query_connection_id()
    while not stop_requested:
        sent = time.monotonic()
        connection_id = (
            session.execute_connection_id()
            if prepared and len(timings) % 2
            else session.query_connection_id()
        )
        now = time.monotonic()
        timings.append((sent, now - sent, connection_id != last))
        last = connection_id
        due += interval
        if due > now:
            time.sleep(due - now)
        else:
            due = now
    return timings


def _login_head(capabilities: Capability) -> bytes:
    return struct.pack("<IIB23x", capabilities, 1 << 24, _COLLATION)


def main() -> None:
    """Print `ready`, and at the end one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.migration.stopwatch", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--every", type=float, required=True, help="seconds from statement to statement")
    parser.add_argument("--ca", type=Path, help="use TLS, and trust these authorities (PEM)")
    parser.add_argument("--text-only", action="store_true", help="no prepared statements")
    options = parser.parse_args()
    stop_requested: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop_requested.append(number))
    try:
        session = StopwatchSession(options.port, options.ca)
        if not options.text_only:
            session.prepare()
        gc.disable()  # its pauses would be taken for the proxy's
        print(READY_LINE, flush=True)
        timings = measure(session, options.every, not options.text_only, stop_requested)
    except (UnexpectedAnswer, OSError) as error:
        sys.exit(f"stopwatch: {error}")
    print(json.dumps({"asked": timings}))


if __name__ == "__main__":
    main()
