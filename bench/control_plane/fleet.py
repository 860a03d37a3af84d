"""A fleet of 200 Envoys over 1,000 nodes: how fast all have a snapshot or a change, and at what memory.

The control plane is a real `tidevoy serve` child with a real etcd. The Envoys are simulated on the wire, and
repeat in every request the node that a real Envoy sends (about 61 kB), which they need not do.
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

from bench.control_plane.fake_tidb_fleet import TOPOLOGY, register_all
from bench.control_plane.request_recorder import first_request
from bench.control_plane.simulated_envoy import Fleet, SimulatedEnvoy
from bench.machine import cpu_seconds, memory_mib, peak_memory_mib
from bench.reporting.report import Figure, Spread
from controlplane.etcd.client import EtcdClient
from controlplane.xds.resource_type import ENDPOINTS
from sandbox.control_plane import ControlPlane
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
_GROUP = 250  # nodes whose addresses begin alike
_CONNECTS, _WEIGHTS, _SNAPSHOTS = 5, 10, 3  # repetitions
_SNAPSHOT_LIMIT, _WEIGHT_LIMIT = 2.0, 1.0  # seconds
_MEMORY_LIMIT = 400.0  # MiB
_POLL = 0.010
_PATIENCE = 60.0  # seconds that any step may take before the run is given up
_REST = 0.5  # seconds between two repetitions


async def measure() -> list[Figure]:
    """Measure everything, about a minute."""
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as made:
        directory = Path(made)
        request = await first_request(directory / "recorder")
        async with Etcd.start(directory) as etcd:
            settings = _settings(etcd.url, ports, directory)
            async with EtcdClient([etcd.url]) as client:
                await register_all(client, map(_address, range(_NODES)), 10080)
                async with ControlPlane(directory, settings) as control_plane:
                    return await _Trial(control_plane, client, request).run()


class _Trial:
    """The measurements of one control plane."""

    def __init__(self, control_plane: ControlPlane, client: EtcdClient, request: bytes) -> None:
        self._control_plane = control_plane
        self._client = client
        self._request = request
        self._port = control_plane.listens()[1]
        self._api: httpx2.AsyncClient

    async def run(self) -> list[Figure]:
        pid = self._control_plane.process.pid
        async with httpx2.AsyncClient(
            base_url=self._control_plane.api, trust_env=False, timeout=_PATIENCE
        ) as self._api:
            await self._until(self._nodes_are_active)
            before = memory_mib(pid)
            connects = await self._connects()
            fleet = Fleet(self._port, self._request, _ENVOYS)
            async with fleet.connected():
                await self._acknowledged(fleet, SimulatedEnvoy.has_all)
                size = fleet.envoys[0].request_bytes
                weights = await self._repeated(
                    "one weight change to last ACK",
                    [partial(self._new_weight, fleet, round_) for round_ in range(_WEIGHTS)],
                    _WEIGHT_LIMIT,
                )
                snapshots = await self._repeated(
                    f"{_GROUP} nodes leave in one transaction, to last ACK",
                    [partial(self._new_snapshot, fleet, group) for group in range(_SNAPSHOTS)],
                    _SNAPSHOT_LIMIT,
                )
            memory = Figure(
                "resident memory of the control plane, peak",
                peak_memory_mib(pid),
                "MiB",
                _MEMORY_LIMIT,
                note=f"{before:.0f} MiB before the first Envoy connected; a request has {size:,} bytes",
            )
        return [connects, snapshots, weights, memory]

    async def _connects(self) -> Figure:
        return await self._repeated(
            f"{_ENVOYS} Envoys connect, to last ACK", [self._connect] * _CONNECTS, _SNAPSHOT_LIMIT
        )

    async def _connect(self) -> float:
        fleet = Fleet(self._port, self._request, _ENVOYS)
        start = time.perf_counter()
        async with fleet.connected():
            await self._acknowledged(fleet, SimulatedEnvoy.has_all)
            return time.perf_counter() - start

    async def _new_snapshot(self, fleet: Fleet, group: int) -> float:
        before = {envoy: envoy.acked[ENDPOINTS] for envoy in fleet.envoys}
        start = time.perf_counter()
        await self._client.delete(f"{TOPOLOGY}10.0.{group}.", prefix=True)
        await self._acknowledged(fleet, lambda envoy: envoy.acked[ENDPOINTS] != before[envoy])
        return time.perf_counter() - start

    async def _new_weight(self, fleet: Fleet, round_: int) -> float:
        before = {envoy: envoy.acked[ENDPOINTS] for envoy in fleet.envoys}
        start = time.perf_counter()
        changed = await self._api.patch(f"/v1/nodes/{_address(round_)}", json={"weight": 200})
        changed.raise_for_status()
        await self._acknowledged(fleet, lambda envoy: envoy.acked[ENDPOINTS] != before[envoy])
        return time.perf_counter() - start

    async def _repeated(self, name: str, trials: Sequence[Callable[[], Any]], limit: float) -> Figure:
        pids = (self._control_plane.process.pid, os.getpid())
        before = [cpu_seconds(pid) for pid in pids]
        seconds = []
        for trial in trials:
            await asyncio.sleep(_REST)
            async with asyncio.timeout(_PATIENCE):
                seconds.append(await trial())
        theirs, ours = (
            (cpu_seconds(pid) - start) / len(trials) for pid, start in zip(pids, before, strict=True)
        )
        spread = Spread.of(seconds)
        note = f"CPU time a repetition: control plane {theirs:.2f} s, all simulated Envoys {ours:.2f} s"
        return Figure(name, spread.high, "s", limit, spread, note)

    async def _acknowledged(self, fleet: Fleet, condition: Callable[[SimulatedEnvoy], bool]) -> None:
        await fleet.all(condition)
        await self._until(self._all_is_acked)

    async def _all_is_acked(self) -> bool:
        envoys = (await self._api.get("/v1/envoys")).raise_for_status().json()["envoys"]
        current = sum(each["acked_version"] == each["published_version"] != "" for each in envoys)
        return bool(current == _ENVOYS)

    async def _nodes_are_active(self) -> bool:
        nodes = (await self._api.get("/v1/nodes")).raise_for_status().json()["nodes"]
        return bool(sum(node["state"] == "active" for node in nodes) == _NODES)

    async def _until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(_PATIENCE):
            while not await holds():  # noqa: ASYNC110 - the other process tells us nothing by itself
                await asyncio.sleep(_POLL)


def _settings(etcd: str, ports: Ports, directory: Path) -> dict[str, Any]:
    return {
        "pd": {"urls": [etcd]},
        "health": {"status": {"enabled": False}, "sql": {"enabled": False}},
        "sql": {"listen": f"127.0.0.1:{ports.take()}"},
        "xds": {"listen": f"127.0.0.1:{ports.take()}"},
        "api": {"listen": f"127.0.0.1:{ports.take()}"},
        "state_dir": str(directory / "state"),
    }


def _address(number: int) -> str:
    return f"10.0.{number // _GROUP}.{number % _GROUP + 1}:4000"
