"""Wrong tokens, as fast as one core can send them: `python -m bench.flood HOST:PORT WAY`, until it is ended.

WAY: `one` sends all from one address, `many` each connection from another one, and `kept` as `many`, but each
connection begins with a request that needs no token. What came of it stands on standard output at the end.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import select
import signal
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from controlplane import address as addresses

_AT_ONCE = 256  # connections that are under way
_UNHEARD = 0.003  # seconds without an answer to the first packet, after which another connection is tried
_UNANSWERED = 0.5  # seconds without an answer to a request
ONE = "127.0.0.2"
_OPEN_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
WAYS = ("one", "many", "kept")


@dataclass(slots=True)
class _Attempt:
    socket: socket.socket
    until: float
    is_connected: bool = False
    is_greeted: bool = False  # the request without a token has had its answer
    heard: bytearray = field(default_factory=bytearray)


class Flood:
    """Connections that are begun again as soon as they end."""

    def __init__(self, target: tuple[str, int], way: str) -> None:
        self._target, self._way = target, way
        self._poll = select.epoll()
        self._attempts: dict[int, _Attempt] = {}
        self.counts: Counter[str] = Counter()
        self.is_over = False

    def run(self) -> None:
        """Until `is_over`."""
        while not self.is_over:
            while len(self._attempts) < _AT_ONCE and not self.is_over:
                self._begin()
            for descriptor, _ in self._poll.poll(_UNHEARD):
                with contextlib.suppress(KeyError):
                    self._go_on(self._attempts[descriptor])
            now = time.monotonic()
            for attempt in [each for each in self._attempts.values() if each.until < now]:
                self._end(attempt, "unanswered" if attempt.is_connected else "unheard")

    def _begin(self) -> None:
        client = socket.socket()
        client.setblocking(False)
        try:
            client.bind((ONE if self._way == "one" else _somewhere(), 0))
            client.connect_ex(self._target)
        except OSError:
            client.close()
            self.counts["no_port"] += 1
            return
        self._attempts[client.fileno()] = _Attempt(client, time.monotonic() + _UNHEARD)
        self._poll.register(client, select.EPOLLOUT)

    def _go_on(self, attempt: _Attempt) -> None:
        try:
            if not attempt.is_connected:
                if attempt.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return self._end(attempt, "refused_connections")
                attempt.is_connected = True
                attempt.until = time.monotonic() + _UNANSWERED
                self._poll.modify(attempt.socket, select.EPOLLIN)
                attempt.socket.send(_OPEN_REQUEST if self._way == "kept" else _wrong())
                return None
            if not (data := attempt.socket.recv(65_536)):
                return self._end(attempt, "answered" if b" 401 " in attempt.heard else "closed")
            attempt.heard += data
            if self._way == "kept" and not attempt.is_greeted and b"}" in attempt.heard:
                attempt.is_greeted = True
                attempt.heard.clear()
                attempt.socket.send(_wrong())
        except OSError:
            self._end(attempt, "answered" if b" 401 " in attempt.heard else "closed")
        return None

    def _end(self, attempt: _Attempt, outcome: str) -> None:
        self.counts[outcome] += 1
        del self._attempts[attempt.socket.fileno()]
        attempt.socket.close()


def _wrong() -> bytes:
    return (
        f"GET /v1/nodes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer tvy_{secrets.token_urlsafe(32)}\r\n\r\n"
    ).encode()


def _somewhere() -> str:
    return f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"


def main() -> None:
    """The program."""
    flood = Flood(addresses.split(sys.argv[1]), sys.argv[2])

    def end(*_: object) -> None:
        flood.is_over = True

    signal.signal(signal.SIGTERM, end)
    flood.run()
    print(json.dumps(dict(flood.counts)))


if __name__ == "__main__":
    main()
