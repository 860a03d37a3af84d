"""Benchmark of 200 Envoys with 1,000 nodes: time until all Envoys have applied a change, and memory.

The control plane is a real `tidevoy serve` child with a real etcd. The Envoys are simulated on the wire; each
request repeats the node message of a real Envoy (about 61 kB), although xDS requires it only once per stream.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import httpx2

from bench.control_plane.registrations import (
    STEP_TIMEOUT_SECONDS,
    TOPOLOGY_PREFIX,
    count_up_to_date_envoys,
    register_all,
    unchecked_settings,
    wait_nodes_active,
)
from bench.control_plane.simulated_envoy import SimulatedEnvoy, SimulatedFleet, record_first_request
from bench.machine import cpu_seconds, memory_mib, peak_memory_mib
from bench.reporting.report import BenchmarkFigure, Spread
from controlplane.etcd.client import EtcdClient
from controlplane.xds.resource_type import ENDPOINTS
from sandbox.control_plane import ControlPlaneProcess
from sandbox.etcd import Etcd
from sandbox.ports import Ports

METHOD = """\
This process simulates 200 Envoys (state of the world; clusters, endpoints, listener). Each has its own
connection and sends the node message of a real Envoy in every request. A `tidevoy serve` child uses an etcd
with 1,000 registered nodes, without health checks.

* Start of the clock: before the first connection, the `PATCH` or the deletion in etcd.
* End of the clock: when `GET /v1/envoys` shows that the control plane has received every ACK. Once all
  Envoys have sent theirs, the benchmark polls every 10 ms.

Each time is the maximum of all repetitions."""
_ENVOYS = 200
_NODES = 1_000
_NODES_PER_GROUP = 250  # nodes whose addresses have the same first three bytes
_CONNECT_REPETITIONS, _WEIGHT_REPETITIONS, _SNAPSHOT_REPETITIONS = 5, 10, 3
_SNAPSHOT_LIMIT_SECONDS, _WEIGHT_LIMIT_SECONDS = 2.0, 1.0
_MEMORY_LIMIT_MIB = 400.0
_POLL_SECONDS = 0.010
_PAUSE_SECONDS = 0.5  # between two repetitions


async def measure() -> list[BenchmarkFigure]:
    """Run all measurements. This takes about a minute."""
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as temporary_directory:
        directory = Path(temporary_directory)
        request = await record_first_request(directory / "recorder")
        async with Etcd.start(directory) as etcd:
            settings = unchecked_settings(ports, directory / "state") | {"pd": {"urls": [etcd.url]}}
            await register_all(etcd.url, map(_address, range(_NODES)))
            async with (
                EtcdClient([etcd.url]) as client,
                ControlPlaneProcess(directory, settings) as control_plane,
            ):
                return await _FleetTrial(control_plane, client, request).run()


class _FleetTrial:
    def __init__(self, control_plane: ControlPlaneProcess, client: EtcdClient, request: bytes) -> None:
        self._control_plane = control_plane
        self._client = client
        self._request = request
        self._port = control_plane.listen_ports()[1]
        self._api: httpx2.AsyncClient

    async def run(self) -> list[BenchmarkFigure]:
        pid = self._control_plane.process.pid
        async with httpx2.AsyncClient(
            base_url=self._control_plane.api_url, trust_env=False, timeout=STEP_TIMEOUT_SECONDS
        ) as self._api:
            await wait_nodes_active(self._api, _NODES)
            memory_before = memory_mib(pid)
            connects = await self._repeat(
                f"{_ENVOYS} Envoys connect, to last ACK",
                [self._time_connect] * _CONNECT_REPETITIONS,
                _SNAPSHOT_LIMIT_SECONDS,
            )
            fleet = SimulatedFleet(self._port, self._request, _ENVOYS)
            async with fleet.connected():
                await self._wait_acknowledged(fleet, SimulatedEnvoy.has_acked_all_types)
                size = fleet.envoys[0].request_bytes
                change_weight = partial(self._time_change, fleet, self._change_weight)
                weights = await self._repeat(
                    "one weight change to last ACK",
                    [partial(change_weight, number) for number in range(_WEIGHT_REPETITIONS)],
                    _WEIGHT_LIMIT_SECONDS,
                )
                remove_nodes = partial(self._time_change, fleet, self._remove_nodes)
                snapshots = await self._repeat(
                    f"{_NODES_PER_GROUP} nodes leave in one transaction, to last ACK",
                    [partial(remove_nodes, group) for group in range(_SNAPSHOT_REPETITIONS)],
                    _SNAPSHOT_LIMIT_SECONDS,
                )
            memory = BenchmarkFigure(
                "resident memory of the control plane, peak",
                peak_memory_mib(pid),
                "MiB",
                _MEMORY_LIMIT_MIB,
                note=f"{memory_before:.0f} MiB before the first Envoy connected; a request has {size:,}"
                " bytes",
            )
        return [connects, snapshots, weights, memory]

    async def _time_connect(self) -> float:
        fleet = SimulatedFleet(self._port, self._request, _ENVOYS)
        start = time.perf_counter()
        async with fleet.connected():
            await self._wait_acknowledged(fleet, SimulatedEnvoy.has_acked_all_types)
            return time.perf_counter() - start

    async def _time_change(
        self, fleet: SimulatedFleet, change: Callable[[int], Awaitable[None]], number: int
    ) -> float:
        acked_before = {envoy: envoy.acked[ENDPOINTS] for envoy in fleet.envoys}
        start = time.perf_counter()
        await change(number)
        await self._wait_acknowledged(fleet, lambda envoy: envoy.acked[ENDPOINTS] != acked_before[envoy])
        return time.perf_counter() - start

    async def _remove_nodes(self, group: int) -> None:
        await self._client.delete(f"{TOPOLOGY_PREFIX}10.0.{group}.", prefix=True)

    async def _change_weight(self, number: int) -> None:
        (await self._api.patch(f"/v1/nodes/{_address(number)}", json={"weight": 200})).raise_for_status()

    async def _repeat(
        self, name: str, trials: Sequence[Callable[[], Awaitable[float]]], limit: float
    ) -> BenchmarkFigure:
        pids = (self._control_plane.process.pid, os.getpid())
        cpu_before = [cpu_seconds(pid) for pid in pids]
        seconds = []
        for trial in trials:
            await asyncio.sleep(_PAUSE_SECONDS)
            seconds.append(await trial())
        control_plane_cpu, envoys_cpu = (
            (cpu_seconds(pid) - start) / len(trials) for pid, start in zip(pids, cpu_before, strict=True)
        )
        spread = Spread.of(seconds)
        note = (
            f"CPU time per repetition: control plane {control_plane_cpu:.2f} s,"
            f" all simulated Envoys {envoys_cpu:.2f} s"
        )
        return BenchmarkFigure(name, spread.high, "s", limit, spread, note)

    async def _wait_acknowledged(
        self, fleet: SimulatedFleet, condition: Callable[[SimulatedEnvoy], bool]
    ) -> None:
        async with asyncio.timeout(STEP_TIMEOUT_SECONDS):
            await fleet.wait_for_all(condition)
            while await count_up_to_date_envoys(self._api) != _ENVOYS:  # noqa: ASYNC110 - REST has no event
                await asyncio.sleep(_POLL_SECONDS)


def _address(number: int) -> str:
    return f"10.0.{number // _NODES_PER_GROUP}.{number % _NODES_PER_GROUP + 1}:4000"
