"""What an Envoy with the module holds: descriptors, threads, memory, connections, sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from tests.support.module.envoy import Envoy

MIB = 1024 * 1024
# A bit more than the time between two reports of the module.
_REPORT = 1.3


@dataclass(frozen=True, slots=True)
class Figures:
    """One look at an Envoy.

    `allocated`: bytes that live in its allocator, which the module shares. `resident`: bytes of memory.
    `sessions`: by state, as the module counts them, states without any left out.
    """

    descriptors: int
    threads: int
    resident: int
    allocated: int
    clients: int
    nodes: int
    sessions: dict[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> tuple[int, int, int, int, int]:
        """What must not become more, and is no memory."""
        return self.descriptors, self.threads, self.clients, self.nodes, self.total

    def within(self, other: Figures) -> bool:
        """Whether no more is held than `other` held: that may have counted what was just being closed."""
        return all(now <= then for now, then in zip(self.holds, other.holds, strict=True))

    @property
    def total(self) -> int:
        """Sessions of any state."""
        return sum(self.sessions.values())

    def __str__(self) -> str:
        return (
            f"{self.descriptors} descriptors, {self.threads} threads, connections {self.clients} of clients"
            f" and {self.nodes} to nodes, sessions {self.sessions or 0},"
            f" {self.allocated / MIB:.2f} MiB allocated, {self.resident / MIB:.1f} MiB resident"
        )


async def look(envoy: Envoy) -> Figures:
    """The figures now. Those of the module are up to a second old."""
    stats = await envoy.stats(
        r"^(tidevoy\.sessions\.|cluster\.tidb\.upstream_cx_active$)|downstream_cx_active$"
    )
    allocated = await envoy.memory()
    sessions = {
        name.rsplit(".", 1)[1]: value
        for name, value in stats.items()
        if name.startswith("tidevoy.sessions.") and value
    }
    clients = [
        value
        for name, value in stats.items()
        if name.startswith("listener.127")
        and name.endswith("downstream_cx_active")
        and ".worker_" not in name
    ]
    return Figures(
        descriptors=envoy.descriptors(),
        threads=len(envoy.threads()),
        resident=psutil.Process(envoy.pid).memory_info().rss,
        allocated=allocated,
        clients=sum(clients),
        nodes=stats.get("cluster.tidb.upstream_cx_active", 0),
        sessions=sessions,
    )


async def until(
    envoy: Envoy, condition: Callable[[Figures], bool], seconds: float = 60.0
) -> tuple[Figures, bool]:
    """Look until the condition holds, or the time is up; the last look, and whether it held.

    It has to hold twice, and the module has told its gauges in between.
    """
    deadline = time.monotonic() + seconds
    while True:
        held = condition(await look(envoy))
        await asyncio.sleep(_REPORT)  # there is no event: the module tells them by the clock
        now = await look(envoy)
        if held and condition(now):
            return now, True
        if time.monotonic() > deadline:
            return now, False
