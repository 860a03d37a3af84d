"""What is behind Envoy: a server in PD's place, one with the data, and TiDB servers, real or stand-ins."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sandbox.etcd import Etcd, EtcdPorts
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import Server
from sandbox.tidb import FakeTidb, Tidb

Step = Callable[[str], None]


class Cluster(ABC):
    """The servers, each of which can be ended and started again by itself, on its ports and data.

    `graceful_wait`: seconds a TiDB waits at SIGTERM. `arguments`: of all TiDB servers.
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
        """Where TiDB servers register."""

    @abstractmethod
    def foundation(self) -> list[Server]:
        """What is this cluster's own below the TiDB servers, in the order of its start."""

    @abstractmethod
    async def launch(self, nodes: int, step: Step) -> None:
        """Start all, with so many TiDB servers. `step` is told what is being done."""

    @abstractmethod
    def new_node(self, arguments: Sequence[str] = ()) -> Tidb:
        """One more TiDB server, not started yet, with these arguments beside the usual ones."""

    @abstractmethod
    async def end(self) -> None:
        """End what runs. No client is connected any more."""

    def servers(self) -> Iterator[Server]:
        """All that are this cluster's own, in the order of their start."""
        yield from self.foundation()
        yield from self.tidb

    def node_ports(self, name: str) -> tuple[int, int]:
        """The two ports of a server: those that it had in this directory if they are free, else new."""
        file = self.directory / f"{name}.ports"
        try:
            sql, status = map(int, file.read_text().split())
            return self.ports.take_this(sql), self.ports.take_this(status)
        except (OSError, ValueError):
            sql, status = self.ports.take(), self.ports.take()
        self.directory.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{sql} {status}\n")
        return sql, status


class FakeCluster(Cluster):
    """etcd in PD's place, MariaDB, and stand-ins. `mariadb`: one that runs, to be shared and left running."""

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
        self.etcd = Etcd(self.directory, EtcdPorts.take(ports), pd_timings=pd_timings)
        self._own_mariadb = mariadb is None
        self.mariadb = mariadb or MariaDb(self.directory, ports.take())

    @property
    def pd_url(self) -> str:
        """etcd's."""
        return self.etcd.url

    def foundation(self) -> list[Server]:
        """etcd, and MariaDB unless it is shared."""
        return [self.etcd, self.mariadb] if self._own_mariadb else [self.etcd]

    async def launch(self, nodes: int, step: Step) -> None:
        """etcd and MariaDB side by side, then all nodes."""
        step("Starting etcd and MariaDB")
        await launch_all(self.foundation())
        step(f"Starting {nodes} TiDB stand-ins")
        await launch_all([self.new_node() for _ in range(nodes)])

    def new_node(self, arguments: Sequence[str] = ()) -> FakeTidb:
        """One more stand-in."""
        name = f"tidb-{len(self.tidb) + 1}"
        node = FakeTidb(
            self.directory,
            *self.node_ports(name),
            name=name,
            pd=[self.etcd.url],
            mariadb=self.mariadb.address,
            graceful_wait=self.graceful_wait,
            arguments=(*self._arguments, *arguments),
        )
        self.tidb.append(node)
        return node

    async def end(self) -> None:
        """The nodes at once: there is nobody to be graceful to. Then the data."""
        await end_all(self.tidb, politely=False)
        await end_all(self.foundation(), politely=True)


async def launch_all(servers: Sequence[Server]) -> None:
    """Start servers side by side. The first failure ends the others' start and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as starting:
            for server in servers:
                starting.create_task(server.launch())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def end_all(servers: Sequence[Server], *, politely: bool) -> None:
    """End those that run, side by side."""
    running = [server for server in servers if server.running]
    await asyncio.gather(*(server.terminate() if politely else server.kill() for server in running))
