"""One TiDB server as a child process, real or simulated (sandbox/tidb_sim)."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox.server import Server, http_responds


class Tidb(Server):
    """One TiDB server on 127.0.0.1, real or simulated. `terminate` is a graceful shutdown, `kill` a crash.

    `pd` are PD's URLs, where the server registers. `graceful_wait` is how many seconds after SIGTERM the SQL
    port closes. `arguments` are passed to the program unchanged.
    """

    def __init__(
        self,
        directory: Path,
        port: int,
        status_port: int,
        *,
        name: str,
        pd: Sequence[str],
        graceful_wait: float = 0.0,
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(name, directory)
        self.port, self.status_port = port, status_port
        self.graceful_wait, self.arguments = graceful_wait, arguments
        self._pd = pd

    @property
    def stop_timeout(self) -> float:  # type: ignore[override]
        """Upper limit of a graceful shutdown in seconds. After `graceful_wait`, TiDB needs up to 15 s."""
        return self.graceful_wait + 20.0

    @property
    def address(self) -> str:
        """The node's name in PD and in the API."""
        return f"127.0.0.1:{self.port}"

    @property
    def status_url(self) -> str:
        return f"http://127.0.0.1:{self.status_port}"

    @property
    def pd_path(self) -> str:
        """PD's addresses as TiDB expects them: without the scheme, which depends on TiDB's TLS settings."""
        return ",".join(url.partition("://")[2] for url in self._pd)

    def listen_ports(self) -> list[int]:
        return [self.port, self.status_port]

    @abstractmethod
    def violations(self) -> list[str]:
        """Return the log lines, of all runs, about clients that violated the protocol."""

    def log_lines_containing(self, *texts: str) -> list[str]:
        """Return the log lines, of all runs, that contain any of these texts."""
        log = self.directory / f"{self.name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return [line for line in lines if any(text in line for text in texts)]

    async def is_serving(self) -> bool:
        """Return whether `GET /status` returns 200. During a shutdown, it does not."""
        return await http_responds(f"{self.status_url}/status")


class FakeTidb(Tidb):
    """One simulated TiDB server. `mariadb` is the address of its MariaDB; `options` are those of `Tidb`."""

    extra_variables = {"PYTHONUNBUFFERED": "1"}  # noqa: RUF012

    def __init__(self, directory: Path, port: int, status_port: int, *, mariadb: str, **options: Any) -> None:
        super().__init__(directory, port, status_port, **options)
        self._mariadb = mariadb

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "sandbox.tidb_sim"),
            *("--host", "127.0.0.1", "-P", str(self.port)),
            *("--status-host", "127.0.0.1", "--status", str(self.status_port)),
            *("--advertise-address", "127.0.0.1"),
            *("--store", "tikv", "--path", self.pd_path),
            *("--mariadb", self._mariadb),
            *("--graceful-wait", str(self.graceful_wait)),
            *self.arguments,
        ]

    def violations(self) -> list[str]:
        return self.log_lines_containing("protocol violation")
