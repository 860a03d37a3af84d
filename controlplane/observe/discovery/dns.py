"""Resolves the host names of nodes to IP addresses periodically.

EDS carries literal IPs only (Envoy rejects the whole resource because of one name), so the control plane
resolves names. A name that stops resolving keeps its last IP: a DNS outage must not stop nodes from serving.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from controlplane.model.nodes import Resolution

Lookup = Callable[[str], Awaitable[Sequence[str]]]

# A lookup that hangs occupies a thread of the loop's default executor, which has at least five threads.
# Writing intents to disk uses the executor too, so one thread must stay free.
_MAX_PARALLEL_LOOKUPS = 4


async def system_lookup(host: str) -> Sequence[str]:
    """Return all literal IPs of a name from the system's resolver. Raises OSError or UnicodeError."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(answer[4][0]) for answer in answers]


def choose_address(answers: Iterable[str], current: str | None) -> str | None:
    """Choose the current address if the answers contain it, else the lowest, IPv4 first; None: none usable.

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
        """`interval`: seconds between two lookups of one name; tests replace `lookup`."""
        self._publish = publish
        self._lookup = lookup
        self._interval = interval
        self._lookup_slots = asyncio.Semaphore(_MAX_PARALLEL_LOOKUPS)
        self._hosts: frozenset[str] = frozenset()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    def set_hosts(self, hosts: Iterable[str]) -> None:
        """Replace the set of names; a new name is looked up at once."""
        self._hosts = frozenset(hosts)
        for host in self._tasks.keys() - self._hosts:
            self._tasks.pop(host).cancel()
        if self._group is not None:
            for host in self._hosts - self._tasks.keys():
                self._tasks[host] = self._group.create_task(self._refresh_loop(host), name=f"dns {host}")

    async def run(self) -> None:
        """Look names up until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                self.set_hosts(self._hosts)
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None
                self._tasks.clear()

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
        async with self._lookup_slots:
            try:
                ip = choose_address(await self._lookup(host), current)
                problem = "" if ip else "the answer contains no address that Envoys can use"
            except OSError as error:
                ip, problem = None, error.strerror or str(error)
            except UnicodeError:
                ip, problem = None, "it is not a valid host name"
        if ip is not None:
            return Resolution(host, ip)
        remedy = f"its last address {current} stays in use" if current else "correct the name or DNS"
        return Resolution(host, current, f"the name {host} cannot be resolved ({problem}); {remedy}")
