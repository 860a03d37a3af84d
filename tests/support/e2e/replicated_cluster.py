"""Three control planes on one etcd with PD's timings, stand-ins, an Envoy that knows all of them, clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
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
from sandbox.tidb import FakeTidb, Tidb
from tests.support.e2e.cluster import CountingClient, counting_client
from tests.support.module.bootstrap import require_module
from tests.support.waiting import wait_until

REPLICA_COUNT = 3
_PAUSE_SECONDS = 0.02  # seconds between two statements of a client


@dataclass
class ReplicatedCluster:
    """The running parts."""

    etcd: Etcd
    nodes: list[Tidb]
    control_planes: list[ControlPlaneProcess]
    envoy: EnvoyProcess
    sql_port: int
    http: dict[str, httpx2.AsyncClient]  # by the name of the control plane

    def running_control_planes(self) -> list[ControlPlaneProcess]:
        """Those that run."""
        return [plane for plane in self.control_planes if plane.is_running]

    def api(self) -> httpx2.AsyncClient:
        """The first one that runs."""
        return self.http[self.running_control_planes()[0].name]

    async def get(self, plane: ControlPlaneProcess, path: str) -> dict[str, Any]:
        """What one of them answers."""
        answer: dict[str, Any] = (await self.http[plane.name].get(path)).raise_for_status().json()
        return answer

    async def wait_for_leader(self, *, excluded_name: str = "", seconds: float = 30.0) -> ControlPlaneProcess:
        """The one that says that it leads, once there is one; `but`: the name of one that does not count."""
        leaders: list[ControlPlaneProcess] = []

        async def found_one() -> bool:
            leaders.clear()
            for plane in self.running_control_planes():
                if plane.name != excluded_name and await self._says_it_leads(plane):
                    leaders.append(plane)
            return bool(leaders)

        await wait_until(found_one, seconds)
        return leaders[0]

    async def _says_it_leads(self, plane: ControlPlaneProcess) -> bool:
        try:
            listed = (await self.get(plane, "/v1/replicas"))["replicas"]
        except httpx2.TransportError:
            return False
        return any(replica["is_us"] and replica["leads"] for replica in listed)

    async def states(self, plane: ControlPlaneProcess) -> dict[str, str]:
        """The state of each node by address, as one control plane says."""
        listed = (await self.get(plane, "/v1/nodes"))["nodes"]
        return {node["address"]: node["state"] for node in listed}

    async def drained(self, plane: ControlPlaneProcess) -> set[str]:
        """The nodes that are drained, as one control plane says."""
        listed = (await self.get(plane, "/v1/nodes"))["nodes"]
        return {node["address"] for node in listed if node["drain"] is not None}

    async def wait_all_in_service(self, seconds: float = 60.0) -> None:
        """Returns when every control plane that runs says that all nodes are active."""

        async def settled() -> bool:
            for plane in self.running_control_planes():
                states = await self.states(plane)
                if [states.get(node.address) for node in self.nodes] != ["active"] * len(self.nodes):
                    return False
            return True

        await wait_until(settled, seconds)


@asynccontextmanager
async def run_replicated_cluster(
    directory: Path,
    mariadb: MariaDb,
    *,
    nodes: int,
    arguments: tuple[str, ...],
    settings: Mapping[str, Any],
) -> AsyncIterator[ReplicatedCluster]:
    """All of it in service; a client that breaks the protocol in a stand-in's sight fails the test."""
    async with AsyncExitStack() as running:
        ports = running.enter_context(Ports())
        sql = ports.allocate()
        etcd = await running.enter_async_context(Etcd.start(directory / "etcd", pd_timings=True))
        tidbs: list[Tidb] = [
            FakeTidb(
                directory,
                ports.allocate(),
                ports.allocate(),
                name=f"tidb-{index}",
                pd=[etcd.url],
                mariadb=mariadb.address,
                arguments=arguments,
            )
            for index in range(nodes)
        ]
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
                    "drain": {"fleet_return": 2},
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
            await running.enter_async_context(server)
        http = {
            plane.name: await running.enter_async_context(
                httpx2.AsyncClient(base_url=plane.api_url, trust_env=False, timeout=10.0)
            )
            for plane in planes
        }
        site = ReplicatedCluster(etcd, tidbs, planes, envoy, sql, http)
        await site.wait_for_leader()
        await site.wait_all_in_service()
        await wait_until(envoy.is_live, 30)
        yield site
        assert [line for node in tidbs for line in node.violations()] == []
        for plane in planes:
            assert "Traceback" not in plane.process.log.read_text(), plane.process.tail(60)


class WorkingClients:
    """Clients that ask one thing after the other, all the time; the first that fails is told."""

    def __init__(self) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self.slowest = 0.0

    @classmethod
    @asynccontextmanager
    async def run(cls, port: int, count: int) -> AsyncIterator[WorkingClients]:
        """So many work inside the block. AssertionError at its end when one failed."""
        sessions = cls()
        async with AsyncExitStack() as opened:
            tasks = []
            for _ in range(count):
                one = await opened.enter_async_context(counting_client(port))
                assert (await one.log_in())[0] == 0x00
                tasks.append(asyncio.create_task(sessions._work(one)))
            try:
                yield sessions
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        assert sessions.failures == []

    async def _work(self, one: CountingClient) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                begin = loop.time()
                answer = await one.query("do 1")
                if answer[0] != 0x00:
                    raise ValueError(f"answered with {answer!r}")
                self.answers += 1
                self.slowest = max(self.slowest, loop.time() - begin)
                await asyncio.sleep(_PAUSE_SECONDS)
        except Exception as error:
            self.failures.append(f"after {self.answers} answers: {type(error).__name__}: {error}")


@dataclass
class EnvoyWatcher:
    """What an Envoy had at least while it was looked at, and what it counted of its own changes."""

    envoy: EnvoyProcess
    min_endpoints: int = 10**9
    samples_without_listener: int = 0
    sample_count: int = 0
    problems: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[EnvoyWatcher]:
        """It looks all the time inside the block."""
        before = await self._change_counters()
        task = asyncio.create_task(self._sample())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert self.problems == []
        assert self.sample_count > 0
        after = await self._change_counters()
        assert after == before, (before, after)

    async def _change_counters(self) -> dict[str, int]:
        """Of listeners and clusters: how often one came, changed or went."""
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
