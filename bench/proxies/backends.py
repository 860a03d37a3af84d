"""The server behind all proxies: MariaDB, or a real TiDB with PD and a store.

One server, not several: how many clients meet on each of several servers is chance, and differs between
proxies, but four clients of one server are answered faster than two clients of each of two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import version_of
from bench.proxies.workloads import ROWS
from bench.sysbench_load.table import make_table
from sandbox import tidb_binaries
from sandbox.child_process import find_program
from sandbox.mariadb import PACKAGE, MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_binaries import TidbBinaries
from sandbox.tidb_cluster import TidbCluster

_MAX_CONNECTIONS = 25_000


@dataclass(frozen=True, slots=True)
class DatabaseBackend:
    """A running server whose user root has no password. `name`: in results; `pd`: address of PD, or empty.

    `ca`: the CA of its certificate. `cluster`: the TiDB cluster, if it is one.
    """

    name: str
    version: str
    port: int
    ca: Path
    pd: str = ""
    cluster: TidbCluster | None = None

    def settings(self) -> dict[str, Any]:
        """How a control plane finds it."""
        if self.pd:
            return {"pd": {"urls": [f"http://{self.pd}"]}}
        unchecked = {"status": {"enabled": False}, "sql": {"enabled": False}}
        return {"nodes": [{"address": f"127.0.0.1:{self.port}"}], "health": unchecked}


class _MariaDbWithTls(MariaDb):
    """A MariaDB that offers TLS."""

    certificate: SessionCertificate

    def command(self) -> list[str]:
        """With the certificate."""
        return [
            *super().command(),
            f"--ssl-cert={self.certificate.cert}",
            f"--ssl-key={self.certificate.key}",
            # Else MariaDB reserves thousands of open files for tables, which connections then lack.
            "--table-open-cache-instances=1",
        ]


@asynccontextmanager
async def start_mariadb(directory: Path, certificate: SessionCertificate) -> AsyncIterator[DatabaseBackend]:
    """A MariaDB with sysbench's table. ProcessFailed, ProgramMissing, TimeoutError."""
    version = f"MariaDB {version_of(find_program('mariadbd', PACKAGE))}"
    server = _MariaDbWithTls.start(directory / "mariadb", max_connections=_MAX_CONNECTIONS)
    server.certificate = certificate
    async with server:
        await make_table(server.port, directory / "table", rows=ROWS)
        yield DatabaseBackend("mariadb", version, server.port, certificate.cert)


@asynccontextmanager
async def start_tidb(directory: Path, binaries: TidbBinaries) -> AsyncIterator[DatabaseBackend]:
    """A cluster with one TiDB server and sysbench's table. ProcessFailed, ProgramMissing, TimeoutError."""
    store = Path(binaries.store.program).name
    version = f"TiDB {tidb_binaries.read_version(binaries.tidb)}, PD {tidb_binaries.read_version(binaries.pd)}, {store}"
    async with TidbCluster.start(directory / "tidb", binaries, nodes=1) as cluster:
        node = cluster.tidb[0]
        await make_table(node.port, directory / "table", rows=ROWS)
        yield DatabaseBackend(
            "tidb",
            version,
            node.port,
            cluster.certificate.cert,
            pd=cluster.pd.address,
            cluster=cluster,
        )
