"""A cluster behind several real Envoys, and the session counts of its nodes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from controlplane.model.nodes import EMPTY_MAP
from sandbox.local_cluster import LocalCluster, WaitTimeout
from sandbox.mariadb import MariaDb
from sandbox.server import http_client
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb import Tidb
from tests.support.e2e.cluster import is_up_to_date, run_another_envoy
from tests.support.e2e.pinging_clients import PingingClients
from tests.support.module.bootstrap import require_module

_WAIT_TIMEOUT_SECONDS = 30.0
_STABLE_SECONDS = 1.5
"""How long counts must meet a condition: during a migration, both nodes count the session."""


@dataclass
class BalancedCluster:
    """A cluster, and the port of each of its Envoys."""

    stack: LocalCluster
    ports: list[int]
    status_client: httpx2.AsyncClient
    settled_at: float = 0.0
    """Monotonic time at which the last awaited condition became true."""

    async def node_connections(self) -> dict[str, int]:
        """Return each node's own count of its clients, including direct clients."""
        nodes = self.stack.tidb
        pages = await asyncio.gather(*(self.status_client.get(f"{node.status_url}/status") for node in nodes))
        return {
            node.address: page.raise_for_status().json()["connections"]
            for node, page in zip(nodes, pages, strict=True)
        }

    async def is_reported(self, clients: PingingClients) -> bool:
        """Return whether the control plane's counts equal the nodes' own counts and include all clients."""
        shown = {address: node["connections"] for address, node in (await self.stack.nodes()).items()}
        return shown == await self.node_connections() and sum(shown.values()) == len(clients.clients)

    async def set_node_metrics(self, node: Tidb, **values: float) -> None:
        """Set the metrics that a node reports (sandbox/tidb_sim/simulated_metrics.py)."""
        (await self.status_client.post(f"{node.status_url}/sim/metrics", json=values)).raise_for_status()

    async def wait_for_counts(
        self,
        condition: Callable[[Mapping[str, int]], bool],
        what: str,
        seconds: float = _WAIT_TIMEOUT_SECONDS,
    ) -> dict[str, int]:
        """Wait until the nodes' counts have met the condition for _STABLE_SECONDS. Return these counts."""
        counts: dict[str, int] = {}
        since = math.inf

        async def is_stable() -> bool:
            nonlocal since
            counts.update(await self.node_connections())
            since = min(since, time.monotonic()) if condition(counts) else math.inf
            return time.monotonic() - since >= _STABLE_SECONDS

        try:
            await self.stack.wait_until(is_stable, what, seconds)
        except WaitTimeout as timeout:
            raise AssertionError(f"{timeout}; the nodes have {counts}") from timeout
        self.settled_at = since
        return counts


@asynccontextmanager
async def run_balanced_cluster(
    directory: Path,
    mariadb: MariaDb,
    signing: SessionCertificate,
    *,
    nodes: int,
    envoys: int,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[BalancedCluster]:
    """Run a cluster with all nodes in service, sessions that can migrate, and Envoys with one worker each."""
    start = LocalCluster.start(
        directory,
        nodes=nodes,
        mariadb=mariadb,
        node_arguments=signing.arguments,
        settings=settings,
        concurrency=1,
        module=require_module(),
    )
    async with start as stack, AsyncExitStack() as exit_stack:
        await stack.wait_until(
            lambda: is_up_to_date(stack, "envoy-1"), "the Envoy to be up to date", _WAIT_TIMEOUT_SECONDS
        )
        ports = [stack.sql_port]
        for number in range(2, envoys + 1):
            other = run_another_envoy(stack, f"envoy-{number}", module=require_module())
            ports.append(await exit_stack.enter_async_context(other))
        status_client = await exit_stack.enter_async_context(http_client(timeout=5.0))
        yield BalancedCluster(stack, ports, status_client)
        assert stack.violations() == []


def imbalance(counts: Mapping[str, int]) -> float:
    """Return the count of the fullest node, divided by the mean."""
    return max(counts.values()) * len(counts) / sum(counts.values())


def is_fair(counts: Mapping[str, int], weights: Mapping[str, float] = EMPTY_MAP) -> bool:
    """Return whether each node's count differs from its share by at most one session."""
    capacities = {address: weights.get(address, 1.0) for address in counts}
    level = sum(counts.values()) / sum(capacities.values())
    return all(abs(count - level * capacities[address]) <= 1 for address, count in counts.items())
