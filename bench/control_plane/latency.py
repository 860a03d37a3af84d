"""Benchmark of the time until Envoy applies a change: a drain by REST under load, and a new node in etcd.

Runs real etcd, a `tidevoy serve` child, Envoy and simulated TiDB servers. A relay between control plane and
Envoy records when the ACK passes; as a relay, it can only make the figures worse.
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

from bench.control_plane.change_stages import MeasuredChange, describe_slowest
from bench.control_plane.fake_tidb_fleet import FakeTidbFleet
from bench.control_plane.tracing import TracedControlPlane
from bench.control_plane.xds_tap import DRAINING, HEALTHY, HealthByEndpoint, XdsTap
from bench.machine import cpu_wait_seconds
from bench.reporting.report import BenchmarkFigure, latency_figures
from bench.sysbench_load.clients import SHORT_SESSIONS_SCRIPT, RunningSysbench, SysbenchLoad
from bench.sysbench_load.table import make_table
from cli.output import print_note
from controlplane.etcd.client import EtcdClient
from sandbox.local_cluster import AdvertisedPorts, LocalCluster
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
_WARM_UP_SAMPLES = 20
_DRAIN_SAMPLES, _JOIN_SAMPLES = 1_000, 100
_LIMITS_MS = (15.0, 100.0)  # median, 99th percentile
_MAX_DRAIN_MS = 150.0  # the slowest drain
_CHANGE_TIMEOUT_SECONDS = 15.0  # a change that takes longer fails the run
_PAUSE_RANGE_SECONDS = (0.07, 0.2)
_SCRAPE_INTERVAL_SECONDS = 5.0  # between two reads of the metrics
_ROWS = 10_000
_STEADY_LOAD = SysbenchLoad(_ROWS, threads=8, rate=10)
_SHORT_SESSION_LOAD = SysbenchLoad(_ROWS, threads=4, rate=20, prepared=False, script=SHORT_SESSIONS_SCRIPT)
_PROGRESS_EVERY_SAMPLES = 100  # changes between two progress lines
_MAX_SLOWEST_SHOWN = 5  # drains whose stages are printed


async def measure() -> list[BenchmarkFigure]:
    """Take all samples, about six minutes."""
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as directory:
        advertised = AdvertisedPorts.allocate(ports)
        control_plane_port = ports.allocate()  # Envoy connects to the tap's port instead
        async with (
            XdsTap.listening(advertised.xds, control_plane_port) as tap,
            LocalCluster.start(
                Path(directory),
                ports=ports,
                advertised=advertised,
                settings={"xds": {"listen": f"127.0.0.1:{control_plane_port}"}},
                control_plane=TracedControlPlane,
            ) as stack,
            FakeTidbFleet.listening(ports) as nodes,
            EtcdClient([stack.etcd.url]) as client,
            _background_load(stack) as (steady_load, short_load),
        ):
            drain_sampler = partial(_sample_drain, stack, tap)
            drains = [drain async for drain in _take_samples("drains", _DRAIN_SAMPLES, drain_sampler)]
            short_counts = await short_load.stop()  # a new node accepts connections, but no login
            join_sampler = partial(_sample_join, nodes, client, tap)
            joins = [seconds async for seconds in _take_samples("new nodes", _JOIN_SAMPLES, join_sampler)]
            steady_counts = await steady_load.stop()
        assert isinstance(stack.control_plane, TracedControlPlane)
        for line in describe_slowest(drains, stack.control_plane.events(), _MAX_SLOWEST_SHOWN):
            print_note(line)
    without_waits = 1000 * max(drain.seconds_without_cpu_waits for drain in drains)
    note = (
        f"at least {without_waits:.1f} ms without the time that control plane, Envoy and benchmark waited"
        " for a"
        f" CPU; clients sent {steady_counts.statements:,} statements on long sessions,"
        f" with {steady_counts.errors} errors, and opened {short_counts.transactions:,} short sessions"
    )
    return [
        *latency_figures(
            "drain by REST to Envoy's ACK, beside load",
            [1000 * drain.seconds for drain in drains],
            limits=(*_LIMITS_MS, _MAX_DRAIN_MS),
            note=note,
        ),
        *latency_figures(
            "new node in etcd to Envoy's ACK, beside load",
            [1000 * seconds for seconds in joins],
            limits=_LIMITS_MS,
        ),
    ]


@asynccontextmanager
async def _background_load(stack: LocalCluster) -> AsyncIterator[tuple[RunningSysbench, RunningSysbench]]:
    """Run both sysbench loads: long and short sessions. Raises ProcessFailed or TimeoutError."""
    directory = stack.directory / "clients"
    await make_table(stack.sql_port, directory, rows=_ROWS)
    async with (
        _STEADY_LOAD.running(stack.sql_port, directory / "steady") as steady,
        _SHORT_SESSION_LOAD.running(stack.sql_port, directory / "short") as short,
    ):
        scrape_task = asyncio.create_task(_scrape(stack.control_plane.api_url))
        try:
            yield steady, short
        finally:
            scrape_task.cancel()
            with suppress(asyncio.CancelledError):
                await scrape_task


async def _scrape(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=_CHANGE_TIMEOUT_SECONDS) as client:
        while True:
            (await client.get("/metrics")).raise_for_status()
            await asyncio.sleep(_SCRAPE_INTERVAL_SECONDS)


async def _take_samples(
    plural_name: str, samples: int, sample: Callable[[int], Awaitable[T]]
) -> AsyncIterator[T]:
    """Yield all samples after the warm-up. Raises TimeoutError if one does not finish."""
    for number in range(-_WARM_UP_SAMPLES, samples):
        # A random pause, so that samples do not synchronize with a timer of the control plane.
        await asyncio.sleep(random.uniform(*_PAUSE_RANGE_SECONDS))
        async with asyncio.timeout(_CHANGE_TIMEOUT_SECONDS):
            result = await sample(_WARM_UP_SAMPLES + number)
        if number < 0:
            continue
        yield result
        if (number + 1) % _PROGRESS_EVERY_SAMPLES == 0:
            print_note(f"{number + 1} of {samples} {plural_name}")


async def _sample_drain(stack: LocalCluster, tap: XdsTap, number: int) -> MeasuredChange:
    """Drain one node and measure that, then undrain it."""
    address = stack.tidb[number % len(stack.tidb)].address
    main_threads = {
        "control plane": stack.control_plane.process.pid,
        "Envoy": stack.envoy.process.pid,
        "benchmark": os.getpid(),
    }
    waits_before = {process: cpu_wait_seconds(pid) for process, pid in main_threads.items()}
    acked = tap.expect_ack(partial(_has_health, address, DRAINING))
    sent_at = time.perf_counter()
    (await stack.api.post(f"/v1/nodes/{address}/drain", json={})).raise_for_status()
    answered_at = time.perf_counter()
    acked_at = await acked
    waits = {process: cpu_wait_seconds(pid) - waits_before[process] for process, pid in main_threads.items()}
    change = MeasuredChange(number - _WARM_UP_SAMPLES, sent_at, answered_at, tap.relayed_at, acked_at, waits)
    await asyncio.sleep(random.uniform(*_PAUSE_RANGE_SECONDS))
    acked = tap.expect_ack(partial(_has_health, address, HEALTHY))
    (await stack.api.post(f"/v1/nodes/{address}/undrain")).raise_for_status()
    await acked
    return change


async def _sample_join(nodes: FakeTidbFleet, client: EtcdClient, tap: XdsTap, number: int) -> float:
    """Register a new node, return the seconds until it reaches Envoy, and delete it again."""
    address = nodes.address(number)
    acked = tap.expect_ack(partial(_has_health, address, HEALTHY))
    start = time.perf_counter()
    await nodes.register(client, number)
    seconds = await acked - start
    # It stays in Envoy as DRAINING for some seconds, until it is certainly empty; no need to wait for that.
    acked = tap.expect_ack(partial(_has_health, address, DRAINING))
    await nodes.unregister(client, number)
    await acked
    return seconds


def _has_health(address: str, health: int, endpoints: HealthByEndpoint) -> bool:
    return endpoints.get(address) == health
