"""The servers of a real TiDB cluster as child processes: PD, the store and TiDB."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from sandbox.server import Server, accepts_connections, http_client, http_responds
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb import Tidb
from sandbox.tidb_binaries import StoreProgram, TidbRelease

_MYSQL_VERSION = "8.0.11"
"""The version of MySQL in TiDB's greeting (pkg/parser/mysql/const.go)."""
_VIOLATION_TEXTS = ("invalid sequence", "malformed packet", "panic")
"""TiDB's log texts for protocol violations (pkg/server/internal/packetio.go) and panics."""


def to_toml(settings: Mapping[str, Any], table: str = "") -> str:
    """Return `settings` as TOML, mappings as tables.

    Strings, numbers and booleans look as they do in JSON.
    """
    values: list[str] = []
    tables: list[str] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            tables += [f"\n[{table}{key}]", to_toml(value, f"{table}{key}.")]
        else:
            # `ensure_ascii` would escape non-BMP characters as surrogate pairs, which TOML does not have.
            values.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(values + tables)


class RealServer(Server):
    """A server whose program the user chooses. It reads its settings from a TOML file."""

    config_suffix = ".toml"

    @property
    def display_name(self) -> str:
        return f"{self.name} ({self.command()[0]})"


class DependencyServer(RealServer):
    """PD or the store. `peer_or_status_port` is PD's peer port or the store's status port."""

    start_timeout_seconds = 120.0

    def __init__(self, name: str, directory: Path, port: int, peer_or_status_port: int) -> None:
        super().__init__(name, directory)
        self.port, self.peer_or_status_port = port, peer_or_status_port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def data_directory(self) -> Path:
        return self.directory / f"{self.name}.data"

    def listen_ports(self) -> list[int]:
        """Return both ports. Some stores do not listen on the second port."""
        return [self.port, self.peer_or_status_port]


class PdServer(DependencyServer):
    """One member of PD, with the settings of a cluster that has a single store.

    `members` are all members with which a new cluster begins. A member serves when most of them run.
    """

    def __init__(self, name: str, directory: Path, program: Path, port: int, peer_port: int) -> None:
        super().__init__(name, directory, port, peer_port)
        self.members: Sequence[PdServer] = [self]
        self._program = program

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_or_status_port}"

    def command(self) -> list[str]:
        return [
            str(self._program),
            f"--name={self.name}",
            f"--config={self.config_file}",
            f"--data-dir={self.data_directory}",
            f"--client-urls={self.url}",
            f"--peer-urls={self.peer_url}",
            "--initial-cluster=" + ",".join(f"{member.name}={member.peer_url}" for member in self.members),
        ]

    def configuration(self) -> str:
        """Return the settings. Scheduling is off, since there is only one store."""
        limits = ("leader", "region", "replica", "merge", "hot-region")
        schedule = {f"{name}-schedule-limit": 0 for name in limits}
        return to_toml({"log": {"level": "warn"}, "replication": {"max-replicas": 1}, "schedule": schedule})

    async def is_serving(self) -> bool:
        """Return whether PD has a leader."""
        return await http_responds(f"{self.url}/pd/api/v1/leader")


class StoreServer(DependencyServer):
    """TiKV, or another program with TiKV's gRPC service."""

    stop_timeout = 30.0

    def __init__(
        self, directory: Path, program: StoreProgram, port: int, status_port: int, *, pd: Sequence[PdServer]
    ) -> None:
        super().__init__("store", directory, port, status_port)
        self._program = program
        self._pd = pd

    def command(self) -> list[str]:
        return self._program.command(
            address=self.address,
            status_address=f"127.0.0.1:{self.peer_or_status_port}",
            # Other stores get one address; PD tells them the others.
            pd=",".join(member.address for member in (self._pd if self._program.is_tikv else self._pd[:1])),
            data=str(self.data_directory),
            log=str(self.directory / f"{self.name}.server.log"),
            config=str(self.config_file),
        )

    def configuration(self) -> str:
        """Return settings for little memory and few open files. Only TiKV reads them."""
        return to_toml(
            {
                "storage": {"reserve-space": "0MB", "block-cache": {"capacity": "256MB"}},
                "rocksdb": {"max-open-files": 256},
                "raftdb": {"max-open-files": 256},
            }
        )

    async def is_serving(self) -> bool:
        """Return whether PD reports the store as up, and the store accepts connections."""
        try:
            async with http_client(timeout=5.0) as client:
                response = (await client.get(f"{self._pd[0].url}/pd/api/v1/stores")).raise_for_status()
        except httpx2.HTTPError:
            return False
        stores = [entry["store"] for entry in response.json().get("stores") or []]
        up = any(store["address"] == self.address and store["state_name"] == "Up" for store in stores)
        return up and await accepts_connections(self.port)


class TidbServer(Tidb, RealServer):
    """One real TiDB server. Changes of `release`, which upgrade it, and of `labels` apply at its next start.

    `certificate` signs session tokens, and is the server's TLS certificate.
    `bootstrap_sql` is a file of statements that the first server of a new cluster runs once.
    """

    start_timeout_seconds = 300.0  # The first server creates the system tables.
    # The DDL owner's lease lasts 5 s instead of 60 s: after a crash of the owner, other servers wait until it
    # expires (pkg/owner/manager.go).
    extra_variables = {"tidb_manager_ttl": "5"}  # noqa: RUF012

    def __init__(
        self,
        directory: Path,
        port: int,
        status_port: int,
        *,
        release: TidbRelease,
        certificate: SessionCertificate,
        bootstrap_sql: Path,
        **options: Any,
    ) -> None:
        super().__init__(directory, port, status_port, **options)
        self.release = release
        self.labels: dict[str, str] = {}
        self._certificate = certificate
        self._bootstrap_sql = bootstrap_sql
        self._started_with: tuple[str | None, list[str]] | None = None

    def configuration(self) -> str:
        temporary = str(self._temporary_directory)
        cert, key = str(self._certificate.cert), str(self._certificate.key)
        version = self.release.version
        # Only for a build without a version. Other builds have both.
        versions = {"tidb-release-version": version, "server-version": f"{_MYSQL_VERSION}-TiDB-{version}"}
        return to_toml(
            {
                **({} if self.release.reports_version else versions),
                "host": "127.0.0.1",
                "advertise-address": "127.0.0.1",
                "port": self.port,
                "store": "tikv",
                "path": self.pd_path,
                # No Unix socket: another user's server may use the default path.
                "socket": "",
                "temp-dir": temporary,
                "tmp-storage-path": temporary,
                # TiDB accepts only whole seconds (pkg/config/config.go).
                "graceful-wait-before-shutdown": math.ceil(self.graceful_wait),
                # One region is enough for a few rows.
                "split-table": False,
                "initialize-sql-file": str(self._bootstrap_sql),
                "log": {"level": "warn", "slow-query-file": str(self.directory / f"{self.name}.slow.log")},
                "status": {"status-host": "127.0.0.1", "status-port": self.status_port},
                "security": {
                    "session-token-signing-cert": cert,
                    "session-token-signing-key": key,
                    "ssl-cert": cert,
                    "ssl-key": key,
                },
                "tikv-client": {"grpc-connection-count": 1},
                "labels": self.labels,
            }
        )

    def command(self) -> list[str]:
        return [str(self.release.program), f"--config={self.config_file}", *self.arguments]

    def has_changed_settings(self) -> bool:
        return (self.configuration(), self.command()) != self._started_with

    async def prepare(self) -> None:
        await super().prepare()
        self._started_with = (self.configuration(), self.command())
        self._temporary_directory.mkdir(exist_ok=True)

    def violations(self) -> list[str]:
        """Return the log lines about broken packets and panics."""
        return self.log_lines_containing(*_VIOLATION_TEXTS)

    @property
    def _temporary_directory(self) -> Path:
        return self.directory / f"{self.name}.files"
