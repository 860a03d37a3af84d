"""Resolves the host names of nodes to IP addresses periodically.

EDS must contain only literal IPs: Envoy rejects the whole resource if it contains a name. If a name cannot be
resolved any more, its last IP stays, so that nodes serve during a DNS outage.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Callable, Iterable, Sequence

from controlplane.aio import KeyedTasks, ThreadPool
from controlplane.model.nodes import Resolution

Lookup = Callable[[str], Sequence[str]]

_THREADS = ThreadPool("dns", 4)


def system_lookup(host: str) -> Sequence[str]:
    """Return all literal IPs of a name from the system's resolver. Raises OSError or UnicodeError."""
    answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(answer[4][0]) for answer in answers]


def choose_address(answers: Iterable[str], current: str | None) -> str | None:
    """Return `current` if the answers contain it, else the lowest IP, IPv4 first; None if none is usable.

    Link-local IPv6 addresses are unusable: they name an interface of this machine (`fe80::1%eth0`).
    """
    usable = [ipaddress.ip_address(answer) for answer in answers if "%" not in answer]
    if any(str(ip) == current for ip in usable):
        return current
    return str(min(usable, key=lambda ip: (ip.version, int(ip)))) if usable else None


class Resolver:
    """Refreshes the addresses of a set of host names and publishes each change."""

    def __init__(
        self,
        publish: Callable[[Resolution], None],
        *,
        lookup: Lookup = system_lookup,
        interval: float = 5.0,
    ) -> None:
        """`interval`: seconds between two lookups of a name. `lookup` may block; tests replace it."""
        self._publish = publish
        self._lookup = lookup
        self._interval = interval
        self._hosts: frozenset[str] = frozenset()
        self._tasks = KeyedTasks[str]("dns")

    def set_hosts(self, hosts: Iterable[str]) -> None:
        """Replace the set of names; a new name is looked up at once."""
        self._hosts = frozenset(hosts)
        for host in self._tasks.running_keys() - self._hosts:
            self._tasks.cancel(host)
        for host in self._hosts:
            self._tasks.start(host, self._refresh_loop, host)

    async def run(self) -> None:
        """Look up names until cancelled."""
        await self._tasks.run(lambda: self.set_hosts(self._hosts))

    async def _refresh_loop(self, host: str) -> None:
        published: Resolution | None = None
        while True:
            resolution = await self._resolve(host, published.ip if published else None)
            if resolution != published:
                published = resolution
                self._publish(resolution)
            # Jitter spreads the lookups of names that were added together.
            await asyncio.sleep(self._interval * random.uniform(0.8, 1.0))

    async def _resolve(self, host: str, current: str | None) -> Resolution:
        try:
            ip = choose_address(await _THREADS.run(self._lookup, host), current)
            problem = "" if ip else "the answer contains no address that Envoys can use"
        except OSError as error:
            ip, problem = None, error.strerror or str(error)
        except UnicodeError:
            ip, problem = None, "it is not a valid host name"
        if ip is not None:
            return Resolution(host, ip)
        remedy = f"its last address {current} stays in use" if current else "correct the name or DNS"
        return Resolution(host, current, f"the name {host} cannot be resolved ({problem}); {remedy}")
