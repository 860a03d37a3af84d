"""Run fake nodes with thousands of sessions behind one single-worker Envoy, and a control plane."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from bench.control_plane.registrations import count_up_to_date_envoys, unchecked_settings
from bench.load_client import PROGRAM_NAME, LoadClientResult
from bench.machine import ResourceUsage
from bench.migration import event_loop_latency
from bench.migration.event_loop_latency import LoopDurations
from bench.migration.rolling_restart import fetch_module_stats, parse_samples
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.child_process import ProcessFailed
from sandbox.control_plane import ControlPlaneProcess
from sandbox.envoy import EnvoyProcess
from sandbox.local_cluster import WaitTimeout
from sandbox.ports import Ports
from sandbox.server import Server, http_responds, sends_mysql_greeting

_STEP_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.1
_STABLE_READINGS = 10
"""Equal samples in a row that count as stable; so many, because Envoy closes connections after a delay."""
_NODE_WEIGHT = 100  # of all nodes but the isolated one, which has weight 1
_SESSIONS_METRIC = "envoy_tidevoy_sessions"
STATS_FLUSH_WAIT_SECONDS = 2.5
"""Time until Envoy's own statistics are complete. The Envoy of this benchmark flushes them every second."""
_FLUSH_INTERVAL_REPLACEMENT = ("stats_flush_interval: 5s", "stats_flush_interval: 1s")


class FakeNodeProcess(Server):
    """Fake nodes in one process (bench/migration/fake_node.py), each with an address of 127.0.0.0/8."""

    def __init__(self, directory: Path, ports: Ports, *, name: str, key: str) -> None:
        super().__init__(name, directory)
        self.port, self.status = ports.allocate(), ports.allocate()
        self._key = key

    def command(self) -> list[str]:
        arguments = [f"--port={self.port}", f"--status={self.status}", f"--key={self._key}"]
        return [sys.executable, "-P", "-m", "bench.migration.fake_node", *arguments]

    def listen_ports(self) -> list[int]:
        return [self.port, self.status]

    async def is_serving(self) -> bool:
        return await http_responds(f"http://127.0.0.1:{self.status}/")

    def address(self, number: int) -> str:
        """Return the address of a node, from 0 to 253."""
        return f"127.9.0.{number + 1}:{self.port}"

    async def fetch_report(self) -> Mapping[str, Any]:
        """Return the JSON of `SharedNodeState.report_as_json`."""
        async with httpx2.AsyncClient(trust_env=False, timeout=10.0) as client:
            response = (await client.get(f"http://127.0.0.1:{self.status}/")).raise_for_status()
        report: dict[str, Any] = response.json()
        return report


@dataclass(frozen=True)
class NodesReport:
    """The merged reports of all nodes. `logins` excludes migrations; `emptied_at`: see SharedNodeState."""

    sessions: Counter[str] = field(default_factory=Counter)
    logins: Counter[str] = field(default_factory=Counter)
    emptied_at: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def merge(self, report: Mapping[str, Any]) -> None:
        self.sessions.update(report["sessions"])
        self.logins.update(report["logins"])
        self.emptied_at.update(report["emptied"])
        self.violations.extend(report["violations"])


class MigrationCluster:
    def __init__(
        self,
        node_processes: Sequence[FakeNodeProcess],
        api: httpx2.AsyncClient,
        envoy: EnvoyProcess,
        port: int,
    ) -> None:
        self.envoy, self.port = envoy, port
        self._node_processes = node_processes
        self._api = api

    @property
    def pid(self) -> int:
        return self.envoy.process.pid

    async def wait_stable_resources(self) -> ResourceUsage:
        """Return Envoy's resources when the number of its open files is stable. Raises TimeoutError."""
        readings: list[ResourceUsage] = []
        async with asyncio.timeout(_STEP_TIMEOUT_SECONDS):
            while True:
                readings.append(ResourceUsage.of_process(self.pid))
                latest = readings[-_STABLE_READINGS:]
                descriptor_counts = {(usage.open_files, usage.epoll_entries) for usage in latest}
                if len(latest) == _STABLE_READINGS and len(descriptor_counts) == 1:
                    return latest[-1]
                await asyncio.sleep(_POLL_SECONDS)

    async def fetch_nodes_report(self) -> NodesReport:
        """Return the reports of all nodes. Raises ProcessFailed if the proxy has violated the protocol."""
        report = NodesReport()
        for process in self._node_processes:
            report.merge(await process.fetch_report())
        if report.violations:
            raise ProcessFailed(
                "Envoy", "has violated the protocol on a connection to a node", "\n".join(report.violations)
            )
        return report

    async def fetch_loop_durations(self) -> LoopDurations:
        """Return the worker's loop durations. They are up to STATS_FLUSH_WAIT_SECONDS old."""
        return event_loop_latency.parse_stats((await self.envoy.get(event_loop_latency.STATS_PATH)).json())

    async def drain(self, *addresses: str) -> float:
        """Drain nodes; return the time of the request (time.monotonic)."""
        requested_at = time.monotonic()
        await self._post("drain", addresses)
        return requested_at

    async def undrain(self, *addresses: str) -> None:
        """Undrain nodes, and wait until Envoy has applied the change."""
        await self._post("undrain", addresses)
        await self.wait_envoy_up_to_date()

    async def wait_empty(self, address: str) -> float:
        """Wait until the last session has left; return when it left (time.monotonic). Raises WaitTimeout."""
        report = await self.wait_until(lambda report: address in report.emptied_at, f"{address} to be empty")
        return report.emptied_at[address]

    async def wait_until(self, predicate: Callable[[NodesReport], bool], goal: str) -> NodesReport:
        """Wait until the predicate is true for the merged report. Raises WaitTimeout."""
        deadline = time.monotonic() + _STEP_TIMEOUT_SECONDS
        while not predicate(report := await self.fetch_nodes_report()):
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"waited {_STEP_TIMEOUT_SECONDS:.0f} s for {goal}; sessions: {dict(report.sessions)}"
                )
            await asyncio.sleep(_POLL_SECONDS)
        return report

    async def wait_envoy_up_to_date(self) -> None:
        """Wait until Envoy has acknowledged the published version. Raises TimeoutError."""
        async with asyncio.timeout(_STEP_TIMEOUT_SECONDS):
            while not await count_up_to_date_envoys(self._api, "module"):  # noqa: ASYNC110 - REST has no event
                await asyncio.sleep(_POLL_SECONDS)

    async def count_module_sessions(self) -> int:
        """Return the module's session count, summed over all nodes and states."""
        page = await fetch_module_stats(self.envoy)
        return sum(int(sample.value) for sample in parse_samples(page, _SESSIONS_METRIC))

    async def _post(self, verb: str, addresses: Sequence[str]) -> None:
        for address in addresses:
            (await self._api.post(f"/v1/nodes/{address}/{verb}")).raise_for_status()


@asynccontextmanager
async def run_cluster(
    directory: Path,
    module: Path,
    nodes: int,
    *,
    with_isolated_node: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[tuple[MigrationCluster, list[str]]]:
    """Run an Envoy in front of `nodes` fake nodes; yield the cluster and the nodes' addresses.

    `with_isolated_node`: add a last node in a separate process, which gets hardly any sessions. `settings`:
    additional sections of the configuration. Rebalancing is off, so only drains migrate sessions.
    """
    key = secrets.token_hex(16)
    async with AsyncExitStack() as running:
        ports = running.enter_context(Ports())
        node_processes = [
            FakeNodeProcess(directory, ports, name=name, key=key)
            for name in ("nodes", "isolated")[: 1 + with_isolated_node]
        ]
        for process in node_processes:
            await running.enter_async_context(process)
        addresses = [node_processes[0].address(number) for number in range(nodes)]
        configured_nodes = [{"address": address, "weight": _NODE_WEIGHT} for address in addresses]
        if with_isolated_node:
            addresses.append(node_processes[1].address(nodes))
            configured_nodes.append({"address": addresses[-1], "weight": 1})
        own_settings = unchecked_settings(ports, directory / "state")
        own_settings |= {"nodes": configured_nodes, "rebalance": {"enabled": False}}
        control_plane = ControlPlaneProcess(directory, {**own_settings, **(settings or {})})
        parsed_settings = control_plane.parsed_settings()
        bootstrap = render_bootstrap(
            parsed_settings,
            control_planes=[parsed_settings.xds.listen],
            node_id="measured",
            admin="127.0.0.1:0",
            module=str(module),
        )
        envoy = EnvoyProcess(
            bootstrap.replace(*_FLUSH_INTERVAL_REPLACEMENT) + "\n" + event_loop_latency.ENABLE_STATS_YAML,
            directory,
            concurrency=1,
        )
        await running.enter_async_context(control_plane)
        await running.enter_async_context(envoy)
        api = await running.enter_async_context(
            httpx2.AsyncClient(base_url=control_plane.api_url, trust_env=False, timeout=30.0)
        )
        listen = int(parsed_settings.sql.listen.rpartition(":")[2])
        cluster = MigrationCluster(node_processes, api, envoy, listen)
        await cluster.wait_envoy_up_to_date()
        async with asyncio.timeout(_STEP_TIMEOUT_SECONDS):
            while not await sends_mysql_greeting(listen):  # noqa: ASYNC110 - Envoy sends no event
                await asyncio.sleep(_POLL_SECONDS)
        yield cluster, addresses
        await cluster.fetch_nodes_report()
        if "a bug:" in envoy.process.output():
            raise ProcessFailed("Envoy", "has logged a bug of the module", envoy.process.tail())


def check_all_alive(results: Sequence[LoadClientResult], sessions: int) -> None:
    """Raise ProcessFailed unless every idle session still answered when the client program ended."""
    (result,) = results
    if result.errors or result.figures["alive"] != sessions:
        raise ProcessFailed(
            PROGRAM_NAME, f"lost sessions: {result.figures['alive']} of {sessions} answer", result.error_text
        )
