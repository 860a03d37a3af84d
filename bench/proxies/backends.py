"""The server behind all proxies: MariaDB, or a real TiDB with PD and a store.

The backend has only one server. With several servers, chance would decide how each proxy distributes its
clients, which changes the results: one server answers four clients faster than two servers answer two each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import version_of
from bench.proxies.workloads import ROWS
from bench.sysbench import make_table
from sandbox import tidb_binaries
from sandbox.child_process import find_program
from sandbox.mariadb import PACKAGE, MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_binaries import TidbBinaries
from sandbox.tidb_cluster import TidbCluster

_MAX_CONNECTIONS = 25_000


@dataclass(frozen=True, slots=True)
class DatabaseBackend:
    """A running server whose user root has no password.

    `name`: name in results; `ca`: CA of its certificate; `pd`: address of PD, or empty; `cluster`: the TiDB
    cluster, or None.
    """

    name: str
    version: str
    port: int
    ca: Path
    pd: str = ""
    cluster: TidbCluster | None = None

    def settings(self) -> dict[str, Any]:
        """Return the control plane settings to find the server. Nodes from PD get health checks."""
        if self.pd:
            return {"pd": {"urls": [f"http://{self.pd}"]}, "health": {}}
        return {"nodes": [{"address": f"127.0.0.1:{self.port}"}]}


class _MariaDbWithTls(MariaDb):
    certificate: SessionCertificate

    def command(self) -> list[str]:
        return [
            *super().command(),
            f"--ssl-cert={self.certificate.cert}",
            f"--ssl-key={self.certificate.key}",
            # Otherwise, MariaDB reserves thousands of open files for tables, and connections run out of
            # files.
            "--table-open-cache-instances=1",
        ]


@asynccontextmanager
async def start_mariadb(directory: Path, certificate: SessionCertificate) -> AsyncIterator[DatabaseBackend]:
    """Run a MariaDB with sysbench's table. Raises ProcessFailed, ProgramMissing or TimeoutError."""
    version = f"MariaDB {version_of(find_program('mariadbd', PACKAGE))}"
    server = _MariaDbWithTls.start(directory / "mariadb", max_connections=_MAX_CONNECTIONS)
    server.certificate = certificate
    async with server:
        await make_table(server.port, directory / "table", rows=ROWS)
        yield DatabaseBackend("mariadb", version, server.port, certificate.cert)


@asynccontextmanager
async def start_tidb(directory: Path, binaries: TidbBinaries) -> AsyncIterator[DatabaseBackend]:
    """Run a cluster with one TiDB server and sysbench's table.

    Raises ProcessFailed, ProgramMissing or TimeoutError.
    """
    store = Path(binaries.store.program).name
    tidb_version, pd_version = (
        tidb_binaries.read_version(program) for program in (binaries.tidb, binaries.pd)
    )
    version = f"TiDB {tidb_version}, PD {pd_version}, {store}"
    async with TidbCluster.start(directory / "tidb", binaries, nodes=1) as cluster:
        node = cluster.tidb[0]
        await make_table(node.port, directory / "table", rows=ROWS)
        certificate = cluster.certificate.cert
        yield DatabaseBackend("tidb", version, node.port, certificate, cluster.pd.address, cluster)
