"""A cluster behind several real Envoys, and what its nodes themselves count."""

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

from controlplane.model.nodes import NOTHING
from sandbox.local_cluster import NotInTime, Stack
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb import Tidb
from tests.support.e2e.client_crowd import Crowd
from tests.support.e2e.cluster import another_envoy, follows
from tests.support.module.bootstrap import found

_SECONDS = 30.0
_LASTING = 1.5
"""Seconds for which a balance has to last: a session counts at both nodes while it moves."""


@dataclass
class Site:
    """A cluster, and the port of each of its Envoys."""

    stack: Stack
    ports: list[int]
    asking: httpx2.AsyncClient
    settled_at: float = 0.0
    """Since when (monotonic) that has been so which was waited for last."""

    async def counts(self) -> dict[str, int]:
        """The clients of each node, direct ones too, as the node itself counts them."""
        nodes = self.stack.tidb
        pages = await asyncio.gather(*(self.asking.get(f"{node.status}/status") for node in nodes))
        return {
            node.address: page.raise_for_status().json()["connections"]
            for node, page in zip(nodes, pages, strict=True)
        }

    async def shows(self, people: Crowd) -> bool:
        """Whether the control plane knows of all clients, at the nodes where they are."""
        shown = {address: node["connections"] for address, node in (await self.stack.nodes()).items()}
        return shown == await self.counts() and sum(shown.values()) == len(people.clients)

    async def show(self, node: Tidb, **vitals: float) -> None:
        """Make a node look so from now on (sandbox/tidb_sim/simulated_metrics.py)."""
        (await self.asking.post(f"{node.status}/sim/vitals", json=vitals)).raise_for_status()

    async def until(
        self, holds: Callable[[Mapping[str, int]], bool], what: str, seconds: float = _SECONDS
    ) -> dict[str, int]:
        """Wait until what the nodes count is so, and stays so; what they count then."""
        seen: dict[str, int] = {}
        since = math.inf

        async def lasts() -> bool:
            nonlocal since
            seen.update(await self.counts())
            since = min(since, time.monotonic()) if holds(seen) else math.inf
            return time.monotonic() - since >= _LASTING

        try:
            await self.stack.wait_until(lasts, what, seconds)
        except NotInTime as never:
            raise AssertionError(f"{never}; the nodes have {seen}") from never
        self.settled_at = since
        return seen


@asynccontextmanager
async def site(
    directory: Path,
    mariadb: MariaDb,
    signing: SessionCertificate,
    *,
    nodes: int,
    envoys: int,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[Site]:
    """All nodes are in service, sessions can move between them; all Envoys serve, with one worker each."""
    start = Stack.start(
        directory,
        nodes=nodes,
        mariadb=mariadb,
        node_arguments=signing.arguments,
        settings=settings,
        concurrency=1,
        module=found(),
    )
    async with start as stack, AsyncExitStack() as more:
        await stack.wait_until(lambda: follows(stack, "envoy-1"), "the Envoy to follow", _SECONDS)
        ports = [stack.sql_port]
        for number in range(2, envoys + 1):
            other = another_envoy(stack, f"envoy-{number}", module=found())
            ports.append(await more.enter_async_context(other))
        asking = await more.enter_async_context(httpx2.AsyncClient(trust_env=False, timeout=5.0))
        yield Site(stack, ports, asking)
        assert stack.violations() == []


def unevenness(counts: Mapping[str, int]) -> float:
    """What the fullest node has, over the mean."""
    return max(counts.values()) * len(counts) / sum(counts.values())


def is_fair(counts: Mapping[str, int], weights: Mapping[str, float] = NOTHING) -> bool:
    """Whether each node has its share, to one session: what has moved stays for a minute."""
    widths = {address: weights.get(address, 1.0) for address in counts}
    level = sum(counts.values()) / sum(widths.values())
    return all(abs(count - level * widths[address]) <= 1 for address, count in counts.items())
