"""A whole cluster on this machine: real or simulated PD and TiDB servers, a control plane and an Envoy."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import httpx2

from controlplane.model.nodes import CLUSTER_NAME
from controlplane.xds.bootstrap import module_path
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.child_process import ProcessFailed
from sandbox.cluster import Cluster, FakeCluster, ProgressCallback
from sandbox.control_plane import ControlPlaneProcess
from sandbox.envoy import EnvoyProcess
from sandbox.etcd import Etcd
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import Server, http_client, sends_mysql_greeting, stop_all
from sandbox.tidb import Tidb
from sandbox.tidb_binaries import TidbBinaries
from sandbox.tidb_cluster import TidbCluster

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class AdvertisedPorts:
    """The ports that users and scripts connect to, all on 127.0.0.1."""

    sql: int
    api: int
    xds: int
    admin: int

    @classmethod
    def allocate(cls, ports: Ports) -> Self:
        return cls(ports.allocate(), ports.allocate(), ports.allocate(), ports.allocate())


class WaitTimeout(AssertionError):
    """A condition did not become true in time."""


class LocalCluster:
    """The running parts of a cluster. Each part can be restarted alone and keeps its ports and data."""

    def __init__(
        self,
        directory: Path,
        ports: Ports,
        advertised: AdvertisedPorts,
        cluster: Cluster,
        control_plane: ControlPlaneProcess,
        envoy: EnvoyProcess,
        *,
        own_cluster: bool,
    ) -> None:
        self.directory, self.ports, self.advertised = directory.absolute(), ports, advertised
        self.cluster, self.control_plane, self.envoy = cluster, control_plane, envoy
        self._own_cluster = own_cluster
        # How many violations of each node earlier users of a shared cluster have caused.
        self._known_violations = {node.name: len(node.violations()) for node in cluster.tidb}
        self.api = http_client(control_plane.api_url)

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        directory: Path,
        *,
        nodes: int = 3,
        ports: Ports | None = None,
        advertised: AdvertisedPorts | None = None,
        mariadb: MariaDb | None = None,
        graceful_wait: float = 0.0,
        node_arguments: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        pd_timings: bool = False,
        concurrency: int = 2,
        delta: bool = False,
        module: Path | Literal["auto"] | None = "auto",
        envoy_supervisor: Path | None = None,
        tidb_bin: TidbBinaries | None = None,
        cluster: Cluster | None = None,
        control_plane: type[ControlPlaneProcess] = ControlPlaneProcess,
        on_progress: ProgressCallback = lambda text: None,
    ) -> AsyncIterator[LocalCluster]:
        """Start everything; yield once `nodes` nodes are active and Envoy forwards a server greeting.

        `ports` allocates ports, and has already claimed `advertised`; by default, free ports are used.
        `mariadb` is a running server to use; it is not stopped at the end. `settings` are merged over
        `_default_settings`. `graceful_wait` is how many seconds a TiDB server waits after SIGTERM.
        `node_arguments` are passed to all TiDB servers. With `delta`, Envoy uses incremental xDS. `module` is
        the file of Tidevoy's module for Envoy; "auto" stands for the module of this checkout, if it is built,
        and None for no module. `envoy_supervisor` is the program that runs the Envoy; None: it has none.
        `control_plane` is the class of the control plane. `on_progress` is called with a text before each
        step. The data and addresses of an earlier start in `directory` are reused.

        With `tidb_bin`, PD, store and TiDB servers are real and not simulated. `cluster` is a running
        cluster; it is neither started nor stopped here, and the other options about nodes are ignored.
        """
        with Ports() as own_ports:
            own_cluster = cluster is None
            ports = ports or own_ports
            advertised = advertised or AdvertisedPorts.allocate(ports)
            options: dict[str, Any] = {"graceful_wait": graceful_wait, "arguments": node_arguments}
            if cluster is not None:
                nodes = len(cluster.tidb)
            elif tidb_bin is not None:
                cluster = TidbCluster(directory, ports, tidb_bin, **options)
            else:
                cluster = FakeCluster(directory, ports, mariadb=mariadb, pd_timings=pd_timings, **options)
            defaults = _default_settings(directory, cluster.pd_url, advertised)
            server = control_plane(directory, _deep_merge(defaults, settings or {}))
            module_file = module_path.find_module() if module == "auto" else module
            bootstrap = render_bootstrap(
                server.parsed_settings(),
                control_planes=[f"127.0.0.1:{advertised.xds}"],
                node_id="envoy-1",
                admin=f"127.0.0.1:{advertised.admin}",
                module=None if module_file is None else str(module_file),
                delta=delta,
            )
            envoy = EnvoyProcess(bootstrap, directory, concurrency=concurrency, supervisor=envoy_supervisor)
            local_cluster = cls(directory, ports, advertised, cluster, server, envoy, own_cluster=own_cluster)
            try:
                await local_cluster._launch(nodes, on_progress)
                yield local_cluster
            finally:
                on_progress("Stopping")
                await local_cluster._stop()

    @property
    def sql_port(self) -> int:
        """The port of Envoy's listener, where SQL clients connect."""
        return self.advertised.sql

    @property
    def tidb(self) -> list[Tidb]:
        """The TiDB servers, in the order of their first start."""
        return self.cluster.tidb

    @property
    def etcd(self) -> Etcd:
        """The etcd in place of PD. Raises RuntimeError for a cluster of real servers."""
        return self._fake_cluster.etcd

    @property
    def mariadb(self) -> MariaDb:
        """The database behind simulated TiDB servers. Raises RuntimeError for a cluster of real servers."""
        return self._fake_cluster.mariadb

    def servers(self) -> Iterator[Server]:
        """Yield all parts that this cluster owns, in start order."""
        if self._own_cluster:
            yield from self.cluster.servers()
        yield self.control_plane
        yield self.envoy

    async def add_tidb(self, *arguments: str) -> Tidb:
        """Start one more TiDB server, with these additional arguments, and wait until it serves."""
        node = self.cluster.new_node(arguments)
        await node.launch()
        return node

    async def nodes(self) -> dict[str, dict[str, Any]]:
        """Return the nodes of `GET /v1/nodes` by address."""
        response = (await self.api.get("/v1/nodes")).raise_for_status()
        return {node["address"]: node for node in response.json()["nodes"]}

    async def states(self) -> dict[str, str]:
        return {address: node["state"] for address, node in (await self.nodes()).items()}

    async def has_active_nodes(self, count: int) -> bool:
        """Return whether at least `count` nodes are active, and Envoy has as many healthy endpoints.

        A node is active shortly before Envoy has its endpoint. Until then Envoy denies logins.
        """
        if list((await self.states()).values()).count("active") < count:
            return False
        hosts = (await self.envoy.hosts(CLUSTER_NAME)).values()
        healthy = [host for host in hosts if host["health_status"]["eds_health_status"] == "HEALTHY"]
        return len(healthy) >= count

    async def is_in_service(self, nodes: int) -> bool:
        """Return whether clients can log in: `nodes` nodes are active, and Envoy forwards a greeting."""
        if not await self.has_active_nodes(nodes) or not await self.envoy.is_live():
            return False
        return nodes == 0 or await sends_mysql_greeting(self.sql_port)

    def violations(self) -> list[str]:
        """Return the lines about protocol violations that the nodes have logged since the start."""
        return [
            line
            for node in self.tidb
            for line in node.violations()[self._known_violations.get(node.name, 0) :]
        ]

    def bugs(self) -> list[str]:
        """Return the lines about bugs that the module has logged, also before Envoy's last start."""
        return self.envoy.bugs()

    async def wait_until(
        self, predicate: Callable[[], bool | Awaitable[bool]], goal: str, timeout: float = 15.0
    ) -> None:
        """Wait until `predicate` is true. Raises WaitTimeout, which describes the last error or the nodes.

        A connection or HTTP error counts as false: the control plane may still be starting.
        """
        deadline = time.monotonic() + timeout
        reason = ""
        while True:
            try:
                result = predicate()
                if inspect.isawaitable(result):
                    result = await result
                if result:
                    return
                reason = ""
            except (httpx2.HTTPError, OSError) as error:
                reason = f" ({type(error).__name__}: {error})"
            if time.monotonic() > deadline:
                details = reason or await self._describe_nodes()
                raise WaitTimeout(f"waited {timeout:.0f} s for: {goal}{details}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _describe_nodes(self) -> str:
        """Describe the nodes and Envoys as the control plane sees them; empty if it does not respond."""
        try:
            nodes = await self.nodes()
            envoys = (await self.api.get("/v1/envoys")).raise_for_status().json()["envoys"]
        except (httpx2.HTTPError, OSError):
            return ""
        node_keys = ("state", "eds_health", "weight", "published_weight", "sessions", "reason")
        envoy_keys = ("id", "connected_since", "acked_version", "published_version")
        lines = [f"{address}: { ({key: node[key] for key in node_keys}) }" for address, node in nodes.items()]
        lines += [f"Envoy { ({key: envoy[key] for key in envoy_keys}) }" for envoy in envoys]
        return "\n  ".join(("", *lines))

    async def wait_for_first_failure(self) -> ProcessFailed:
        """Wait until any part exits, and return the exit as an error."""
        tasks = [asyncio.create_task(server.wait_for_failure()) for server in self.servers()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _fake_cluster(self) -> FakeCluster:
        if not isinstance(self.cluster, FakeCluster):
            raise RuntimeError("a cluster of real TiDB servers has neither etcd nor MariaDB")
        return self.cluster

    async def _launch(self, nodes: int, on_progress: ProgressCallback) -> None:
        if self._own_cluster:
            await self.cluster.launch(nodes, on_progress)
        on_progress("Starting the control plane")
        await self.control_plane.launch()
        on_progress("Starting Envoy")
        await self.envoy.launch()
        on_progress("Waiting until the nodes are in service")
        await self.wait_until(lambda: self.is_in_service(nodes), f"{nodes} active nodes behind Envoy", 30.0)

    async def _stop(self) -> None:
        """Stop all parts in any state: first Envoy, last the servers with data."""
        try:
            await stop_all([self.envoy], gracefully=True)
            await stop_all([self.control_plane], gracefully=True)
            if self._own_cluster:
                await self.cluster.stop()
        except BaseException:
            await stop_all(list(self.servers()), gracefully=False)
            raise
        finally:
            await self.api.aclose()


def _default_settings(directory: Path, pd_url: str, advertised: AdvertisedPorts) -> dict[str, Any]:
    return {
        "pd": {"urls": [pd_url]},
        "sql": {"listen": f"127.0.0.1:{advertised.sql}"},
        "xds": {"listen": f"127.0.0.1:{advertised.xds}"},
        "api": {"listen": f"127.0.0.1:{advertised.api}"},
        "state_dir": str(directory.absolute() / "state"),
        # Two seconds are enough, since the only Envoy reconnects at once.
        "drain": {"reconnect_grace": 2.0},
    }


def _deep_merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base`, overridden by `overrides`. Nested mappings are merged."""
    result = dict(base)
    for key, value in overrides.items():
        existing = result.get(key)
        both = isinstance(existing, Mapping) and isinstance(value, Mapping)
        result[key] = _deep_merge(existing, value) if both else value  # type: ignore[arg-type]
    return result
