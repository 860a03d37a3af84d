"""Benchmark of the control plane's CPU and memory with 5,000 nodes, 100 Envoys and 100,000 sessions.

Runs a real `tidevoy serve` child with a real etcd, without health checks; Envoys are simulated on the wire.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
from envoy.service.load_stats.v3 import lrs_pb2

from bench.control_plane.fake_reports import FakeLoadReports, FakeModuleStats
from bench.control_plane.registrations import (
    STEP_TIMEOUT_SECONDS,
    register_all,
    unchecked_settings,
    wait_nodes_active,
)
from bench.control_plane.session_simulator import SessionSimulator
from bench.control_plane.simulated_envoy import SimulatedEnvoy, SimulatedFleet, record_first_request
from bench.machine import cpu_seconds, memory_mib, peak_memory_mib
from bench.reporting.report import BenchmarkFigure
from controlplane.observe.envoy_reports.telemetry_pb2 import StreamMetricsMessage
from controlplane.version import VERSION
from controlplane.xds.resource_type import ENDPOINTS, LIVE_CONFIG
from sandbox.control_plane import ControlPlaneProcess
from sandbox.etcd import Etcd
from sandbox.ports import Ports

_ENVOYS = 100
_NODES = 5_000
_SESSIONS = 100_000
_ARRIVALS_PER_SECOND = 500.0  # as many sessions end
_REPORT_INTERVAL_SECONDS = 5.0
_SETTLE_SECONDS = 30.0  # then slow start and the reconnect grace are over, and weights are stable
_MEASURE_SECONDS = 60.0
_CPU_LIMIT_PERCENT = 15.0  # of a core
_COMMANDS_PER_SESSION = 50  # commands between two reports
_TICK_SECONDS = 0.5  # between two steps of the session simulation
METHOD = """\
5,000 nodes are registered in a real etcd, without health checks. This process simulates 100 Envoys, each
with its own connection. A `tidevoy serve` child runs with `balance.report_interval: 5`.

* Sessions: 100,000. Each second 500 end, and 500 open on nodes by the latest published weights. Sessions
  migrate as the control plane requests.
* Reports: each Envoy sends a load report of some 1,000 nodes every 5 s. With the module, it also flushes
  its stats of each node on which it has had sessions since the start: only sessions
  (`balance.module_counts: sessions`), or all series.
* Figure: CPU time of all threads of the control plane over 60 s, after 30 s to settle."""


@dataclass(frozen=True, slots=True)
class _FleetCase:
    name: str
    slug: str
    module: str = ""  # module version; empty if Envoys have no module
    with_all_series: bool = False
    limit: float | None = _CPU_LIMIT_PERCENT


_CASES = (
    _FleetCase("load reports only", "load"),
    _FleetCase("modules that report only sessions", "sessions", VERSION),
    _FleetCase("modules that report all series", "all", VERSION, with_all_series=True, limit=None),
)


async def measure() -> list[BenchmarkFigure]:
    """Measure all cases. This takes about five minutes."""
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as temporary_directory:
        directory = Path(temporary_directory)
        request = await record_first_request(directory / "recorder")
        async with Etcd.start(directory) as etcd:
            await register_all(etcd.url, map(_address, range(_NODES)))
            figures = []
            for case in _CASES:
                settings = unchecked_settings(ports, directory / case.slug)
                settings["pd"] = {"urls": [etcd.url]}
                settings["balance"] = {
                    "report_interval": _REPORT_INTERVAL_SECONDS,
                    "metrics": {"enabled": False},
                }
                async with ControlPlaneProcess(
                    directory, settings, name=f"plane-{case.slug}"
                ) as control_plane:
                    figures += await _SteadyLoadTrial(control_plane, request, case).run()
            return figures


class _SteadyLoadTrial:
    def __init__(self, control_plane: ControlPlaneProcess, request: bytes, case: _FleetCase) -> None:
        nodes = [_address(number) for number in range(_NODES)]
        self._case = case
        self._pid = control_plane.process.pid
        self._api = control_plane.api_url
        self._simulator = SessionSimulator(_ENVOYS, nodes, _SESSIONS, _ARRIVALS_PER_SECOND)
        self._load_reports = FakeLoadReports(nodes)
        self._module_stats = FakeModuleStats(nodes, with_all_series=case.with_all_series)
        port = control_plane.listen_ports()[1]
        self._fleet = SimulatedFleet(port, request, _ENVOYS, module=case.module, repeat_node=False)
        self._bytes_sent = 0

    async def run(self) -> list[BenchmarkFigure]:
        for envoy in self._fleet.envoys:
            envoy.background_tasks.append(self._report_load)
            if self._case.module:
                envoy.background_tasks.append(self._flush_stats)
        first = self._fleet.envoys[0]
        first.background_tasks.append(self._run_sessions)
        first.on_response[ENDPOINTS] = self._simulator.apply_endpoints
        first.on_response[LIVE_CONFIG] = self._simulator.apply_live_config
        async with httpx2.AsyncClient(
            base_url=self._api, trust_env=False, timeout=STEP_TIMEOUT_SECONDS
        ) as api:
            await wait_nodes_active(api, _NODES)
        async with self._fleet.connected():
            await self._fleet.wait_for_all(SimulatedEnvoy.has_acked_all_types)
            await asyncio.sleep(_SETTLE_SECONDS)
            updates, bytes_sent = first.acks[ENDPOINTS], self._bytes_sent
            own_cpu, cpu = cpu_seconds(os.getpid()), cpu_seconds(self._pid)
            start = time.perf_counter()
            await asyncio.sleep(_MEASURE_SECONDS)
            elapsed = time.perf_counter() - start
            share = (cpu_seconds(self._pid) - cpu) / elapsed
            own_cpu = (cpu_seconds(os.getpid()) - own_cpu) / elapsed
            updates, bytes_sent = first.acks[ENDPOINTS] - updates, self._bytes_sent - bytes_sent
        memory = memory_mib(self._pid)
        return [
            BenchmarkFigure(
                f"CPU of the control plane, {self._case.name}",
                100 * share,
                "% of a core",
                self._case.limit,
                note=f"endpoints were published {updates} times, Envoys reported"
                f" {bytes_sent / elapsed / 2**20:.2f} MiB/s; all simulated Envoys took {100 * own_cpu:.0f} %"
                " of a core",
            ),
            BenchmarkFigure(
                f"resident memory, {self._case.name}",
                memory,
                "MiB",
                note=f"at most {peak_memory_mib(self._pid):.0f} MiB",
            ),
        ]

    async def _run_sessions(self, *_: object) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._simulator.advance(_TICK_SECONDS)

    async def _report_load(self, envoy: SimulatedEnvoy, channel: grpc.aio.Channel) -> None:
        call = channel.stream_stream("/envoy.service.load_stats.v3.LoadReportingService/StreamLoadStats")()
        await call.write(lrs_pb2.LoadStatsRequest(node=envoy.node).SerializeToString())
        live, opened = self._simulator.live[envoy.number], self._simulator.opened[envoy.number]
        opened_before = opened.copy()
        async for _ in _report_ticks(envoy):
            counts = [
                (node, live[node], total - opened_before[node])
                for node, total in opened.items()
                if live[node] or total > opened_before[node]
            ]
            opened_before = opened.copy()
            message = self._load_reports.report(counts)
            self._bytes_sent += len(message)
            await call.write(message)

    async def _flush_stats(self, envoy: SimulatedEnvoy, channel: grpc.aio.Channel) -> None:
        call = channel.stream_unary("/envoy.service.metrics.v3.MetricsService/StreamMetrics")()
        first_message = StreamMetricsMessage()
        first_message.identifier.node.id = envoy.node.id
        identifier = first_message.SerializeToString()
        live, opened = self._simulator.live[envoy.number], self._simulator.opened[envoy.number]
        commands: Counter[int] = Counter()
        async for _ in _report_ticks(envoy):
            nodes = sorted(live.keys() | opened.keys())
            for node in nodes:
                commands[node] += _COMMANDS_PER_SESSION * live[node] or (not commands[node])
            counts = [(node, live[node], commands[node]) for node in nodes]
            for message in self._module_stats.flush(envoy.number, counts):
                self._bytes_sent += len(message)
                await call.write(identifier + message)
                identifier = b""


async def _report_ticks(envoy: SimulatedEnvoy) -> AsyncIterator[None]:
    """Yield once per report interval. The Envoys' reports are evenly spread over the interval."""
    loop = asyncio.get_running_loop()
    next_tick = loop.time() + _REPORT_INTERVAL_SECONDS * envoy.number / _ENVOYS
    while True:
        next_tick += _REPORT_INTERVAL_SECONDS
        await asyncio.sleep(next_tick - loop.time())
        yield


def _address(number: int) -> str:
    return f"10.1.{number // 250}.{number % 250 + 1}:4000"
