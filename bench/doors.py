"""What a flood of wrong tokens does to the control plane's work: change-to-ACK, idle and under the flood."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx2

from api.doors.barrier import shut_out
from api.doors.credentials import new_token, sha256
from bench.flood import ONE, WAYS
from bench.machine import cpu_seconds
from bench.report import Figure, Spread
from bench.stand_in import StandIns
from bench.tap import DRAINING, HEALTHY, Seen, Tap
from controlplane import address as addresses
from controlplane.publish.bootstrap import render
from sandbox.control_plane import ControlPlane
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports

METHOD = (
    "A `tidevoy serve` child with tokens, a real Envoy, three TiDB stand-ins. The clock starts before `POST"
    " /v1/nodes/{address}/drain` with a right token is sent, on a connection that is kept and from an address"
    " that is not the attacker's, and stops when Envoy's ACK of endpoints that show the drain is read from"
    " Envoy's connection. In each round so many drains while nothing else is asked, and as many while a"
    " program for each core sends random tokens, 256 connections at once, as fast as it can"
    " (`bench/flood.py`): all from one address; each connection from another address; the same, with a"
    " request first that needs no token. To tell what of it is the machine's, they also send as much to a"
    " port that is none of ours, where the kernel drops it all. The programs run with SCHED_IDLE: attackers"
    " are on other machines: they have all that is left of the cores. The kernel's work for their packets"
    " comes on top. The target is twice the 99th percentile of the idle runs of all rounds."
)
_ROUNDS = 4
_SAMPLES = 60  # drains of a run
_NODES = 3
_WARM_UP = 20
_DEADLINE = 15.0  # seconds that one change may take before the run is given up
_REST = (0.01, 0.05)  # seconds
_FLOOD_BEFORE = 1.0  # seconds of flood before the first sample
_LIMIT = 2.0  # times the idle figure
_NAMES = {
    "one": "from one address",
    "many": "each from another address",
    "kept": "each from another address, behind a request without a token",
}


@dataclass(slots=True)
class _Runs:
    """What was measured of one way, in all rounds."""

    milliseconds: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    cpu: float = 0.0  # seconds of the control plane


class _Bench:
    """The parts that run."""

    def __init__(self, http: httpx2.AsyncClient, tap: Tap, plane: ControlPlane, nodes: list[str]) -> None:
        self._http, self._tap, self._plane, self._nodes = http, tap, plane, nodes

    async def run(self, runs: _Runs, samples: int) -> None:
        """Drain and take back so often."""
        start, cpu = time.perf_counter(), cpu_seconds(self._plane.process.pid)
        for number in range(samples):
            await asyncio.sleep(random.uniform(*_REST))
            async with asyncio.timeout(_DEADLINE):
                runs.milliseconds.append(await self._drain(self._nodes[number % _NODES]) * 1000)
        runs.seconds += time.perf_counter() - start
        runs.cpu += cpu_seconds(self._plane.process.pid) - cpu

    async def until_active(self) -> None:
        """All nodes are in service, and the Envoy has them."""
        async with asyncio.timeout(_DEADLINE):
            while True:
                with contextlib.suppress(httpx2.HTTPError):
                    answer = (await self._http.get("/v1/nodes")).raise_for_status().json()
                    if all(node["state"] == "active" for node in answer["nodes"]):
                        return
                await asyncio.sleep(0.05)

    async def _drain(self, address: str) -> float:
        acked = self._tap.acknowledgement(partial(_shows, address, DRAINING))
        start = time.perf_counter()
        (await self._http.post(f"/v1/nodes/{address}/drain", json={})).raise_for_status()
        taken = await acked - start
        await asyncio.sleep(random.uniform(*_REST))
        acked = self._tap.acknowledgement(partial(_shows, address, HEALTHY))
        (await self._http.post(f"/v1/nodes/{address}/undrain")).raise_for_status()
        await acked
        return taken


async def measure() -> list[Figure]:
    """Take all rounds, about three minutes."""
    idle, elsewhere, floods = _Runs(), _Runs(), {way: _Runs() for way in WAYS}
    async with _started() as (bench, target):
        with _nobody() as nobody:
            await bench.run(_Runs(), _WARM_UP)
            for number in range(_ROUNDS):
                await bench.run(idle, _SAMPLES)
                turns = [(target, way, floods[way]) for way in WAYS] + [(nobody, WAYS[0], elsewhere)]
                first = number % len(turns)
                for where, way, found in turns[first:] + turns[:first]:
                    async with _flooded(where, way, found.counts):
                        await asyncio.sleep(_FLOOD_BEFORE)
                        await bench.run(found, _SAMPLES)
    spread = Spread.of(idle.milliseconds)
    figures = [
        Figure("drain to Envoy's ACK, idle, median", spread.median, "ms", None, spread),
        Figure(
            "drain to Envoy's ACK, idle, 99th percentile", spread.p99, "ms", None, spread, note=_cpu(idle)
        ),
    ]
    beside = Spread.of(elsewhere.milliseconds)
    name = "drain to Envoy's ACK, as much sent to a port that is none of ours"
    figures += [
        Figure(f"{name}, median", beside.median, "ms", None, beside),
        Figure(f"{name}, 99th percentile", beside.p99, "ms", None, beside, note=_told(elsewhere)),
    ]
    for way, runs in floods.items():
        under = Spread.of(runs.milliseconds)
        name = f"drain to Envoy's ACK, wrong tokens {_NAMES[way]}"
        figures += [
            Figure(f"{name}, median", under.median, "ms", None, under),
            Figure(f"{name}, 99th percentile", under.p99, "ms", _LIMIT * spread.p99, under, note=_told(runs)),
        ]
    return figures


def _told(runs: _Runs) -> str:
    counts = runs.counts
    sent = sum(counts.values()) - counts["no_port"]
    return (
        f"{sent / runs.seconds:,.0f} connections a second were tried: {counts['answered']:,} had the answer"
        f" 401, {counts['closed']:,} were closed at once, {counts['unheard']:,} were not heard within 3 ms;"
        f" {_cpu(runs)}"
    )


def _cpu(runs: _Runs) -> str:
    return f"the control plane took {100 * runs.cpu / runs.seconds:.0f} % of a core"


@contextlib.asynccontextmanager
async def _started() -> AsyncIterator[tuple[_Bench, str]]:
    """Everything runs, and the Envoy has its nodes; the address of the REST server."""
    token = new_token()
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as made:
        directory = Path(made)
        xds, behind, target = ports.take(), ports.take(), f"127.0.0.1:{ports.take()}"
        async with Tap.listening(xds, behind) as tap, StandIns.listening(ports) as stand_ins:
            nodes = [stand_ins.address(number) for number in range(_NODES)]
            settings = {
                "nodes": [
                    {"address": each, "status_address": f"{each.split(':')[0]}:{stand_ins.status_port}"}
                    for each in nodes
                ],
                "sql": {"listen": f"127.0.0.1:{ports.take()}"},
                "xds": {"listen": f"127.0.0.1:{behind}"},
                "api": {
                    "listen": target,
                    "tokens": [{"name": "bench", "role": "operator", "sha256": sha256(token.encode())}],
                },
                "state_dir": str(directory / "state"),
                "drain": {"fleet_return": 0},
                "balance": {"slow_start": 0},
                "log": {"level": "warning"},
            }
            plane = ControlPlane(directory, settings)
            bootstrap = render(
                plane.parsed(),
                control_planes=[f"127.0.0.1:{xds}"],
                node_id="envoy-1",
                admin=f"127.0.0.1:{ports.take()}",
            )
            shown = {"authorization": f"Bearer {token}"}
            async with (
                plane,
                EnvoyProcess(bootstrap, directory),
                httpx2.AsyncClient(base_url=plane.api, headers=shown, trust_env=False, timeout=10) as http,
            ):
                bench = _Bench(http, tap, plane, nodes)
                await bench.until_active()
                yield bench, target


@contextlib.contextmanager
def _nobody() -> Iterator[str]:
    """The address of a port that drops what comes from the one address of a flood."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        shut_out(listener, [ONE])
        yield addresses.join(*listener.getsockname())


@contextlib.asynccontextmanager
async def _flooded(target: str, way: str, counts: Counter[str]) -> AsyncIterator[None]:
    """Wrong tokens come meanwhile; what became of them is added to `counts`."""
    senders = [
        await asyncio.create_subprocess_exec(
            *("chrt", "-i", "0", sys.executable, "-m", "bench.flood", target, way),
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for sender in senders:
            sender.terminate()
        for sender in senders:
            out, _ = await sender.communicate()
            counts.update(json.loads(out))


def _shows(address: str, health: int, seen: Seen) -> bool:
    return seen.get(address) == health
