"""Measure drains of a real TiDB server: session migrations per second, and the slowest statement."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx2

from bench.load_client import SliceRunner
from bench.proxies.contenders import Contender
from bench.proxies.setup import ProxyBenchSetup
from bench.proxies.workloads import ProxyWorkload
from cli.output import print_note
from sandbox.tidb import Tidb

SESSIONS = 1_000
DRAINS = 6
_CLIENTS = 16
_STATEMENTS_PER_SECOND = 500.0
_LOAD_SECONDS = 10.0
_STEP_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class DrainResult:
    """The result of `drains` drains of `sessions` sessions each. Times are in milliseconds.

    `per_second`: sessions migrated per second, the median; `slowest`: slowest statement of other sessions
    during the drains; `slowest_at_rest`: slowest such statement without drains.
    """

    drains: int
    sessions: int
    per_second: float
    slowest: float
    slowest_at_rest: float


async def measure(
    contender: Contender,
    bench: ProxyBenchSetup,
    *,
    sessions: int = SESSIONS,
    drains: int = DRAINS,
    seconds: float = _LOAD_SECONDS,
) -> DrainResult:
    """Start a second TiDB server, then drain both alternately. Each drain happens during `seconds` of load.

    Raises the errors of `Server.launch` and TimeoutError.
    """
    cluster = bench.site.backend.cluster
    assert cluster is not None
    print_note(f"drains of a TiDB server with {sessions:,} sessions, {drains} times")
    first, second = cluster.tidb[0], cluster.new_node()
    await second.launch()
    async with bench.run([contender]) as proxies:
        proxy = proxies[contender.name]
        async with (
            httpx2.AsyncClient(base_url=proxy.api, trust_env=False, timeout=10.0) as api,
            bench.client.keep_idle(proxy.target.port, connections=sessions) as idle_results,
            bench.connect(ProxyWorkload("point select", _CLIENTS), [proxy]) as slices,
        ):
            trial = _DrainTrial(api, slices, seconds)
            await trial.wait_until(lambda: trial.are_active(first, second))
            at_rest = [await trial.measure_slowest() for _ in range(drains)]
            # The first drain only moves all sessions to one node; its result is ignored.
            await trial.drain(first)
            results = [await trial.drain((second, first)[number % 2]) for number in range(drains)]
        idle_results[0].raise_for_errors()
    rates, slowest = zip(*results, strict=True)
    return DrainResult(drains, sessions + _CLIENTS, statistics.median(rates), max(slowest), max(at_rest))


class _DrainTrial:
    def __init__(self, api: httpx2.AsyncClient, slices: SliceRunner, seconds: float) -> None:
        self._api, self._slices, self._seconds = api, slices, seconds

    async def measure_slowest(self) -> float:
        result = await self._slices.run(0, self._seconds, rate=_STATEMENTS_PER_SECOND)
        return max(result.latencies)

    async def drain(self, node: Tidb) -> tuple[float, float]:
        """Drain a node while statements run, then undrain it.

        Return the number of sessions migrated per second and the latency of the slowest statement.
        """
        try:
            async with asyncio.TaskGroup() as group:
                slowest = group.create_task(self.measure_slowest())
                sessions = await _count_connections(node)
                start = time.monotonic()
                (await self._api.post(f"/v1/nodes/{node.address}/drain", json={})).raise_for_status()
                await self.wait_until(lambda: _is_empty(node))
                seconds = time.monotonic() - start
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if seconds > self._seconds:
            raise TimeoutError  # the statements ended before the drain
        (await self._api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()
        await self.wait_until(lambda: self.are_active(node))
        return sessions / seconds, slowest.result()

    async def are_active(self, *nodes: Tidb) -> bool:
        response = (await self._api.get("/v1/nodes")).raise_for_status()
        states = {node["address"]: node["state"] for node in response.json()["nodes"]}
        return all(states.get(node.address) == "active" for node in nodes)

    async def wait_until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Return when the condition is true. Raises TimeoutError."""
        async with asyncio.timeout(_STEP_TIMEOUT_SECONDS):
            while not await condition():  # noqa: ASYNC110 - TiDB sends no event
                await asyncio.sleep(_POLL_SECONDS)


async def _count_connections(node: Tidb) -> int:
    """Return TiDB's own session count."""
    async with httpx2.AsyncClient(trust_env=False) as client:
        response = await client.get(f"http://127.0.0.1:{node.status_port}/status")
    return int(response.raise_for_status().json()["connections"])


async def _is_empty(node: Tidb) -> bool:
    return await _count_connections(node) == 0
