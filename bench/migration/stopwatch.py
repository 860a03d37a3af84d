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

from sandbox.tidb_sim.packets import Capability, Command, frame, read_lenenc_bytes

READY = "ready"
_STATEMENT = b"select connection_id()"
_CLAIMED = (
    Capability.LONG_PASSWORD
    | Capability.PROTOCOL_41
    | Capability.TRANSACTIONS
    | Capability.SECURE_CONNECTION
    | Capability.PLUGIN_AUTH
)
_COLLATION = 45  # utf8mb4_general_ci
_OK, _ERR, _EOF = 0x00, 0xFF, 0xFE
_PATIENCE = 60.0  # seconds for one answer


Timed = tuple[float, float, bool]
"""When a statement was sent (time.monotonic), how long its answer took (seconds), and whether the session was
elsewhere when the one before was answered."""


class Broken(Exception):
    """The server said what it must not say, or has gone."""


class Session:
    """Logged in as root, who has no password. OSError, Broken."""

    def __init__(self, port: int, trusted: Path | None) -> None:
        plain = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket: socket.socket = plain
        # Not one byte more than the greeting is read before TLS begins: the server waits behind it.
        self._file: BinaryIO = plain.makefile("rb")
        self._packet()
        sequence, claimed = 1, _CLAIMED
        if trusted is not None:
            claimed |= Capability.SSL
            plain.sendall(frame(sequence, _head(claimed)))
            context = ssl.create_default_context(cafile=str(trusted))
            self._socket = context.wrap_socket(plain, server_hostname="127.0.0.1")
            self._file = self._socket.makefile("rb")
            sequence += 1
        login = _head(claimed) + b"root\0\0mysql_native_password\0"
        self._socket.sendall(frame(sequence, login))
        if self._packet()[0] != _OK:
            raise Broken("root without a password is not let in")
        self._number = -1

    def prepare(self) -> None:
        """From now on `executed` is possible."""
        self._send(Command.STMT_PREPARE, _STATEMENT)
        answer = self._packet()
        if answer[0] != _OK:
            raise Broken(f"the statement cannot be prepared: {answer!r}")
        self._number = int.from_bytes(answer[1:5], "little")
        self._packet()  # the column
        self._packet()  # EOF

    def asked(self) -> int:
        """The answer to the statement as text."""
        self._send(Command.QUERY, _STATEMENT)
        return int(read_lenenc_bytes(self._row(), 0)[0])

    def executed(self) -> int:
        """The same of the prepared statement."""
        self._send(Command.STMT_EXECUTE, struct.pack("<IBI", self._number, 0, 1))
        return int.from_bytes(self._row()[2:], "little")

    def _send(self, command: Command, body: bytes) -> None:
        self._socket.sendall(frame(0, bytes((command,)) + body))

    def _row(self) -> bytes:
        """The only row of a result with one column."""
        if self._packet() != b"\x01":
            raise Broken("the answer does not have one column")
        self._packet()  # the column
        self._packet()  # EOF
        row = self._packet()
        if self._packet()[0] != _EOF:
            raise Broken("the answer does not have one row")
        return row

    def _packet(self) -> bytes:
        header = self._exactly(4)
        payload = self._exactly(int.from_bytes(header[:3], "little"))
        if payload[:1] == bytes((_ERR,)):
            text = payload[3:].decode(errors="replace")
            raise Broken(f"error {int.from_bytes(payload[1:3], 'little')}: {text}")
        return payload

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise Broken("the connection has ended")
        return data


def measure(session: Session, every: float, prepared: bool, ended: Sequence[object]) -> list[Timed]:
    """Ask until `ended` is not empty, one statement in `every` seconds."""
    asked: list[Timed] = []
    due, last = time.monotonic(), session.asked()
    while not ended:
        sent = time.monotonic()
        here = session.executed() if prepared and len(asked) % 2 else session.asked()
        now = time.monotonic()
        asked.append((sent, now - sent, here != last))
        last = here
        due += every
        if due > now:
            time.sleep(due - now)
        else:
            due = now
    return asked


def _head(claimed: Capability) -> bytes:
    return struct.pack("<IIB23x", claimed, 1 << 24, _COLLATION)


def main() -> None:
    """Print `ready`, and at the end one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.migration.stopwatch", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--every", type=float, required=True, help="seconds from statement to statement")
    parser.add_argument("--ca", type=Path, help="use TLS, and trust these authorities (PEM)")
    parser.add_argument("--text-only", action="store_true", help="no prepared statements")
    options = parser.parse_args()
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    try:
        session = Session(options.port, options.ca)
        if not options.text_only:
            session.prepare()
        gc.disable()  # its pauses would be taken for the proxy's
        print(READY, flush=True)
        asked = measure(session, options.every, not options.text_only, ended)
    except (Broken, OSError) as error:
        sys.exit(f"stopwatch: {error}")
    print(json.dumps({"asked": asked}))


if __name__ == "__main__":
    main()
