"""A real TiDB cluster on this machine: PD with one or several members, one store, and TiDB servers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from sandbox.cluster import Cluster, ProgressCallback
from sandbox.ports import Ports
from sandbox.server import Server, http_client, launch_all
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb import Tidb
from sandbox.tidb_binaries import TidbBinaries, TidbRelease
from sandbox.tidb_servers import PdServer, StoreServer, TidbServer

_TIKV_ONLY_VARIABLES = (
    "tidb_ddl_enable_fast_reorg",
    "tidb_enable_dist_task",
    "tidb_enable_async_commit",
    "tidb_enable_1pc",
)
"""Variables that are on by default, but need features that only TiKV has."""


class TidbCluster(Cluster):
    """PD, the store and TiDB servers. The user root has no password.

    `options` are keyword arguments of `Cluster`. All TiDB servers use `certificate` for TLS and to sign
    session tokens, so sessions can migrate between them. `release` is that of new TiDB servers.
    """

    def __init__(
        self, directory: Path, ports: Ports, binaries: TidbBinaries, *, pd_members: int = 1, **options: Any
    ) -> None:
        super().__init__(directory, ports, **options)
        self.binaries = binaries
        self.release = TidbRelease.of(binaries.tidb)
        self.certificate = SessionCertificate.load_or_create(self.directory / "certificate")
        names = ["pd", *(f"pd-{number}" for number in range(2, pd_members + 1))]
        self.pd_members = [
            PdServer(name, self.directory, binaries.pd, *self.node_ports(name)) for name in names
        ]
        for member in self.pd_members:
            member.members = self.pd_members
        self.store = StoreServer(
            self.directory, binaries.store, *self.node_ports("store"), pd=self.pd_members
        )

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        directory: Path,
        binaries: TidbBinaries,
        *,
        nodes: int = 3,
        pd_members: int = 1,
        graceful_wait: float = 0.0,
        on_progress: ProgressCallback = lambda text: None,
    ) -> AsyncIterator[TidbCluster]:
        """Start a cluster on free ports. Several `LocalCluster` can share it."""
        with Ports() as ports:
            cluster = cls(directory, ports, binaries, pd_members=pd_members, graceful_wait=graceful_wait)
            try:
                await cluster.launch(nodes, on_progress)
                yield cluster
            finally:
                await cluster.stop()

    @property
    def pd(self) -> PdServer:
        """The first member of PD."""
        return self.pd_members[0]

    @property
    def pd_url(self) -> str:
        return self.pd.url

    @property
    def pd_urls(self) -> list[str]:
        return [member.url for member in self.pd_members]

    async def pd_leader(self) -> PdServer | None:
        """Return the leader of PD as any running member knows it; None if no member knows one."""
        for member in self.pd_members:
            if not member.is_running:
                continue
            try:
                async with http_client(member.url, timeout=2.0) as client:
                    response = (await client.get("/pd/api/v1/leader")).raise_for_status()
            except httpx2.HTTPError:
                continue
            name = response.json()["name"]
            return next(leader for leader in self.pd_members if leader.name == name)
        return None

    def dependencies(self) -> list[Server]:
        return [*self.pd_members, self.store]

    async def launch(self, nodes: int, on_progress: ProgressCallback) -> None:
        """Start PD, the store, one TiDB server (it creates the system tables), then the other ones."""
        programs = await asyncio.to_thread(self.binaries.describe)
        on_progress(f"Starting PD {programs['PD']}")
        await launch_all(self.pd_members)
        on_progress(f"Starting the store {programs['store']}")
        await self.store.launch()
        servers = [self.new_node() for _ in range(nodes)]
        if servers:
            wait = "a new cluster's system tables take a while"
            on_progress(f"Starting TiDB {programs['TiDB']}, 1 of {nodes}; {wait}")
            await servers[0].launch()
        if len(servers) > 1:
            on_progress(f"Starting TiDB, 2 to {nodes} of {nodes}" if nodes > 2 else "Starting TiDB, 2 of 2")
            await launch_all(servers[1:])

    async def restore(self, nodes: int) -> None:
        """Restore processes and settings of PD, the store and `nodes` TiDB servers; stop other TiDB servers.

        Data, global variables and accounts stay, and so does the release of each server.
        """
        for server in self.servers():
            if server.is_running:
                server.process.send_signal(signal.SIGCONT)
        # PD and the store come first, since a TiDB server neither starts nor stops properly without PD.
        await launch_all([member for member in self.pd_members if not member.is_running])
        if not self.store.is_running:
            await self.store.launch()
        async with asyncio.TaskGroup() as tasks:
            for node in self.tidb[:nodes]:
                tasks.create_task(self._restore_node(node))
            for node in self.tidb[nodes:]:
                tasks.create_task(_remove_node(node))
        del self.tidb[nodes:]

    async def _restore_node(self, node: Tidb) -> None:
        assert isinstance(node, TidbServer)
        node.graceful_wait, node.arguments, node.labels = self.graceful_wait, self._arguments, {}
        # A running server that does not serve is shutting down.
        if not node.is_running or node.has_changed_settings() or not await node.is_serving():
            await node.restart()

    def _create_node(self, port: int, status_port: int, **options: Any) -> TidbServer:
        return TidbServer(
            self.directory,
            port,
            status_port,
            release=self.release,
            certificate=self.certificate,
            bootstrap_sql=self._write_bootstrap_sql(),
            **options,
        )

    def _write_bootstrap_sql(self) -> Path:
        """Write the `initialize-sql-file`, which the first TiDB server runs (pkg/session/bootstrap.go)."""
        file = self.directory / "bootstrap.sql"
        variables = () if self.binaries.store.is_tikv else _TIKV_ONLY_VARIABLES
        self.directory.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"set global {name} = off;\n" for name in variables))
        return file


async def _remove_node(node: Tidb) -> None:
    """Stop a node gracefully, which deletes its registration. Start a crashed node first.

    Each schema change waits for all registered servers (pkg/ddl/schemaver/syncer.go), and the registration
    of a killed server lasts 90 s (SessionTTL in pkg/ddl/util).
    """
    if node.has_started and not node.is_running and node.process.returncode != 0:
        await node.launch()
    if node.is_running:
        await node.terminate()
