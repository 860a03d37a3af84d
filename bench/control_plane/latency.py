"""Benchmark of the time until Envoy applies a change: a drain by REST under load, and a new node in etcd.

Runs real etcd, a `tidevoy serve` child, Envoy and fake TiDB servers. A relay between the control plane and
Envoy records when it reads the ACK. The relay itself adds a little latency.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx2

from bench.control_plane.registrations import TOPOLOGY_PREFIX, register
from bench.control_plane.xds_relay import DRAINING, HEALTHY, XdsRelay
from bench.machine import cpu_wait_seconds
from bench.migration.cluster import FakeNodeProcess
from bench.reporting.report import BenchmarkFigure, latency_figures
from bench.sysbench import SHORT_SESSIONS_SCRIPT, RunningSysbench, SysbenchLoad, make_table
from cli.output import print_note
from controlplane.etcd.client import EtcdClient
from sandbox.local_cluster import AdvertisedPorts, LocalCluster
from sandbox.ports import Ports

T = TypeVar("T")

METHOD = """\
Real etcd, `tidevoy serve`, Envoy, MariaDB and three simulated TiDB servers.

* Load: during the whole measurement, sysbench sends 10 transactions of 20 statements per second through
  Envoy, on eight permanent sessions. During the drains, it also opens 20 new sessions per second with one
  statement each.
* Control plane: it checks the nodes, receives Envoy's load reports and stats, and saves its plan. It also
  answers `GET /metrics` every 5 s.
* Start of the clock: before the request is sent. A drain is `POST /v1/nodes/{address}/drain`. A new node
  writes `info` and then at once `ttl`, as TiDB does when it registers; the clock starts before `info`, and
  both checks must pass.
* End of the clock: when the ACK of endpoints with the change is read from Envoy's connection.
* Between two changes, the cluster rests for 0.07 to 0.2 s."""
_WARM_UP_SAMPLES = 20
_DRAIN_SAMPLES, _JOIN_SAMPLES = 1_000, 100
_LIMITS_MS = (15.0, 100.0)  # median, 99th percentile
_MAX_DRAIN_MS = 150.0  # the slowest drain
_CHANGE_TIMEOUT_SECONDS = 15.0  # a change that takes longer fails the run
_PAUSE_RANGE_SECONDS = (0.07, 0.2)
_SCRAPE_INTERVAL_SECONDS = 5.0
_ROWS = 10_000
_STEADY_LOAD = SysbenchLoad(_ROWS, threads=8, rate=10)
_SHORT_SESSION_LOAD = SysbenchLoad(_ROWS, threads=4, rate=20, prepared=False, script=SHORT_SESSIONS_SCRIPT)
_PROGRESS_EVERY_SAMPLES = 100


async def measure() -> list[BenchmarkFigure]:
    """Take all samples. This takes about six minutes."""
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as directory:
        advertised = AdvertisedPorts.allocate(ports)
        control_plane_port = ports.allocate()  # Envoy connects to the relay's port instead
        async with (
            XdsRelay.listening(advertised.xds, control_plane_port) as relay,
            LocalCluster.start(
                Path(directory),
                ports=ports,
                advertised=advertised,
                settings={"xds": {"listen": f"127.0.0.1:{control_plane_port}"}},
            ) as stack,
            FakeNodeProcess(Path(directory), ports, name="nodes", key=secrets.token_hex(16)) as nodes,
            EtcdClient([stack.etcd.url]) as client,
            _background_load(stack) as (steady_load, short_load),
        ):
            drain_sampler = partial(_sample_drain, stack, relay)
            drains = [drain async for drain in _take_samples("drains", _DRAIN_SAMPLES, drain_sampler)]
            short_counts = await short_load.stop()  # the new nodes do not know its statements
            join_sampler = partial(_sample_join, nodes, client, relay)
            joins = [seconds async for seconds in _take_samples("new nodes", _JOIN_SAMPLES, join_sampler)]
            steady_counts = await steady_load.stop()
    without_waits = 1000 * max(seconds - cpu_wait for seconds, cpu_wait in drains)
    note = (
        f"at least {without_waits:.1f} ms without the time that control plane, Envoy and benchmark waited"
        f" for a CPU; clients sent {steady_counts.statements:,} statements on long sessions,"
        f" with {steady_counts.errors} errors, and opened {short_counts.transactions:,} short sessions"
    )
    return [
        *latency_figures(
            "drain by REST to Envoy's ACK, under load",
            [1000 * seconds for seconds, _ in drains],
            limits=(*_LIMITS_MS, _MAX_DRAIN_MS),
            note=note,
        ),
        *latency_figures(
            "new node in etcd to Envoy's ACK, under load",
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
    """Yield all samples after the warm-up. Raises TimeoutError if a sample takes too long."""
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


async def _sample_drain(stack: LocalCluster, relay: XdsRelay, number: int) -> tuple[float, float]:
    """Drain one node, then undrain it.

    Return the seconds until Envoy's ACK, and how long the processes waited for a CPU during that time.
    """
    address = stack.tidb[number % len(stack.tidb)].address
    pids = (stack.control_plane.process.pid, stack.envoy.process.pid, os.getpid())
    waited_before = sum(map(cpu_wait_seconds, pids))
    acked = relay.expect_ack(address, DRAINING)
    sent_at = time.perf_counter()
    (await stack.api.post(f"/v1/nodes/{address}/drain", json={})).raise_for_status()
    seconds = await acked - sent_at
    cpu_wait = sum(map(cpu_wait_seconds, pids)) - waited_before
    await asyncio.sleep(random.uniform(*_PAUSE_RANGE_SECONDS))
    acked = relay.expect_ack(address, HEALTHY)
    (await stack.api.post(f"/v1/nodes/{address}/undrain")).raise_for_status()
    await acked
    return seconds, cpu_wait


async def _sample_join(nodes: FakeNodeProcess, client: EtcdClient, relay: XdsRelay, number: int) -> float:
    """Register a new node, return the seconds until Envoy's ACK, and delete the node again."""
    address = nodes.address(number)
    acked = relay.expect_ack(address, HEALTHY)
    start = time.perf_counter()
    await register(client, address, nodes.status)
    seconds = await acked - start
    # Envoys get a deleted node as DRAINING until it is certainly empty. The sample does not wait for that.
    acked = relay.expect_ack(address, DRAINING)
    await client.delete(f"{TOPOLOGY_PREFIX}{address}/", prefix=True)
    await acked
    return seconds
