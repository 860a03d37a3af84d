"""Free TCP ports that stay reserved while a server is down.

The usual way, to bind to port 0 and close the socket, is a race: until the server binds the port, or while it
restarts, the kernel may give the port to an outgoing connection. So this module takes ports from outside the
kernel's ephemeral range. A process claims a port with an abstract Unix socket that is named after the port
and disappears when the process exits. The remaining risk is another program that binds a claimed port.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

_CANDIDATE_PORTS = range(20_000, 60_000)
_EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortTaken(OSError):
    """A specific port that was requested is in use."""


class Ports:
    """Ports claimed by one owner; `close` releases them all."""

    def __init__(self) -> None:
        self._claims: dict[int, socket.socket] = {}

    def allocate(self) -> int:
        """Return a free port on loopback, claimed until `release` or `close`."""
        candidates = _non_ephemeral_ports()
        for _ in range(len(candidates)):
            port = random.choice(candidates)
            if self._try_claim(port):
                return port
        raise OSError("no TCP port is free on this machine")

    def claim(self, port: int) -> int:
        """Claim this port. Raises PortTaken if a process listens on it or has claimed it."""
        if not self._try_claim(port):
            raise PortTaken(f"port {port} is taken")
        return port

    def release(self, port: int) -> None:
        self._claims.pop(port).close()

    def close(self) -> None:
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try_claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):
            claim.bind(f"\0tidevoy/port/{port}")
            if is_port_free(port):
                self._claims[port] = claim
                return True
        claim.close()
        return False


def is_port_free(port: int) -> bool:
    """Return whether no process listens on `port`, on any IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Servers set this option too. With it, a port counts as free even while old connections are closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
        return True


@cache
def _non_ephemeral_ports() -> Sequence[int]:
    low, high = (int(field) for field in _EPHEMERAL_RANGE_FILE.read_text().split())
    return [port for port in _CANDIDATE_PORTS if not low <= port <= high] or _CANDIDATE_PORTS
