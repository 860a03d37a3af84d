"""Free TCP ports that stay reserved while a server is down.

Asking the kernel for a port (bind to port 0) and closing the socket is a race: until the server binds the
port, and at each restart of the server, any outgoing connection may be given the same port. So ports are
taken from outside the kernel's ephemeral range, where no connection lands by chance, and are claimed among
the processes of this machine by one abstract Unix socket per port, which vanishes with the process that holds
it. The remaining risk is a foreign server that picks exactly this fixed port in the short time before ours
binds it.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
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
        for port in random.sample(candidates, len(candidates)):
            if self._try_claim(port):
                return port
        raise OSError("no TCP port is free on this machine")

    def claim(self, port: int) -> int:
        """Claim `port` itself. Raises PortTaken if a process listens on it or has claimed it."""
        if not self._try_claim(port):
            raise PortTaken(f"port {port} is taken")
        return port

    def release(self, port: int) -> None:
        """Release one port."""
        self._claims.pop(port).close()

    def close(self) -> None:
        """Release all ports."""
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _try_claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0tidevoy/port/{port}")
        except OSError:
            claim.close()
            return False
        if not is_port_free(port):
            claim.close()
            return False
        self._claims[port] = claim
        return True


def is_port_free(port: int) -> bool:
    """Return whether nothing listens on `port`, on any IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # With the option that servers set: a port that only has closing connections is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
        return True


def _non_ephemeral_ports() -> Sequence[int]:
    low, high = (int(field) for field in _EPHEMERAL_RANGE_FILE.read_text().split())
    return [port for port in _CANDIDATE_PORTS if not low <= port <= high] or _CANDIDATE_PORTS
