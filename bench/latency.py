"""How long a change takes until Envoy runs with it: a drain by REST, and a new node in etcd.

The real stack: etcd, a `tidevoy serve` child, stock Envoy, TiDB stand-ins. A tap on the wire between control
plane and Envoy tells when the ACK passed; it sits in the way, so it can only make the figures worse.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from bench.report import Figure, latency_figures
from bench.stand_in import StandIns
from bench.tap import DRAINING, HEALTHY, Seen, Tap
from controlplane.etcd.client import EtcdClient
from sandbox.ports import Ports
from sandbox.stack import Advertised, Stack

METHOD = (
    "Real etcd, `tidevoy serve`, Envoy and three TiDB stand-ins. The clock starts before the request is sent"
    " (drain: `POST /v1/nodes/{address}/drain`; new node: the put of its `info`, the first of the two puts by"
    " which a TiDB registers, `ttl` at once behind it; both probes have to pass) and stops when Envoy's ACK"
    " of endpoints that show the change is read from Envoy's connection. Between samples the cluster rests"
    " for 0.1 to 0.3 s."
)
_WARM_UP = 20
_SAMPLES = 150
_LIMITS_MS = (15.0, 100.0)  # median, 99th percentile
_DEADLINE = 15.0  # seconds that one change may take before the run is given up
_REST = (0.1, 0.3)  # seconds


async def measure() -> list[Figure]:
    """Take all samples, about two minutes."""
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
            ) as stack,
            StandIns.listening(ports) as nodes,
            EtcdClient([stack.etcd.url]) as client,
        ):
            drains = await _sampled(partial(_drain, stack, tap))
            joins = await _sampled(partial(_join, nodes, client, tap))
    return [
        *latency_figures("drain by REST to Envoy's ACK", drains, limits=_LIMITS_MS),
        *latency_figures("new node in etcd to Envoy's ACK", joins, limits=_LIMITS_MS),
    ]


async def _sampled(sample: Callable[[int], Awaitable[float]]) -> list[float]:
    """Milliseconds of all samples after warming up. TimeoutError when one does not end."""
    taken = []
    for number in range(_WARM_UP + _SAMPLES):
        # At random, so that no timer of the control plane keeps step with us.
        await asyncio.sleep(random.uniform(*_REST))
        async with asyncio.timeout(_DEADLINE):
            taken.append(await sample(number) * 1000)
    return taken[_WARM_UP:]


async def _drain(stack: Stack, tap: Tap, number: int) -> float:
    """Drain one node, then take it back; seconds that the drain took."""
    address = stack.tidb[number % len(stack.tidb)].address
    acked = tap.acknowledgement(partial(_shows, address, DRAINING))
    start = time.perf_counter()
    (await stack.api.post(f"/v1/nodes/{address}/drain", json={})).raise_for_status()
    taken = await acked - start
    await asyncio.sleep(random.uniform(*_REST))
    acked = tap.acknowledgement(partial(_shows, address, HEALTHY))
    (await stack.api.post(f"/v1/nodes/{address}/undrain")).raise_for_status()
    await acked
    return taken


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
