"""Drains of a real TiDB server: how fast its sessions move, and what a client notices of it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx2

from bench.load_client import PROGRAM_NAME, LoadClient, SliceRunner
from bench.proxies.contenders import TIDEVOY, Contender, ProxySite
from bench.proxies.pinning import CpuPinning
from bench.proxies.workloads import POINT_SELECT, ROWS
from cli.output import print_note
from sandbox.child_process import ProcessFailed
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
    """Of `drains` drains, each of `sessions` sessions. Rates per second, times in milliseconds.

    `slowest`: of all statements of other sessions at a fixed rate while nodes were drained;
    `slowest_at_rest`: of as many while nothing happened.
    """

    drains: int
    sessions: int
    per_second: float
    slowest: float
    slowest_at_rest: float

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


async def measure(
    contender: Contender,
    site: ProxySite,
    client: LoadClient,
    pinning: CpuPinning | None,
    *,
    sessions: int = SESSIONS,
    drains: int = DRAINS,
    seconds: float = _LOAD_SECONDS,
) -> DrainResult:
    """Start a second TiDB server, then drain both in turn, each beside statements for so many seconds.

    Errors as of `Server.launch`; TimeoutError.
    """
    cluster = site.backend.cluster
    assert cluster is not None
    print_note(f"drains of a TiDB server with {sessions:,} sessions, {drains} times")
    first, second = cluster.tidb[0], cluster.new_node()
    await second.launch()
    async with contender.start(site.for_proxy(f"{TIDEVOY}-moves")) as proxy:
        if pinning is not None:
            pinning.pin_proxies(proxy.processes())
        async with (
            httpx2.AsyncClient(base_url=proxy.api, trust_env=False, timeout=10.0) as api,
            client.idle(proxy.target.port, connections=sessions) as ended,
            client.slices(
                [proxy.target], connections=_CLIENTS, statement=POINT_SELECT, numbers=ROWS // 2
            ) as slices,
        ):
            if pinning is not None:
                pinning.pin_clients(slices.pid)
            trial = _DrainTrial(api, slices, seconds)
            await trial.wait_until(lambda: trial.are_active((first, second)))
            at_rest = [await trial.measure_slowest() for _ in range(drains)]
            # One drain that is not counted puts all sessions on one node.
            await trial.drain(first, counted=False)
            for number in range(drains):
                await trial.drain((second, first)[number % 2])
        if ended[0].errors:
            raise ProcessFailed(PROGRAM_NAME, f"met {ended[0].errors} errors", ended[0].error_text)
    rate, slowest = statistics.median(trial.sessions_per_second), max(trial.slowest_statements)
    return DrainResult(drains, sessions + _CLIENTS, rate, slowest, max(at_rest))


class _DrainTrial:
    def __init__(self, api: httpx2.AsyncClient, slices: SliceRunner, seconds: float) -> None:
        self.sessions_per_second: list[float] = []
        self.slowest_statements: list[float] = []
        self._api, self._slices, self._seconds = api, slices, seconds

    async def measure_slowest(self) -> float:
        """The slowest statement of some seconds."""
        taken = await self._slices.run(0, self._seconds, rate=_STATEMENTS_PER_SECOND)
        return max(taken.latencies)

    async def drain(self, node: Tidb, *, counted: bool = True) -> None:
        """Drain a node beside statements, then return it to service."""
        try:
            async with asyncio.TaskGroup() as group:
                slowest = group.create_task(self.measure_slowest())
                sessions = await _count_connections(node)
                begin = time.monotonic()
                (await self._api.post(f"/v1/nodes/{node.address}/drain", json={})).raise_for_status()
                await self.wait_until(lambda: _is_empty(node))
                seconds = time.monotonic() - begin
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if seconds > self._seconds:
            raise TimeoutError  # no statements were sent at its end
        if counted:
            self.sessions_per_second.append(sessions / seconds)
            self.slowest_statements.append(slowest.result())
        (await self._api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()
        await self.wait_until(lambda: self.are_active((node,)))

    async def are_active(self, nodes: tuple[Tidb, ...]) -> bool:
        """Whether these nodes may get sessions."""
        found = (await self._api.get("/v1/nodes")).raise_for_status().json()["nodes"]
        states = {each["address"]: each["state"] for each in found}
        return all(states.get(node.address) == "active" for node in nodes)

    async def wait_until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Return when it holds. TimeoutError."""
        async with asyncio.timeout(_STEP_TIMEOUT_SECONDS):
            while not await condition():  # noqa: ASYNC110 - TiDB sends no event
                await asyncio.sleep(_POLL_SECONDS)


async def _count_connections(node: Tidb) -> int:
    """TiDB's own count of its sessions."""
    async with httpx2.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{node.status_port}/status")
    return int(answer.raise_for_status().json()["connections"])


async def _is_empty(node: Tidb) -> bool:
    return await _count_connections(node) == 0
