"""The servers of a real TiDB cluster as child processes: PD, the store and TiDB."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from sandbox.merging import merged
from sandbox.node_certificates import NodeCertificates
from sandbox.server import Server, accepts, answers
from sandbox.tidb import Tidb
from sandbox.tidb_binaries import StoreProgram

_BOOTSTRAP_SECONDS = 300.0
_SUSPICIOUS = ("invalid sequence", "malformed packet", "panic")
"""What TiDB logs of clients that break the protocol (pkg/server/internal/packetio.go), and of itself."""
_OWNER_LEASE_SECONDS = "5"


def toml(settings: Mapping[str, Any], table: str = "") -> str:
    """`settings` as TOML, mappings as tables. Strings, numbers and booleans look as they do in JSON."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if not _is_table(value)]
    tables = {key: value for key, value in settings.items() if _is_table(value)}
    for key, value in tables.items():
        lines += [f"\n[{table}{key}]", toml(value, f"{table}{key}.")]
    return "\n".join(lines)


class Pd(Server):
    """One PD with the settings of a cluster that has a single store."""

    start_timeout = 120.0

    def __init__(
        self, directory: Path, program: Path, port: int, peer_port: int, *, name: str = "pd"
    ) -> None:
        super().__init__(name, directory)
        self.port = port
        self._peer_port = peer_port
        self._program = program

    @property
    def url(self) -> str:
        """Its client URL."""
        return f"http://127.0.0.1:{self.port}"

    def listens(self) -> list[int]:
        """Its client and peer ports."""
        return [self.port, self._peer_port]

    def command(self) -> list[str]:
        """pd-server."""
        return [
            str(self._program),
            f"--name={self.name}",
            f"--config={self._config_file}",
            f"--data-dir={self.directory / (self.name + '.data')}",
            f"--client-urls={self.url}",
            f"--peer-urls=http://127.0.0.1:{self._peer_port}",
        ]

    async def prepare(self) -> None:
        """Write its configuration: there is nothing to be scheduled with one store."""
        limits = ("leader", "region", "replica", "merge", "hot-region")
        schedule = {f"{each}-schedule-limit": 0 for each in limits}
        settings = {"log": {"level": "warn"}, "replication": {"max-replicas": 1}, "schedule": schedule}
        self.directory.mkdir(parents=True, exist_ok=True)
        self._config_file.write_text(toml(settings))

    async def serves(self) -> bool:
        """Whether it has a leader, itself."""
        return await answers(f"{self.url}/pd/api/v1/leader")

    @property
    def _config_file(self) -> Path:
        return self.directory / f"{self.name}.toml"


class Store(Server):
    """TiKV, or another program with its gRPC."""

    start_timeout = 120.0
    stop_grace = 30.0

    def __init__(
        self,
        directory: Path,
        program: StoreProgram,
        port: int,
        status_port: int,
        *,
        pd: Pd,
        name: str = "store",
    ) -> None:
        super().__init__(name, directory)
        self.port = port
        self._status_port = status_port
        self._program = program
        self._pd = pd

    @property
    def address(self) -> str:
        """Where it serves, and what PD knows it by."""
        return f"127.0.0.1:{self.port}"

    def listens(self) -> list[int]:
        """Its port, and that of its status, where not each program listens."""
        return [self.port, self._status_port]

    def command(self) -> list[str]:
        """The program with its arguments filled in."""
        return self._program.command(
            address=self.address,
            status_address=f"127.0.0.1:{self._status_port}",
            pd=f"127.0.0.1:{self._pd.port}",
            data=str(self.directory / f"{self.name}.data"),
            log=str(self.directory / f"{self.name}.server.log"),
            config=str(self._config_file),
        )

    async def prepare(self) -> None:
        """Write what TiKV alone reads: little memory, and few open files."""
        settings = {
            "storage": {"reserve-space": "0MB", "block-cache": {"capacity": "256MB"}},
            "rocksdb": {"max-open-files": 256},
            "raftdb": {"max-open-files": 256},
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        self._config_file.write_text(toml(settings))

    async def serves(self) -> bool:
        """Whether PD has it as up."""
        try:
            async with httpx2.AsyncClient(trust_env=False, timeout=5.0) as client:
                answer = await client.get(f"{self._pd.url}/pd/api/v1/stores")
        except httpx2.TransportError:
            return False
        if answer.status_code != 200:
            return False
        stores = [each["store"] for each in answer.json().get("stores") or []]
        up = any(store["address"] == self.address and store["state_name"] == "Up" for store in stores)
        return up and await accepts(self.port)

    @property
    def _config_file(self) -> Path:
        return self.directory / f"{self.name}.toml"


class TidbServer(Tidb):
    """One real TiDB. `config`: settings of its file beside those that are made here; read by each start.

    `certificates`: what it signs session tokens with, and shows to clients that ask for TLS.
    `first_statements`: a file of statements that the first server of a new cluster runs, once.
    """

    start_timeout = _BOOTSTRAP_SECONDS

    def __init__(
        self,
        directory: Path,
        port: int,
        status_port: int,
        *,
        name: str,
        pd: Sequence[str],
        program: Path,
        certificates: NodeCertificates,
        first_statements: Path,
        graceful_wait: float = 0.0,
        arguments: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            directory, port, status_port, name=name, pd=pd, graceful_wait=graceful_wait, arguments=arguments
        )
        self.config: dict[str, Any] = dict(config or {})
        self._program = program
        self._certificates = certificates
        self._first_statements = first_statements
        self._started_with: tuple[dict[str, Any], list[str]] | None = None

    def settings(self) -> dict[str, Any]:
        """All that its next start will read."""
        own = self.directory / f"{self.name}.files"
        certificates = self._certificates
        made: dict[str, Any] = {
            "host": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "port": self.port,
            "store": "tikv",
            "path": self.pd_addresses,
            # Another user's server may have the default path.
            "socket": "",
            "temp-dir": str(own),
            "tmp-storage-path": str(own),
            # Whole seconds (pkg/config/config.go).
            "graceful-wait-before-shutdown": math.ceil(self.graceful_wait),
            # One region is enough for a few rows.
            "split-table": False,
            "initialize-sql-file": str(self._first_statements),
            "log": {"level": "warn", "slow-query-file": str(self.directory / f"{self.name}.slow.log")},
            "status": {"status-host": "127.0.0.1", "status-port": self.status_port},
            "security": {
                "session-token-signing-cert": str(certificates.cert),
                "session-token-signing-key": str(certificates.key),
                "ssl-cert": str(certificates.cert),
                "ssl-key": str(certificates.key),
            },
            "tikv-client": {"grpc-connection-count": 1},
        }
        return merged(made, self.config)

    def command(self) -> list[str]:
        """tidb-server."""
        return [str(self._program), f"--config={self._config_file}", *self.arguments]

    def environment(self) -> Mapping[str, str]:
        """Ours, with a short lease of who runs DDL: after a crash of that server the others wait for its end.

        pkg/owner/manager.go reads the variable; its own value is 60.
        """
        return dict(os.environ) | {"tidb_manager_ttl": _OWNER_LEASE_SECONDS}

    def is_outdated(self) -> bool:
        """Whether its next start would be with other settings than the last one."""
        return (self.settings(), self.command()) != self._started_with

    async def prepare(self) -> None:
        """Write its configuration."""
        self._started_with = (self.settings(), self.command())
        (self.directory / f"{self.name}.files").mkdir(parents=True, exist_ok=True)
        self._config_file.write_text(toml(self.settings()))

    def violations(self) -> list[str]:
        """What it logs of broken packets, and of panics of its own."""
        log = self.directory / f"{self.name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return [line for line in lines if any(words in line for words in _SUSPICIOUS)]

    @property
    def _config_file(self) -> Path:
        return self.directory / f"{self.name}.toml"


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)
