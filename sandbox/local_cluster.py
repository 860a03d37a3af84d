"""A whole cluster on this machine: PD, TiDB and its data, real or simulated; control plane, Envoy."""

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

from controlplane.xds.bootstrap import module_path
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.child_process import ProcessFailed
from sandbox.cluster import Cluster, FakeCluster, ProgressCallback, stop_all
from sandbox.control_plane import ControlPlaneProcess
from sandbox.envoy import EnvoyProcess
from sandbox.etcd import Etcd
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import Server, sends_mysql_greeting
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
        """Allocate free ports."""
        return cls(ports.allocate(), ports.allocate(), ports.allocate(), ports.allocate())


class WaitTimeout(AssertionError):
    """A condition did not become true in time."""


class LocalCluster:
    """The running parts. Each can be stopped and restarted by itself, on its ports and data."""

    def __init__(
        self,
        directory: Path,
        ports: Ports,
        advertised: AdvertisedPorts,
        cluster: Cluster,
        *,
        own_cluster: bool,
        settings: Mapping[str, Any],
        concurrency: int,
        delta: bool,
        module: Path | None,
        control_plane: type[ControlPlaneProcess] = ControlPlaneProcess,
    ) -> None:
        self.directory = directory.absolute()
        self.ports = ports
        self.advertised = advertised
        self.cluster = cluster
        self._own_cluster = own_cluster
        self._known_violations = (
            {} if own_cluster else {node.name: len(node.violations()) for node in cluster.tidb}
        )
        self.control_plane = control_plane(self.directory, _deep_merge(self._defaults(), settings))
        bootstrap = render_bootstrap(
            self.control_plane.parsed_settings(),
            control_planes=[f"127.0.0.1:{advertised.xds}"],
            node_id="envoy-1",
            admin=f"127.0.0.1:{advertised.admin}",
            module=None if module is None else str(module),
            delta=delta,
        )
        self.envoy = EnvoyProcess(bootstrap, self.directory, concurrency=concurrency)
        self.api = httpx2.AsyncClient(base_url=self.control_plane.api_url, trust_env=False, timeout=10.0)

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
        tidb_bin: TidbBinaries | None = None,
        cluster: Cluster | None = None,
        control_plane: type[ControlPlaneProcess] = ControlPlaneProcess,
        on_progress: ProgressCallback = lambda text: None,
    ) -> AsyncIterator[LocalCluster]:
        """Start everything; yield once `nodes` nodes are active and Envoy forwards a server greeting.

        `ports`: the source of ports, in which `advertised` are already claimed; default: free ports.
        `mariadb`: a running server to share, left running. `settings`: merged over the control plane's
        defaults. `graceful_wait`: seconds a TiDB server waits after SIGTERM. `node_arguments`: passed to all
        nodes. `delta`: Envoy uses incremental xDS. `module`: Tidevoy's module for Envoy; "auto": the one
        built here, if any; None: none. `control_plane`: the class of the control plane. `on_progress`
        receives a text before each step. A directory that was used before restores its data and the nodes'
        addresses.

        `tidb_bin`: real PD, store and TiDB servers instead of simulated ones. `cluster`: a running cluster,
        which is neither started nor stopped here; the other options about nodes do not apply then.
        """
        with Ports() as own_ports:
            port_source = ports or own_ports
            tidb_cluster: Cluster
            if cluster is not None:
                tidb_cluster, nodes = cluster, len(cluster.tidb)
            elif tidb_bin is not None:
                tidb_cluster = TidbCluster(
                    directory, port_source, tidb_bin, graceful_wait=graceful_wait, arguments=node_arguments
                )
            else:
                tidb_cluster = FakeCluster(
                    directory,
                    port_source,
                    mariadb=mariadb,
                    pd_timings=pd_timings,
                    graceful_wait=graceful_wait,
                    arguments=node_arguments,
                )
            stack = cls(
                directory,
                port_source,
                advertised or AdvertisedPorts.allocate(port_source),
                tidb_cluster,
                own_cluster=cluster is None,
                settings=settings or {},
                concurrency=concurrency,
                delta=delta,
                module=module_path.find_module() if module == "auto" else module,
                control_plane=control_plane,
            )
            try:
                await stack._launch(nodes, on_progress)
                yield stack
            finally:
                on_progress("Stopping")
                await stack._stop()

    @property
    def sql_port(self) -> int:
        """The port where SQL clients connect: Envoy's listener."""
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
        """The database of simulated TiDB servers. Raises RuntimeError for a cluster of real servers."""
        return self._fake_cluster.mariadb

    @property
    def graceful_wait(self) -> float:
        """Seconds that a TiDB server waits after SIGTERM."""
        return self.cluster.graceful_wait

    def servers(self) -> Iterator[Server]:
        """Yield all parts that this cluster owns, in start order."""
        if self._own_cluster:
            yield from self.cluster.servers()
        yield self.control_plane
        yield self.envoy

    async def add_tidb(self, *arguments: str) -> Tidb:
        """Start one more TiDB server with these arguments after its usual ones, and wait until it serves."""
        node = self.cluster.new_node(arguments)
        await node.launch()
        return node

    async def nodes(self) -> dict[str, dict[str, Any]]:
        """Return the nodes of `GET /v1/nodes` by address."""
        response = (await self.api.get("/v1/nodes")).raise_for_status()
        return {node["address"]: node for node in response.json()["nodes"]}

    async def states(self) -> dict[str, str]:
        """Return the state of each node by address."""
        return {address: node["state"] for address, node in (await self.nodes()).items()}

    def violations(self) -> list[str]:
        """Return the log lines of nodes, since the start, about protocol violations of clients.

        Tests expect none.
        """
        return [
            line
            for node in self.tidb
            for line in node.violations()[self._known_violations.get(node.name, 0) :]
        ]

    async def wait_until(
        self, predicate: Callable[[], bool | Awaitable[bool]], what: str, timeout: float = 15.0
    ) -> None:
        """Wait until `predicate` is true. Raises WaitTimeout, with the last error if there was one.

        A control plane that does not answer counts as "not yet": it may be starting.
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
                raise WaitTimeout(f"waited {timeout:.0f} s for: {what}{reason}")
            await asyncio.sleep(_POLL_SECONDS)

    async def wait_for_first_failure(self) -> ProcessFailed:
        """Wait until any running part exits, and return that as an error."""
        tasks = [asyncio.create_task(server.wait_for_failure()) for server in self.servers()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _defaults(self) -> dict[str, Any]:
        return {
            "pd": {"urls": [self.cluster.pd_url]},
            "sql": {"listen": f"127.0.0.1:{self.advertised.sql}"},
            "xds": {"listen": f"127.0.0.1:{self.advertised.xds}"},
            "api": {"listen": f"127.0.0.1:{self.advertised.api}"},
            "state_dir": str(self.directory / "state"),
            # The only Envoy reconnects at once.
            "drain": {"reconnect_grace": 2.0},
        }

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
        await self.wait_until(lambda: self._is_in_service(nodes), f"{nodes} active nodes behind Envoy", 30.0)

    async def _is_in_service(self, nodes: int) -> bool:
        states = list((await self.states()).values())
        if states.count("active") < nodes or not await self.envoy.is_live():
            return False
        return nodes == 0 or await sends_mysql_greeting(self.sql_port)

    async def _stop(self) -> None:
        """Stop all parts, whatever state they are in, from the clients' side to the data."""
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


def _deep_merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `overrides` merged over it, mapping by mapping."""
    result = dict(base)
    for key, value in overrides.items():
        existing = result.get(key)
        both = isinstance(existing, Mapping) and isinstance(value, Mapping)
        result[key] = _deep_merge(existing, value) if both else value  # type: ignore[arg-type]
    return result
