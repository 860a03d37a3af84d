"""One session that sends a small statement repeatedly and measures each latency.

`python -m bench.migration.stopwatch` is a separate program, so that nothing else in a benchmark delays it. It
queries CONNECTION_ID(), alternately as text and as a prepared statement: a changed value shows that the
session has migrated. SIGTERM stops it; it prints its measurements as the last line.
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
_ANSWER_TIMEOUT_SECONDS = 60.0  # for one response


StatementTiming = tuple[float, float, bool]
"""When a statement was sent (time.monotonic), its latency in seconds, and whether the session has migrated
since the previous response."""


class UnexpectedAnswer(Exception):
    """The server sent an unexpected response, or closed the connection."""


class StopwatchSession:
    """A session of root without a password. All methods raise OSError or UnexpectedAnswer."""

    def __init__(self, port: int, ca: Path | None) -> None:
        plain = socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_TIMEOUT_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket: socket.socket = plain
        # The buffered reader reads nothing beyond the greeting: the server then waits for the client.
        self._file: BinaryIO = plain.makefile("rb")
        self._read_packet()
        sequence, capabilities = 1, _CAPABILITIES
        if ca is not None:
            capabilities |= Capability.SSL
            plain.sendall(frame(sequence, _login_header(capabilities)))
            context = ssl.create_default_context(cafile=str(ca))
            self._socket = context.wrap_socket(plain, server_hostname="127.0.0.1")
            self._file = self._socket.makefile("rb")
            sequence += 1
        login = _login_header(capabilities) + b"root\0\0mysql_native_password\0"
        self._socket.sendall(frame(sequence, login))
        if self._read_packet()[0] != _OK:
            raise UnexpectedAnswer("the server does not admit root without a password")
        self._statement_id = -1

    def prepare(self) -> None:
        """Prepare the statement for `execute_connection_id`."""
        self._send(MySqlCommand.STMT_PREPARE, _STATEMENT)
        response = self._read_packet()
        if response[0] != _OK:
            raise UnexpectedAnswer(f"the statement cannot be prepared: {response!r}")
        self._statement_id = int.from_bytes(response[1:5], "little")
        self._read_packet()  # the column
        self._read_packet()  # EOF

    def query_connection_id(self) -> int:
        """Run the text statement and return the connection id."""
        self._send(MySqlCommand.QUERY, _STATEMENT)
        return int(read_lenenc_bytes(self._read_single_row(), 0)[0])

    def execute_connection_id(self) -> int:
        """Run the prepared statement and return the connection id."""
        self._send(MySqlCommand.STMT_EXECUTE, struct.pack("<IBI", self._statement_id, 0, 1))
        return int.from_bytes(self._read_single_row()[2:], "little")

    def _send(self, command: MySqlCommand, body: bytes) -> None:
        self._socket.sendall(frame(0, bytes((command,)) + body))

    def _read_single_row(self) -> bytes:
        """Read a result with one column and one row, and return the row."""
        if self._read_packet() != b"\x01":
            raise UnexpectedAnswer("the result does not have one column")
        self._read_packet()  # the column
        self._read_packet()  # EOF
        row = self._read_packet()
        if self._read_packet()[0] != _EOF:
            raise UnexpectedAnswer("the result does not have one row")
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
            raise UnexpectedAnswer("the server has closed the connection")
        return data


def measure(
    session: StopwatchSession, interval: float, prepared: bool, stop_requested: Sequence[object]
) -> list[StatementTiming]:
    """Send one statement per `interval` seconds until `stop_requested` is not empty."""
    timings: list[StatementTiming] = []
    due, last_id = time.monotonic(), session.query_connection_id()
    while not stop_requested:
        sent_at = time.monotonic()
        connection_id = (
            session.execute_connection_id()
            if prepared and len(timings) % 2
            else session.query_connection_id()
        )
        now = time.monotonic()
        timings.append((sent_at, now - sent_at, connection_id != last_id))
        last_id = connection_id
        due += interval
        if due > now:
            time.sleep(due - now)
        else:
            due = now
    return timings


def _login_header(capabilities: Capability) -> bytes:
    return struct.pack("<IIB23x", capabilities, 1 << 24, _COLLATION)


def main() -> None:
    """Run the stopwatch: print `ready`, and at the end one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.migration.stopwatch", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--every", type=float, required=True, help="seconds between two statements")
    parser.add_argument("--ca", type=Path, help="use TLS and trust this CA file (PEM)")
    parser.add_argument("--text-only", action="store_true", help="no prepared statements")
    options = parser.parse_args()
    stop_requested: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop_requested.append(number))
    try:
        session = StopwatchSession(options.port, options.ca)
        if not options.text_only:
            session.prepare()
        gc.disable()  # its pauses would be attributed to the proxy
        print(READY_LINE, flush=True)
        timings = measure(session, options.every, not options.text_only, stop_requested)
    except (UnexpectedAnswer, OSError) as error:
        sys.exit(f"stopwatch: {error}")
    print(json.dumps({"asked": timings}))


if __name__ == "__main__":
    main()
