"""The servers behind Envoy: TiDB and its dependencies, real or simulated."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sandbox.etcd import Etcd, EtcdPorts
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import Server
from sandbox.tidb import FakeTidb, Tidb, TidbOptions

ProgressCallback = Callable[[str], None]
"""Called with a text for the user before each step of a start."""


class Cluster(ABC):
    """TiDB servers and their dependencies. Each can be stopped and restarted on its ports and data.

    `graceful_wait`: seconds a TiDB server waits after SIGTERM. `arguments`: passed to all TiDB servers.
    """

    def __init__(
        self, directory: Path, ports: Ports, *, graceful_wait: float = 0.0, arguments: Sequence[str] = ()
    ) -> None:
        self.directory = directory.absolute()
        self.ports = ports
        self.graceful_wait = graceful_wait
        self.tidb: list[Tidb] = []
        self._arguments = arguments

    @property
    @abstractmethod
    def pd_url(self) -> str:
        """The URL where TiDB servers register."""

    @abstractmethod
    def dependencies(self) -> list[Server]:
        """Return the servers that TiDB needs, in start order, without servers that others own."""

    @abstractmethod
    async def launch(self, nodes: int, on_progress: ProgressCallback) -> None:
        """Start the dependencies and `nodes` TiDB servers."""

    @abstractmethod
    def _create_node(self, port: int, status_port: int, options: TidbOptions) -> Tidb:
        """Create a TiDB server of this kind."""

    def new_node(self, arguments: Sequence[str] = ()) -> Tidb:
        """Create one more TiDB server, not started yet. `arguments` follow those of all servers."""
        name = f"tidb-{len(self.tidb) + 1}"
        options = TidbOptions(
            name=name,
            pd=[self.pd_url],
            graceful_wait=self.graceful_wait,
            arguments=(*self._arguments, *arguments),
        )
        node = self._create_node(*self.node_ports(name), options)
        self.tidb.append(node)
        return node

    def servers(self) -> Iterator[Server]:
        """Yield the dependencies and the TiDB servers, in start order."""
        yield from self.dependencies()
        yield from self.tidb

    async def stop(self) -> None:
        """Kill TiDB, since no client is connected any more, then stop the dependencies gracefully."""
        try:
            await stop_all(self.tidb, gracefully=False)
            for server in reversed(self.dependencies()):
                await stop_all([server], gracefully=True)
        except BaseException:
            await stop_all(list(self.servers()), gracefully=False)
            raise

    def node_ports(self, name: str) -> tuple[int, int]:
        """Return the two ports of a server: those of its last run in this directory, or new ones."""
        file = self.directory / f"{name}.ports"
        try:
            sql, status = map(int, file.read_text().split())
            return self.ports.claim(sql), self.ports.claim(status)
        except (OSError, ValueError):
            sql, status = self.ports.allocate(), self.ports.allocate()
        self.directory.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{sql} {status}\n")
        return sql, status


class FakeCluster(Cluster):
    """etcd in place of PD, MariaDB, and simulated TiDB servers.

    `mariadb`: a running server shared with others.
    """

    def __init__(
        self,
        directory: Path,
        ports: Ports,
        *,
        mariadb: MariaDb | None = None,
        pd_timings: bool = False,
        graceful_wait: float = 0.0,
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(directory, ports, graceful_wait=graceful_wait, arguments=arguments)
        self.etcd = Etcd(self.directory, EtcdPorts.allocate(ports), pd_timings=pd_timings)
        self._own_mariadb = mariadb is None
        self.mariadb = mariadb or MariaDb(self.directory, ports.allocate())

    @property
    def pd_url(self) -> str:
        """The URL of etcd."""
        return self.etcd.url

    def dependencies(self) -> list[Server]:
        """Return etcd, and MariaDB unless it is shared."""
        return [self.etcd, self.mariadb] if self._own_mariadb else [self.etcd]

    async def launch(self, nodes: int, on_progress: ProgressCallback) -> None:
        """Start etcd and MariaDB in parallel, then all simulated TiDB servers."""
        on_progress("Starting etcd and MariaDB")
        await launch_all(self.dependencies())
        on_progress(f"Starting {nodes} simulated TiDB servers")
        await launch_all([self.new_node() for _ in range(nodes)])

    def _create_node(self, port: int, status_port: int, options: TidbOptions) -> FakeTidb:
        return FakeTidb(self.directory, port, status_port, mariadb=self.mariadb.address, **options)


async def launch_all(servers: Sequence[Server]) -> None:
    """Start servers in parallel. Raises the first failure alone and cancels the start of the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for server in servers:
                tasks.create_task(server.launch())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def stop_all(servers: Sequence[Server], *, gracefully: bool) -> None:
    """Stop all servers that run, in parallel."""
    running = [server for server in servers if server.is_running]
    await asyncio.gather(*(server.terminate() if gracefully else server.kill() for server in running))
