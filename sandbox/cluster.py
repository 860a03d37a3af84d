"""The servers behind Envoy: TiDB and its dependencies, real or simulated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sandbox.etcd import Etcd, EtcdPorts
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import Server, launch_all, stop_all
from sandbox.tidb import FakeTidb, Tidb

ProgressCallback = Callable[[str], None]  # Called with a message for the user before each step of a start.


class Cluster(ABC):
    """TiDB servers and their dependencies. A server that is stopped can restart with its old ports and data.

    `graceful_wait` is how many seconds a TiDB server waits after SIGTERM. All TiDB servers get `arguments`.
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
        """The URL where TiDB servers register: that of the first member of PD."""

    @property
    def pd_urls(self) -> list[str]:
        """The URLs of all members of PD."""
        return [self.pd_url]

    @abstractmethod
    def dependencies(self) -> list[Server]:
        """Return the servers that TiDB needs and that this cluster owns, in start order."""

    @abstractmethod
    async def launch(self, nodes: int, on_progress: ProgressCallback) -> None:
        """Start the dependencies and `nodes` TiDB servers."""

    @abstractmethod
    def _create_node(self, port: int, status_port: int, **options: Any) -> Tidb:
        """Create a TiDB server of this kind. `options` are keyword arguments of `Tidb`."""

    def new_node(self, arguments: Sequence[str] = ()) -> Tidb:
        """Create one more TiDB server, not started yet, which also gets `arguments`."""
        name = f"tidb-{len(self.tidb) + 1}"
        node = self._create_node(
            *self.node_ports(name),
            name=name,
            pd=self.pd_urls,
            graceful_wait=self.graceful_wait,
            arguments=(*self._arguments, *arguments),
        )
        self.tidb.append(node)
        return node

    def servers(self) -> Iterator[Server]:
        """Yield the dependencies and the TiDB servers, in start order."""
        yield from self.dependencies()
        yield from self.tidb

    async def stop(self) -> None:
        """Kill the TiDB servers, which have no clients any more, then stop the dependencies gracefully."""
        try:
            await stop_all(self.tidb, gracefully=False)
            for server in reversed(self.dependencies()):
                await stop_all([server], gracefully=True)
        except BaseException:
            await stop_all(list(self.servers()), gracefully=False)
            raise

    def node_ports(self, name: str) -> tuple[int, int]:
        """Return a server's SQL and status port: as in its last run in this directory, or new ports."""
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
    """Simulated TiDB servers, one MariaDB behind them, and etcd in place of PD.

    `mariadb` is a running server that other clusters also use. `options` are keyword arguments of `Cluster`.
    """

    def __init__(
        self,
        directory: Path,
        ports: Ports,
        *,
        mariadb: MariaDb | None = None,
        pd_timings: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(directory, ports, **options)
        self.etcd = Etcd(self.directory, EtcdPorts.allocate(ports), pd_timings=pd_timings)
        self._own_mariadb = mariadb is None
        self.mariadb = mariadb or MariaDb(self.directory, ports.allocate())

    @property
    def pd_url(self) -> str:
        return self.etcd.url

    def dependencies(self) -> list[Server]:
        return [self.etcd, self.mariadb] if self._own_mariadb else [self.etcd]

    async def launch(self, nodes: int, on_progress: ProgressCallback) -> None:
        """Start etcd and MariaDB in parallel, then all simulated TiDB servers."""
        on_progress("Starting etcd and MariaDB")
        await launch_all(self.dependencies())
        on_progress(f"Starting {nodes} simulated TiDB servers")
        await launch_all([self.new_node() for _ in range(nodes)])

    def _create_node(self, port: int, status_port: int, **options: Any) -> FakeTidb:
        return FakeTidb(self.directory, port, status_port, mariadb=self.mariadb.address, **options)
