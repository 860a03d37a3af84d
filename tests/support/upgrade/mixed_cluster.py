"""A cluster whose control planes and Envoys may be of different builds of Tidevoy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from bench.migration.rolling_restart import fetch_module_stats, parse_migration_counts
from bench.revisions import ControlPlaneOfBuild, ModuleBuild, render_bootstrap
from sandbox.etcd import Etcd
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import http_client
from sandbox.tidb import Tidb
from tests.support.controlplane.api_server import stored_events
from tests.support.e2e.envoy_replacement import SupervisedEnvoy
from tests.support.e2e.replicated_cluster import new_fake_nodes
from tests.support.waiting import wait_until

_TIMEOUT_SECONDS = 60.0


@dataclass
class MixedCluster:
    """The running cluster. The first control plane is the leader, if there are several."""

    directory: Path
    nodes: list[Tidb]
    planes: list[ControlPlaneOfBuild]
    sql_port: int
    ports: Ports
    stack: AsyncExitStack
    envoys: dict[str, SupervisedEnvoy] = field(default_factory=dict)

    async def call(self, plane: ControlPlaneOfBuild, method: str, path: str, body: Any = None) -> Any:
        """Call a control plane's API and return the JSON of its response. Raises HTTPStatusError."""
        async with http_client(plane.api_url) as api:
            response = await api.request(method, path, json=body)
            return response.raise_for_status().json()

    async def get(self, plane: ControlPlaneOfBuild, path: str) -> Any:
        return await self.call(plane, "GET", path)

    async def node(self, plane: ControlPlaneOfBuild, node: Tidb) -> dict[str, Any]:
        status: dict[str, Any] = await self.get(plane, f"/v1/nodes/{node.address}")
        return status

    async def wait_for_state(self, plane: ControlPlaneOfBuild, node: Tidb, state: str) -> None:
        """Wait until a control plane reports a node in this state. Raises AssertionError with the node."""
        last: dict[str, Any] = {}

        async def is_reached() -> bool:
            last.update(await self.node(plane, node))
            return bool(last["state"] == state)

        try:
            await wait_until(is_reached, _TIMEOUT_SECONDS)
        except TimeoutError:
            raise AssertionError(f"{plane.name}: not {state}: {json.dumps(last, indent=1)}") from None

    async def connections(self, node: Tidb) -> int:
        """Return the number of connections that a node reports on its status port."""
        async with http_client() as client:
            return int((await client.get(f"{node.status_url}/status")).json()["connections"])

    async def drain(self, plane: ControlPlaneOfBuild, node: Tidb) -> None:
        """Drain a node through this control plane, and wait until no session is left."""
        await self.call(plane, "POST", f"/v1/nodes/{node.address}/drain")
        await self.wait_for_state(plane, node, "drained")

    async def undrain(self, plane: ControlPlaneOfBuild, node: Tidb) -> None:
        """Return a node to service through this control plane."""
        await self.call(plane, "POST", f"/v1/nodes/{node.address}/undrain")
        await self.wait_for_state(plane, node, "active")

    async def fleet(self, plane: ControlPlaneOfBuild) -> dict[str, dict[str, Any]]:
        """Return the Envoys that a control plane shows, by id."""
        return {envoy["id"]: envoy for envoy in (await self.get(plane, "/v1/envoys"))["envoys"]}

    async def events(self, plane: ControlPlaneOfBuild, *kinds: str) -> list[dict[str, Any]]:
        """Return all events of these kinds since the control plane's start."""
        async with http_client(plane.api_url) as api:
            return [event for event in await stored_events(api) if event["kind"] in kinds]

    async def leader(self, plane: ControlPlaneOfBuild) -> str:
        """Return the name of the leader that a control plane shows, empty if there is none."""
        replicas = (await self.get(plane, "/v1/replicas"))["replicas"]
        return next((replica["name"] for replica in replicas if replica["is_leader"]), "")

    async def wait_for_leader(self, leader: ControlPlaneOfBuild) -> None:
        """Wait until all running control planes show this leader and each other."""
        running = [plane for plane in self.planes if plane.is_running]

        async def is_known() -> bool:
            for plane in running:
                replicas = (await self.get(plane, "/v1/replicas"))["replicas"]
                leads = {replica["name"]: replica["is_leader"] for replica in replicas}
                if not leads.get(leader.name) or any(other.name not in leads for other in running):
                    return False
            return True

        await wait_until(is_known, _TIMEOUT_SECONDS)

    async def wait_all_in_service(self) -> None:
        """Wait until all running control planes report all nodes as active."""
        for plane in self.planes:
            if plane.is_running:
                for node in self.nodes:
                    await self.wait_for_state(plane, node, "active")

    async def add_envoy(
        self,
        build: ModuleBuild,
        name: str,
        *,
        planes: Sequence[ControlPlaneOfBuild] = (),
        launch: bool = True,
    ) -> SupervisedEnvoy:
        """Create an Envoy with the module and the bootstrap of this build, and start it if `launch`.

        `planes`: the control planes that it may use, by default all.
        """
        admin = f"127.0.0.1:{self.ports.allocate()}"
        options = ["--id", name, "--admin", admin]
        for plane in planes or self.planes:
            options += ["--control-plane", plane.parsed_settings().xds.listen]
        bootstrap = await asyncio.to_thread(render_bootstrap, build, self.planes[0].config_file, *options)
        envoy = SupervisedEnvoy(self.directory, name, admin, bootstrap)
        self.envoys[name] = await self.stack.enter_async_context(envoy.supervised())
        if launch:
            await envoy.process.launch()
            await self.wait_until_up_to_date(name)
        return envoy

    async def wait_until_up_to_date(self, *names: str) -> None:
        """Wait until these Envoys have acknowledged the plan and serve. Raises AssertionError."""
        running = [plane for plane in self.planes if plane.is_running]
        last: dict[str, Any] = {}

        async def is_up_to_date() -> bool:
            for plane in running:
                last[plane.name] = fleet = await self.fleet(plane)
                for name in names:
                    status = fleet.get(name)
                    if status is None or status["connected_since"] is None:
                        return False
                    if status["acked_version"] != status["published_version"]:
                        return False
            return all([await self.envoys[name].process.is_live() for name in names])

        try:
            await wait_until(is_up_to_date, _TIMEOUT_SECONDS)
        except TimeoutError:
            raise AssertionError(f"{names} not up to date: {json.dumps(last, indent=1)}") from None

    async def migrations(self, name: str, node: Tidb) -> dict[str, int]:
        """Return the finished migrations of an Envoy's sessions from a node, by result and reason."""
        page = await fetch_module_stats(self.envoys[name].process)
        return {
            f"{result} {reason}": count
            for source, result, reason, count in parse_migration_counts(page)
            if source == node.address and count
        }


@asynccontextmanager
async def run_mixed_cluster(
    directory: Path,
    mariadb: MariaDb,
    builds: Sequence[ModuleBuild],
    *,
    nodes: int = 3,
    node_arguments: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[MixedCluster]:
    """Run nodes and one control plane of each of `builds`. With several, they share their state in PD.

    A protocol violation, or a traceback in the log of a control plane, fails the test.
    """
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(Ports())
        sql = ports.allocate()
        etcd = await stack.enter_async_context(Etcd.start(directory / "etcd", pd_timings=True))
        tidbs = new_fake_nodes(directory, ports, etcd, mariadb, nodes, node_arguments)
        planes = []
        for index, build in enumerate(builds):
            name = f"plane-{index}"
            common = {
                "pd": {"urls": [etcd.url]},
                "sql": {"listen": f"127.0.0.1:{sql}"},
                "xds": {"listen": f"127.0.0.1:{ports.allocate()}"},
                "api": {"listen": f"127.0.0.1:{ports.allocate()}"},
                "state_dir": str(directory / name),
                "drain": {"reconnect_grace": 2},
                "balance": {"slow_start": 1},
                "health": {"sql": {"interval": 0.2}, "status": {"interval": 0.2}},
                **({"replicas": {"enabled": True, "name": name}} if len(builds) > 1 else {}),
                **(settings or {}),
            }
            plane = ControlPlaneOfBuild(directory, common, name=name)
            plane.build = build
            planes.append(plane)
        for server in (*tidbs, *planes):
            await stack.enter_async_context(server)
        cluster = MixedCluster(directory, tidbs, planes, sql, ports, stack)
        if len(planes) > 1:
            await cluster.wait_for_leader(planes[0])
        await cluster.wait_all_in_service()
        yield cluster
        assert [line for node in tidbs for line in node.violations()] == []
        for plane in planes:
            assert "Traceback" not in plane.process.log.read_text(), plane.process.tail(60)
        for envoy in cluster.envoys.values():
            if envoy.process.has_started:
                assert envoy.process.bugs() == []


async def rejection_of(request: Awaitable[Any]) -> str:
    """Return the detail of the problem with which a control plane rejects this call."""
    try:
        await request
    except httpx2.HTTPStatusError as error:
        return str(error.response.json()["detail"])
    raise AssertionError("the control plane has accepted the call")
