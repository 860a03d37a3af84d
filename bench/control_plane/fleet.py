"""Benchmark of 200 Envoys over 1,000 nodes: time until all have a snapshot or a change, and memory.

The control plane is a real `tidevoy serve` child with a real etcd. The Envoys are simulated on the wire; each
request repeats the node message of a real Envoy (about 61 kB), although that is optional.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from bench.control_plane.fake_tidb_fleet import TOPOLOGY_PREFIX, register_all
from bench.control_plane.request_recorder import record_first_request
from bench.control_plane.simulated_envoy import SimulatedEnvoy, SimulatedFleet
from bench.machine import cpu_seconds, memory_mib, peak_memory_mib
from bench.reporting.report import BenchmarkFigure, Spread
from controlplane.etcd.client import EtcdClient
from controlplane.xds.resource_type import ENDPOINTS
from sandbox.control_plane import ControlPlaneProcess
from sandbox.etcd import Etcd
from sandbox.ports import Ports

METHOD = (
    "200 simulated Envoys (state of the world; clusters, endpoints, listener) in this one process, each with"
    " a connection of its own and a real Envoy's node in every request; a `tidevoy serve` child; etcd with"
    " 1,000 registered nodes whose checks are switched off. The clock starts before the first connection, the"
    " `PATCH` or the delete in etcd is sent, and stops when `GET /v1/envoys`, asked every 10 ms once all have"
    " answered, shows that the control plane has every ACK. Times are the worst of all repetitions."
)
_ENVOYS = 200
_NODES = 1_000
_NODES_PER_GROUP = 250  # nodes with a common address prefix
_CONNECT_REPETITIONS, _WEIGHT_REPETITIONS, _SNAPSHOT_REPETITIONS = 5, 10, 3
_SNAPSHOT_LIMIT_SECONDS, _WEIGHT_LIMIT_SECONDS = 2.0, 1.0
_MEMORY_LIMIT_MIB = 400.0
_POLL_SECONDS = 0.010
_STEP_TIMEOUT_SECONDS = 60.0  # a step that takes longer fails the run
_PAUSE_SECONDS = 0.5  # between two repetitions


async def measure() -> list[BenchmarkFigure]:
    """Take all measurements, about a minute."""
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as temporary_directory:
        directory = Path(temporary_directory)
        request = await record_first_request(directory / "recorder")
        async with Etcd.start(directory) as etcd:
            settings = _settings(etcd.url, ports, directory)
            async with EtcdClient([etcd.url]) as client:
                await register_all(client, map(_address, range(_NODES)), 10080)
                async with ControlPlaneProcess(directory, settings) as control_plane:
                    return await _FleetTrial(control_plane, client, request).run()


class _FleetTrial:
    """Takes the measurements with one control plane."""

    def __init__(self, control_plane: ControlPlaneProcess, client: EtcdClient, request: bytes) -> None:
        self._control_plane = control_plane
        self._client = client
        self._request = request
        self._port = control_plane.listen_ports()[1]
        self._api: httpx2.AsyncClient

    async def run(self) -> list[BenchmarkFigure]:
        pid = self._control_plane.process.pid
        async with httpx2.AsyncClient(
            base_url=self._control_plane.api_url, trust_env=False, timeout=_STEP_TIMEOUT_SECONDS
        ) as self._api:
            await self._wait_until(self._nodes_are_active)
            memory_before = memory_mib(pid)
            connects = await self._measure_connects()
            fleet = SimulatedFleet(self._port, self._request, _ENVOYS)
            async with fleet.connected():
                await self._wait_acknowledged(fleet, SimulatedEnvoy.has_acked_all_types)
                size = fleet.envoys[0].request_bytes
                weights = await self._repeat(
                    "one weight change to last ACK",
                    [
                        partial(self._time_weight_change, fleet, round_)
                        for round_ in range(_WEIGHT_REPETITIONS)
                    ],
                    _WEIGHT_LIMIT_SECONDS,
                )
                snapshots = await self._repeat(
                    f"{_NODES_PER_GROUP} nodes leave in one transaction, to last ACK",
                    [
                        partial(self._time_removed_nodes, fleet, group)
                        for group in range(_SNAPSHOT_REPETITIONS)
                    ],
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

    async def _measure_connects(self) -> BenchmarkFigure:
        return await self._repeat(
            f"{_ENVOYS} Envoys connect, to last ACK",
            [self._time_connect] * _CONNECT_REPETITIONS,
            _SNAPSHOT_LIMIT_SECONDS,
        )

    async def _time_connect(self) -> float:
        fleet = SimulatedFleet(self._port, self._request, _ENVOYS)
        start = time.perf_counter()
        async with fleet.connected():
            await self._wait_acknowledged(fleet, SimulatedEnvoy.has_acked_all_types)
            return time.perf_counter() - start

    async def _time_removed_nodes(self, fleet: SimulatedFleet, group: int) -> float:
        acked_before = {envoy: envoy.acked[ENDPOINTS] for envoy in fleet.envoys}
        start = time.perf_counter()
        await self._client.delete(f"{TOPOLOGY_PREFIX}10.0.{group}.", prefix=True)
        await self._wait_acknowledged(fleet, lambda envoy: envoy.acked[ENDPOINTS] != acked_before[envoy])
        return time.perf_counter() - start

    async def _time_weight_change(self, fleet: SimulatedFleet, round_: int) -> float:
        acked_before = {envoy: envoy.acked[ENDPOINTS] for envoy in fleet.envoys}
        start = time.perf_counter()
        response = await self._api.patch(f"/v1/nodes/{_address(round_)}", json={"weight": 200})
        response.raise_for_status()
        await self._wait_acknowledged(fleet, lambda envoy: envoy.acked[ENDPOINTS] != acked_before[envoy])
        return time.perf_counter() - start

    async def _repeat(self, name: str, trials: Sequence[Callable[[], Any]], limit: float) -> BenchmarkFigure:
        pids = (self._control_plane.process.pid, os.getpid())
        cpu_before = [cpu_seconds(pid) for pid in pids]
        seconds = []
        for trial in trials:
            await asyncio.sleep(_PAUSE_SECONDS)
            async with asyncio.timeout(_STEP_TIMEOUT_SECONDS):
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
        await fleet.wait_for_all(condition)
        await self._wait_until(self._are_all_acked)

    async def _are_all_acked(self) -> bool:
        envoys = (await self._api.get("/v1/envoys")).raise_for_status().json()["envoys"]
        current = sum(envoy["acked_version"] == envoy["published_version"] != "" for envoy in envoys)
        return bool(current == _ENVOYS)

    async def _nodes_are_active(self) -> bool:
        nodes = (await self._api.get("/v1/nodes")).raise_for_status().json()["nodes"]
        return bool(sum(node["state"] == "active" for node in nodes) == _NODES)

    async def _wait_until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(_STEP_TIMEOUT_SECONDS):
            while not await condition():  # noqa: ASYNC110 - the other process sends no event
                await asyncio.sleep(_POLL_SECONDS)


def _settings(etcd: str, ports: Ports, directory: Path) -> dict[str, Any]:
    return {
        "pd": {"urls": [etcd]},
        "health": {"status": {"enabled": False}, "sql": {"enabled": False}},
        "sql": {"listen": f"127.0.0.1:{ports.allocate()}"},
        "xds": {"listen": f"127.0.0.1:{ports.allocate()}"},
        "api": {"listen": f"127.0.0.1:{ports.allocate()}"},
        "state_dir": str(directory / "state"),
    }


def _address(number: int) -> str:
    return f"10.0.{number // _NODES_PER_GROUP}.{number % _NODES_PER_GROUP + 1}:4000"
