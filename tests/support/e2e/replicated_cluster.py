"""Three control planes on one etcd with PD's timings, simulated servers, one Envoy, and clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.control_plane import ControlPlaneProcess
from sandbox.envoy import EnvoyProcess
from sandbox.etcd import Etcd
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import http_client
from sandbox.tidb import FakeTidb, Tidb
from tests.support.e2e.cluster import CountingClient, open_session
from tests.support.module.bootstrap import require_module
from tests.support.waiting import wait_until

REPLICA_COUNT = 3
_PAUSE_SECONDS = 0.02  # Between two statements of a client.


@dataclass
class ReplicatedCluster:
    """The parts of the running cluster."""

    etcd: Etcd
    nodes: list[Tidb]
    control_planes: list[ControlPlaneProcess]
    envoy: EnvoyProcess
    sql_port: int
    http: dict[str, httpx2.AsyncClient]  # A client for each control plane, by its name.

    def running_control_planes(self) -> list[ControlPlaneProcess]:
        """Return the control planes that run."""
        return [plane for plane in self.control_planes if plane.is_running]

    def api(self) -> httpx2.AsyncClient:
        """Return a client of the first control plane that runs."""
        return self.http[self.running_control_planes()[0].name]

    async def get(self, plane: ControlPlaneProcess, path: str) -> dict[str, Any]:
        """Return the response of a control plane."""
        response: dict[str, Any] = (await self.http[plane.name].get(path)).raise_for_status().json()
        return response

    async def wait_for_leader(self, *, excluded_name: str = "", seconds: float = 30.0) -> ControlPlaneProcess:
        """Wait until a control plane other than `excluded_name` reports itself as leader, and return it."""
        leaders: list[ControlPlaneProcess] = []

        async def has_leader() -> bool:
            leaders.clear()
            for plane in self.running_control_planes():
                if plane.name != excluded_name and await self._reports_leadership(plane):
                    leaders.append(plane)
            return bool(leaders)

        await wait_until(has_leader, seconds)
        return leaders[0]

    async def _reports_leadership(self, plane: ControlPlaneProcess) -> bool:
        try:
            replicas = (await self.get(plane, "/v1/replicas"))["replicas"]
        except httpx2.TransportError:
            return False
        return any(replica["is_self"] and replica["is_leader"] for replica in replicas)

    async def states(self, plane: ControlPlaneProcess) -> dict[str, str]:
        """Return the state of each node by address, according to one control plane."""
        nodes = (await self.get(plane, "/v1/nodes"))["nodes"]
        return {node["address"]: node["state"] for node in nodes}

    async def nodes_with_drain(self, plane: ControlPlaneProcess) -> set[str]:
        """Return the nodes that are draining or drained, according to one control plane."""
        nodes = (await self.get(plane, "/v1/nodes"))["nodes"]
        return {node["address"] for node in nodes if node["drain"] is not None}

    async def wait_all_in_service(self, seconds: float = 60.0) -> None:
        """Wait until every running control plane reports all nodes as active."""

        async def all_active() -> bool:
            for plane in self.running_control_planes():
                states = await self.states(plane)
                if [states.get(node.address) for node in self.nodes] != ["active"] * len(self.nodes):
                    return False
            return True

        await wait_until(all_active, seconds)


def new_fake_nodes(
    directory: Path, ports: Ports, etcd: Etcd, mariadb: MariaDb, count: int, arguments: Sequence[str]
) -> list[Tidb]:
    """Return simulated TiDB servers, not started yet."""
    return [
        FakeTidb(
            directory,
            ports.allocate(),
            ports.allocate(),
            name=f"tidb-{index}",
            pd=[etcd.url],
            mariadb=mariadb.address,
            arguments=arguments,
        )
        for index in range(count)
    ]


@asynccontextmanager
async def run_replicated_cluster(
    directory: Path,
    mariadb: MariaDb,
    *,
    nodes: int,
    arguments: tuple[str, ...],
    settings: Mapping[str, Any],
) -> AsyncIterator[ReplicatedCluster]:
    """Run the cluster with all parts in service. A protocol violation fails the test."""
    async with AsyncExitStack() as exit_stack:
        ports = exit_stack.enter_context(Ports())
        sql = ports.allocate()
        etcd = await exit_stack.enter_async_context(Etcd.start(directory / "etcd", pd_timings=True))
        tidbs = new_fake_nodes(directory, ports, etcd, mariadb, nodes, arguments)
        planes = [
            ControlPlaneProcess(
                directory,
                {
                    "pd": {"urls": [etcd.url]},
                    "sql": {"listen": f"127.0.0.1:{sql}"},
                    "xds": {"listen": f"127.0.0.1:{ports.allocate()}"},
                    "api": {"listen": f"127.0.0.1:{ports.allocate()}"},
                    "state_dir": str(directory / name),
                    "replicas": {"enabled": True, "name": name},
                    "drain": {"reconnect_grace": 2},
                    "balance": {"slow_start": 1},
                    **settings,
                },
                name=name,
            )
            for name in (f"plane-{index}" for index in range(REPLICA_COUNT))
        ]
        bootstrap = render_bootstrap(
            planes[0].parsed_settings(),
            control_planes=[plane.parsed_settings().xds.listen for plane in planes],
            node_id="envoy-1",
            admin="127.0.0.1:0",
            module=str(require_module()),
        )
        envoy = EnvoyProcess(bootstrap, directory, concurrency=2)
        for server in (*tidbs, *planes, envoy):
            await exit_stack.enter_async_context(server)
        http = {
            plane.name: await exit_stack.enter_async_context(http_client(plane.api_url)) for plane in planes
        }
        cluster = ReplicatedCluster(etcd, tidbs, planes, envoy, sql, http)
        await cluster.wait_for_leader()
        await cluster.wait_all_in_service()
        await wait_until(envoy.is_live, 30)
        yield cluster
        assert [line for node in tidbs for line in node.violations()] == []
        for plane in planes:
            assert "Traceback" not in plane.process.log.read_text(), plane.process.tail(60)


class WorkingClients:
    """Clients that run statements repeatedly. Their failures are recorded."""

    def __init__(self) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self.slowest = 0.0

    @classmethod
    @asynccontextmanager
    async def run(cls, port: int, count: int) -> AsyncIterator[WorkingClients]:
        """Run this many clients during the block. Raises AssertionError at its end if a client failed."""
        sessions = cls()
        async with AsyncExitStack() as exit_stack:
            tasks = []
            for _ in range(count):
                client = await open_session(exit_stack, port)
                tasks.append(asyncio.create_task(sessions._work(client)))
            try:
                yield sessions
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        assert sessions.failures == []

    async def wait_for_answers(self, count: int) -> None:
        """Wait until the clients have received this many more answers."""
        target = self.answers + count
        await wait_until(lambda: self.answers >= target, 60)

    async def _work(self, client: CountingClient) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                started_at = loop.time()
                response = await client.query("do 1")
                if response[0] != 0x00:
                    raise ValueError(f"unexpected response {response!r}")
                self.answers += 1
                self.slowest = max(self.slowest, loop.time() - started_at)
                await asyncio.sleep(_PAUSE_SECONDS)
        except Exception as error:
            self.failures.append(f"after {self.answers} answers: {type(error).__name__}: {error}")


@dataclass
class EnvoyWatcher:
    """Samples endpoint and listener counts. Checks that no listener changes and no cluster is removed."""

    envoy: EnvoyProcess
    min_endpoints: int = 10**9
    samples_without_listener: int = 0
    sample_count: int = 0
    problems: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[EnvoyWatcher]:
        """Sample during the block."""
        before = await self._listener_and_cluster_counters()
        task = asyncio.create_task(self._sample())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert self.problems == []
        assert self.sample_count > 0
        after = await self._listener_and_cluster_counters()
        assert after == before, (before, after)

    async def _listener_and_cluster_counters(self) -> dict[str, int]:
        """Return how often listeners were added, changed or removed, and how often clusters were removed."""
        names = r"^(listener_manager\.listener_(added|modified|removed)|cluster_manager\.cluster_removed)$"
        return await self.envoy.stats(names)

    async def _sample(self) -> None:
        try:
            while True:
                stats = await self.envoy.stats(
                    r"^(cluster\.tidb\.membership_total|listener_manager\.total_listeners_active)$"
                )
                self.min_endpoints = min(self.min_endpoints, stats["cluster.tidb.membership_total"])
                self.samples_without_listener += stats["listener_manager.total_listeners_active"] < 1
                self.sample_count += 1
                await asyncio.sleep(0.05)
        except (httpx2.HTTPError, KeyError, json.JSONDecodeError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
