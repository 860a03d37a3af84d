"""A real TiDB cluster on this machine: PD, one store, and TiDB servers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sandbox.cluster import Cluster, Step, end_all, launch_all
from sandbox.node_certificates import NodeCertificates
from sandbox.ports import Ports
from sandbox.server import Server
from sandbox.tidb import Tidb
from sandbox.tidb_binaries import TidbBinaries
from sandbox.tidb_servers import Pd, Store, TidbServer

_ONLY_WITH_TIKV = (
    "tidb_ddl_enable_fast_reorg",
    "tidb_enable_dist_task",
    "tidb_enable_async_commit",
    "tidb_enable_1pc",
)
"""Settings that are on by default and want what only TiKV has."""


class TidbCluster(Cluster):
    """PD, the store and TiDB servers. The user root has no password.

    All TiDB servers share `certificates`: sessions can move between them, and they offer TLS.
    """

    def __init__(
        self,
        directory: Path,
        ports: Ports,
        binaries: TidbBinaries,
        *,
        graceful_wait: float = 0.0,
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(directory, ports, graceful_wait=graceful_wait, arguments=arguments)
        self.binaries = binaries
        self.certificates = NodeCertificates.make(self.directory / "certificates")
        self.pd = Pd(self.directory, binaries.pd, *self.node_ports("pd"))
        self.store = Store(self.directory, binaries.store, *self.node_ports("store"), pd=self.pd)

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        directory: Path,
        binaries: TidbBinaries,
        *,
        nodes: int = 3,
        graceful_wait: float = 0.0,
        step: Step = lambda text: None,
    ) -> AsyncIterator[TidbCluster]:
        """A cluster on free ports, to be shared by several `Stack`."""
        with Ports() as ports:
            cluster = cls(directory, ports, binaries, graceful_wait=graceful_wait)
            try:
                await cluster.launch(nodes, step)
                yield cluster
            finally:
                await cluster.end()

    @property
    def pd_url(self) -> str:
        """PD's."""
        return self.pd.url

    def foundation(self) -> list[Server]:
        """PD and the store."""
        return [self.pd, self.store]

    async def launch(self, nodes: int, step: Step) -> None:
        """PD, then the store, then one TiDB, which makes the system tables, then the others."""
        programs = self.binaries.describe()
        step(f"Starting PD {programs['PD']}")
        await self.pd.launch()
        step(f"Starting the store {programs['store']}")
        await self.store.launch()
        servers = [self.new_node() for _ in range(nodes)]
        if servers:
            step(
                f"Starting TiDB {programs['TiDB']}, 1 of {nodes}; a new cluster's system tables take a while"
            )
            await servers[0].launch()
        if len(servers) > 1:
            step(f"Starting TiDB, 2 to {nodes} of {nodes}" if nodes > 2 else "Starting TiDB, 2 of 2")
            await launch_all(servers[1:])

    def new_node(
        self, arguments: Sequence[str] = (), *, config: Mapping[str, Any] | None = None
    ) -> TidbServer:
        """One more TiDB server. `config`: settings of its file beside the usual ones."""
        name = f"tidb-{len(self.tidb) + 1}"
        node = TidbServer(
            self.directory,
            *self.node_ports(name),
            name=name,
            pd=[self.pd.url],
            program=self.binaries.tidb,
            certificates=self.certificates,
            first_statements=self._first_statements(),
            graceful_wait=self.graceful_wait,
            arguments=(*self._arguments, *arguments),
            config=config,
        )
        self.tidb.append(node)
        return node

    async def restore(self, nodes: int) -> None:
        """Bring PD, the store and the first `nodes` TiDB servers back to what they were; end the others."""
        for server in self.servers():
            if server.running:
                server.process.send(signal.SIGCONT)
        # From below, since a TiDB neither starts nor ends well without PD.
        for server in self.foundation():
            if not server.running:
                await server.launch()
        await asyncio.gather(*(self._as_usual(node) for node in self.tidb[:nodes]))
        await asyncio.gather(*(_leave(node) for node in self.tidb[nodes:]))
        del self.tidb[nodes:]

    async def _as_usual(self, node: Tidb) -> None:
        assert isinstance(node, TidbServer)
        node.graceful_wait, node.arguments = self.graceful_wait, self._arguments
        node.config.clear()
        if not node.running:
            await node.launch()
        elif node.is_outdated():
            await node.restart()

    async def end(self) -> None:
        """TiDB at once, since nobody is connected; then the store, which is to write its data; then PD."""
        await end_all(self.tidb, politely=False)
        await end_all([self.store], politely=True)
        await end_all([self.pd], politely=True)

    def _first_statements(self) -> Path:
        """What the first server of a cluster runs, once (`initialize-sql-file`, pkg/session/bootstrap.go)."""
        file = self.directory / "first.sql"
        off = () if self.binaries.store.is_tikv else _ONLY_WITH_TIKV
        self.directory.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"set global {name} = off;\n" for name in off))
        return file


async def _leave(node: Tidb) -> None:
    """End a node for good. One that was killed would be waited for with each change of a schema, for 90 s.

    pkg/ddl/schemaver/syncer.go waits for all servers that are registered (pkg/ddl/util: SessionTTL).
    """
    if node.started and not node.running and node.process.returncode != 0:
        await node.launch()
    if node.running:
        await node.terminate()
