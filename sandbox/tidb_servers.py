"""The servers of a real TiDB cluster as child processes: PD, the store and TiDB."""

from __future__ import annotations

import json
import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import httpx2

from sandbox.server import Server, accepts_connections, http_responds
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb import Tidb, TidbOptions
from sandbox.tidb_binaries import StoreProgram

_BOOTSTRAP_TIMEOUT_SECONDS = 300.0
_VIOLATION_TEXTS = ("invalid sequence", "malformed packet", "panic")
"""TiDB's log texts for protocol violations (pkg/server/internal/packetio.go) and panics."""
_OWNER_LEASE_SECONDS = "5"


def to_toml(settings: Mapping[str, Any], table: str = "") -> str:
    """Return `settings` as TOML, mappings as tables.

    Strings, numbers and booleans look as they do in JSON.
    """
    values = {key: value for key, value in settings.items() if not _is_table(value)}
    # TOML has no surrogate pairs, with which JSON would escape non-BMP characters.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    tables = {key: value for key, value in settings.items() if _is_table(value)}
    for key, value in tables.items():
        lines += [f"\n[{table}{key}]", to_toml(value, f"{table}{key}.")]
    return "\n".join(lines)


class ConfiguredServer(Server):
    """A server that reads its settings from a TOML file, written at each start."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings for its next start."""

    @property
    def display_name(self) -> str:
        """Its name and its program, which the user chooses."""
        return f"{self.name} ({self.command()[0]})"

    @property
    def config_file(self) -> Path:
        """Path of its settings file."""
        return self.directory / f"{self.name}.toml"

    async def prepare(self) -> None:
        """Write the settings."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(to_toml(self.settings()))


class DependencyServer(ConfiguredServer):
    """PD or the store. `peer_or_status_port`: PD's peer port, or the store's status port."""

    start_timeout_seconds = 120.0

    def __init__(self, name: str, directory: Path, port: int, peer_or_status_port: int) -> None:
        super().__init__(name, directory)
        self.port = port
        self.peer_or_status_port = peer_or_status_port

    @property
    def address(self) -> str:
        """The address for its clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def data_directory(self) -> Path:
        """The directory with its data."""
        return self.directory / f"{self.name}.data"

    def listen_ports(self) -> list[int]:
        """Return both ports. Not every store listens on the second one."""
        return [self.port, self.peer_or_status_port]


class PdServer(DependencyServer):
    """One PD with the settings of a cluster that has a single store."""

    def __init__(self, directory: Path, program: Path, port: int, peer_port: int) -> None:
        super().__init__("pd", directory, port, peer_port)
        self._program = program

    @property
    def url(self) -> str:
        """Its client URL."""
        return f"http://{self.address}"

    def command(self) -> list[str]:
        """Return the command of pd-server."""
        return [
            str(self._program),
            f"--name={self.name}",
            f"--config={self.config_file}",
            f"--data-dir={self.data_directory}",
            f"--client-urls={self.url}",
            f"--peer-urls=http://127.0.0.1:{self.peer_or_status_port}",
        ]

    def settings(self) -> dict[str, Any]:
        """Return the settings; with one store there is nothing to schedule."""
        limits = ("leader", "region", "replica", "merge", "hot-region")
        schedule = {f"{name}-schedule-limit": 0 for name in limits}
        return {"log": {"level": "warn"}, "replication": {"max-replicas": 1}, "schedule": schedule}

    async def is_serving(self) -> bool:
        """Return whether it has elected itself."""
        return await http_responds(f"{self.url}/pd/api/v1/leader")


class StoreServer(DependencyServer):
    """TiKV, or another program with TiKV's gRPC service."""

    stop_timeout = 30.0

    def __init__(
        self, directory: Path, program: StoreProgram, port: int, status_port: int, *, pd: PdServer
    ) -> None:
        super().__init__("store", directory, port, status_port)
        self._program = program
        self._pd = pd

    def command(self) -> list[str]:
        """Return the program with its arguments filled in."""
        return self._program.command(
            address=self.address,
            status_address=f"127.0.0.1:{self.peer_or_status_port}",
            pd=self._pd.address,
            data=str(self.data_directory),
            log=str(self.directory / f"{self.name}.server.log"),
            config=str(self.config_file),
        )

    def settings(self) -> dict[str, Any]:
        """Return settings for little memory and few open files. Only TiKV reads them."""
        return {
            "storage": {"reserve-space": "0MB", "block-cache": {"capacity": "256MB"}},
            "rocksdb": {"max-open-files": 256},
            "raftdb": {"max-open-files": 256},
        }

    async def is_serving(self) -> bool:
        """Return whether PD lists it as up, and it accepts connections."""
        try:
            async with httpx2.AsyncClient(trust_env=False, timeout=5.0) as client:
                response = await client.get(f"{self._pd.url}/pd/api/v1/stores")
        except httpx2.TransportError:
            return False
        if response.status_code != 200:
            return False
        stores = [entry["store"] for entry in response.json().get("stores") or []]
        up = any(store["address"] == self.address and store["state_name"] == "Up" for store in stores)
        return up and await accepts_connections(self.port)


class TidbServer(Tidb, ConfiguredServer):
    """One real TiDB server.

    `certificate`: signs session tokens, and is the server certificate for clients that ask for TLS.
    `bootstrap_sql`: a file of statements that the first server of a new cluster runs, once.
    """

    start_timeout_seconds = _BOOTSTRAP_TIMEOUT_SECONDS

    def __init__(
        self,
        directory: Path,
        port: int,
        status_port: int,
        *,
        program: Path,
        certificate: SessionCertificate,
        bootstrap_sql: Path,
        **options: Unpack[TidbOptions],
    ) -> None:
        super().__init__(directory, port, status_port, **options)
        self._program = program
        self._certificate = certificate
        self._bootstrap_sql = bootstrap_sql
        self._started_with: tuple[dict[str, Any], list[str]] | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings for its next start."""
        temporary, cert, key = (
            str(self._temporary_directory),
            str(self._certificate.cert),
            str(self._certificate.key),
        )
        return {
            "host": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "port": self.port,
            "store": "tikv",
            "path": self.pd_path,
            # Another user's server may use the default path.
            "socket": "",
            "temp-dir": temporary,
            "tmp-storage-path": temporary,
            # Whole seconds (pkg/config/config.go).
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
        }

    def command(self) -> list[str]:
        """Return the command of tidb-server."""
        return [str(self._program), f"--config={self.config_file}", *self.arguments]

    def environment(self) -> Mapping[str, str]:
        """Return our environment with a short lease for the DDL owner: after a crash others wait for it.

        pkg/owner/manager.go reads the variable; the default is 60.
        """
        return dict(os.environ) | {"tidb_manager_ttl": _OWNER_LEASE_SECONDS}

    def has_changed_settings(self) -> bool:
        """Return whether its settings have changed since its last start."""
        return (self.settings(), self.command()) != self._started_with

    async def prepare(self) -> None:
        """Write the settings, and create its directory."""
        await super().prepare()
        self._started_with = (self.settings(), self.command())
        self._temporary_directory.mkdir(exist_ok=True)

    def violations(self) -> list[str]:
        """Return its log lines about broken packets, and its own panics."""
        return self.log_lines_containing(*_VIOLATION_TEXTS)

    @property
    def _temporary_directory(self) -> Path:
        return self.directory / f"{self.name}.files"


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)
