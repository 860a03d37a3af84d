"""Resources of an Envoy with the module: descriptors, threads, memory, connections, sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from tests.support.module.envoy import ModuleEnvoy

MIB = 1024 * 1024
# A bit longer than the module's report interval.
_REPORT_SECONDS = 1.3


@dataclass(frozen=True, slots=True)
class EnvoyUsage:
    """One measurement of an Envoy.

    `allocated_bytes`: memory that Envoy and the module have allocated. `sessions`: the module's counts of
    sessions by state, without states that have no sessions.
    """

    descriptors: int
    threads: int
    resident_bytes: int
    allocated_bytes: int
    client_connections: int
    node_connections: int
    sessions: dict[str, int] = field(default_factory=dict)

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Counts of the resources that must not grow, without memory."""
        return (
            self.descriptors,
            self.threads,
            self.client_connections,
            self.node_connections,
            self.session_count,
        )

    def is_within(self, other: EnvoyUsage) -> bool:
        """Return whether no count exceeds that of `other`, which may include resources being closed."""
        return all(count <= limit for count, limit in zip(self.counts, other.counts, strict=True))

    @property
    def session_count(self) -> int:
        """Number of sessions in any state."""
        return sum(self.sessions.values())

    def __str__(self) -> str:
        return (
            f"{self.descriptors} descriptors, {self.threads} threads,"
            f" connections {self.client_connections} of clients"
            f" and {self.node_connections} to nodes, sessions {self.sessions or 0},"
            f" {self.allocated_bytes / MIB:.2f} MiB allocated, {self.resident_bytes / MIB:.1f} MiB resident"
        )


async def measure_usage(envoy: ModuleEnvoy) -> EnvoyUsage:
    """Measure an Envoy now. The values that its module reports are up to a second old."""
    stats = await envoy.stats(
        r"^(tidevoy\.sessions\.|cluster\.tidb\.upstream_cx_active$)|downstream_cx_active$"
    )
    allocated = await envoy.allocated_bytes()
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
    return EnvoyUsage(
        descriptors=envoy.descriptor_count(),
        threads=len(envoy.thread_names()),
        resident_bytes=psutil.Process(envoy.pid).memory_info().rss,
        allocated_bytes=allocated,
        client_connections=sum(clients),
        node_connections=stats.get("cluster.tidb.upstream_cx_active", 0),
        sessions=sessions,
    )


async def wait_for_usage(
    envoy: ModuleEnvoy, condition: Callable[[EnvoyUsage], bool], seconds: float = 60.0
) -> tuple[EnvoyUsage, bool]:
    """Measure until the condition holds or the timeout expires. Return the last usage and whether it holds.

    The condition must hold in two measurements with a report of the module's gauges between them.
    """
    deadline = time.monotonic() + seconds
    while True:
        result = condition(await measure_usage(envoy))
        await asyncio.sleep(_REPORT_SECONDS)  # There is no event: the module reports periodically.
        usage = await measure_usage(envoy)
        if result and condition(usage):
            return usage, True
        if time.monotonic() > deadline:
            return usage, False
