"""How long a change takes until Envoy runs with it: a drain by REST beside load, and a new node in etcd.

The real stack: etcd, a `tidevoy serve` child, Envoy, TiDB stand-ins. A tap on the wire between control plane
and Envoy tells when the ACK passed; it sits in the way, so it can only make the figures worse.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx2

from bench.control_plane.change_stages import Change, slowest
from bench.control_plane.fake_tidb_fleet import StandIns
from bench.control_plane.tracing import TracedControlPlane
from bench.control_plane.xds_tap import DRAINING, HEALTHY, Seen, Tap
from bench.machine import waited_seconds
from bench.reporting.report import Figure, latency_figures
from bench.sysbench_load.clients import SHORT_SESSIONS, ReadWrite, Working
from bench.sysbench_load.table import make_table
from cli.output import remark
from controlplane.etcd.client import EtcdClient
from sandbox.local_cluster import Advertised, Stack
from sandbox.ports import Ports

T = TypeVar("T")

METHOD = (
    "Real etcd, `tidevoy serve`, Envoy, MariaDB and three TiDB stand-ins. All the time sysbench's clients"
    " work through Envoy at a fixed rate: 10 transactions a second of 20 statements, on eight sessions that"
    " stay, and, beside the drains, 20 new sessions a second with one statement each. The control plane"
    " checks the nodes, gets the Envoy's load reports and stats, saves its plan, and is asked for"
    " `GET /metrics` every 5 s."
    " The clock starts before the request is sent"
    " (drain: `POST /v1/nodes/{address}/drain`; new node: the put of its `info`, the first of the two puts by"
    " which a TiDB registers, `ttl` at once behind it; both probes have to pass) and stops when Envoy's ACK"
    " of endpoints that show the change is read from Envoy's connection. Between two changes the cluster"
    " rests for 0.07 to 0.2 s. The control plane notes in memory when it reaches each stage of a change."
)
_WARM_UP = 20
_DRAINS, _JOINS = 1_000, 100
_LIMITS_MS = (15.0, 100.0)  # median, 99th percentile
_MOST_MS = 150.0  # the slowest drain
_DEADLINE = 15.0  # seconds that one change may take before the run is given up
_REST = (0.07, 0.2)  # seconds
_SCRAPE = 5.0  # seconds between two reads of the metrics
_ROWS = 10_000
_STEADY = ReadWrite(_ROWS, threads=8, rate=10)
_SHORT = ReadWrite(_ROWS, threads=4, rate=20, prepared=False, script=SHORT_SESSIONS)
_PROGRESS = 100  # changes from one line about the progress to the next
_SLOWEST = 5  # drains whose stages are shown


async def measure() -> list[Figure]:
    """Take all samples, about six minutes."""
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as directory:
        advertised = Advertised.take(ports)
        behind = ports.take()  # where the control plane listens: Envoy knows the tap's port instead
        async with (
            Tap.listening(advertised.xds, behind) as tap,
            Stack.start(
                Path(directory),
                ports=ports,
                advertised=advertised,
                settings={"xds": {"listen": f"127.0.0.1:{behind}"}},
                control_plane=TracedControlPlane,
            ) as stack,
            StandIns.listening(ports) as nodes,
            EtcdClient([stack.etcd.url]) as client,
            _beside(stack) as (steady_load, short_load),
        ):
            drains = [each async for each in _sampled("drains", _DRAINS, partial(_drain, stack, tap))]
            short = await short_load.stop()  # a new node accepts connections, but no login
            joins = [each async for each in _sampled("new nodes", _JOINS, partial(_join, nodes, client, tap))]
            steady = await steady_load.stop()
        assert isinstance(stack.control_plane, TracedControlPlane)
        for line in slowest(drains, stack.control_plane.events(), _SLOWEST):
            remark(line)
    note = (
        f"at least {1000 * max(drain.worked for drain in drains):.1f} ms without what control plane, Envoy"
        f" and benchmark waited for a CPU; clients sent {steady.statements:,} statements on sessions that"
        f" stayed, with {steady.errors} errors, and opened {short.transactions:,} sessions"
    )
    return [
        *latency_figures(
            "drain by REST to Envoy's ACK, beside load",
            [1000 * drain.seconds for drain in drains],
            limits=(*_LIMITS_MS, _MOST_MS),
            note=note,
        ),
        *latency_figures(
            "new node in etcd to Envoy's ACK, beside load",
            [1000 * seconds for seconds in joins],
            limits=_LIMITS_MS,
        ),
    ]


@asynccontextmanager
async def _beside(stack: Stack) -> AsyncIterator[tuple[Working, Working]]:
    """Run both loads of sysbench: long sessions and short sessions. ProcessFailed, TimeoutError."""
    directory = stack.directory / "clients"
    await make_table(stack.sql_port, directory, rows=_ROWS)
    async with (
        _STEADY.working(stack.sql_port, directory / "steady") as steady,
        _SHORT.working(stack.sql_port, directory / "short") as short,
    ):
        scraping = asyncio.create_task(_scrape(stack.control_plane.api))
        try:
            yield steady, short
        finally:
            scraping.cancel()
            with suppress(asyncio.CancelledError):
                await scraping


async def _scrape(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=_DEADLINE) as client:
        while True:
            (await client.get("/metrics")).raise_for_status()
            await asyncio.sleep(_SCRAPE)


async def _sampled(what: str, samples: int, sample: Callable[[int], Awaitable[T]]) -> AsyncIterator[T]:
    """All samples after warming up. TimeoutError when one does not end."""
    for number in range(-_WARM_UP, samples):
        # At random, so that no timer of the control plane keeps step with us.
        await asyncio.sleep(random.uniform(*_REST))
        async with asyncio.timeout(_DEADLINE):
            taken = await sample(_WARM_UP + number)
        if number < 0:
            continue
        yield taken
        if (number + 1) % _PROGRESS == 0:
            remark(f"{number + 1} of {samples} {what}")


async def _drain(stack: Stack, tap: Tap, number: int) -> Change:
    """Drain one node, then take it back; what came of the drain."""
    address = stack.tidb[number % len(stack.tidb)].address
    main_threads = {
        "control plane": stack.control_plane.process.pid,
        "Envoy": stack.envoy.process.pid,
        "benchmark": os.getpid(),
    }
    before = {who: waited_seconds(pid) for who, pid in main_threads.items()}
    acked = tap.acknowledgement(partial(_shows, address, DRAINING))
    sent = time.perf_counter()
    (await stack.api.post(f"/v1/nodes/{address}/drain", json={})).raise_for_status()
    answered = time.perf_counter()
    at = await acked
    waits = {who: waited_seconds(pid) - before[who] for who, pid in main_threads.items()}
    change = Change(number - _WARM_UP, sent, answered, tap.passed, at, waits)
    await asyncio.sleep(random.uniform(*_REST))
    acked = tap.acknowledgement(partial(_shows, address, HEALTHY))
    (await stack.api.post(f"/v1/nodes/{address}/undrain")).raise_for_status()
    await acked
    return change


async def _join(nodes: StandIns, client: EtcdClient, tap: Tap, number: int) -> float:
    """Register a node that was never seen, then delete it; seconds that it took to reach Envoy."""
    address = nodes.address(number)
    acked = tap.acknowledgement(partial(_shows, address, HEALTHY))
    start = time.perf_counter()
    await nodes.register(client, number)
    taken = await acked - start
    # It stays in Envoy as DRAINING until it is surely empty, some seconds; no need to wait for that.
    acked = tap.acknowledgement(partial(_shows, address, DRAINING))
    await nodes.withdraw(client, number)
    await acked
    return taken


def _shows(address: str, health: int, seen: Seen) -> bool:
    return seen.get(address) == health
