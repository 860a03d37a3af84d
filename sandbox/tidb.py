"""One TiDB server as a child process, real or simulated (sandbox/tidb_sim)."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Required, TypedDict, Unpack

from sandbox.server import Server, http_responds

_MODULE = "sandbox.tidb_sim"


class TidbOptions(TypedDict, total=False):
    """The options of every TiDB server, real or simulated.

    `pd`: URLs to register at. `graceful_wait`: seconds between SIGTERM and the close of the SQL port.
    `arguments` are passed to the program unchanged.
    """

    name: Required[str]
    pd: Required[Sequence[str]]
    graceful_wait: float
    arguments: Sequence[str]


class Tidb(Server):
    """One TiDB server on 127.0.0.1, real or simulated.

    `terminate` shuts it down gracefully, `kill` is a crash.
    """

    def __init__(self, directory: Path, port: int, status_port: int, **options: Unpack[TidbOptions]) -> None:
        super().__init__(options["name"], directory)
        self.port = port
        self.status_port = status_port
        self.graceful_wait = options.get("graceful_wait", 0.0)
        self.arguments = options.get("arguments", ())
        self._pd = options["pd"]

    @property
    def stop_timeout(self) -> float:  # type: ignore[override]
        """Upper bound in seconds of a graceful shutdown: the wait, then 15 s for transactions."""
        return self.graceful_wait + 20.0

    @property
    def address(self) -> str:
        """Its name in PD and in the API."""
        return f"127.0.0.1:{self.port}"

    @property
    def status_url(self) -> str:
        """Base URL of its status port."""
        return f"http://127.0.0.1:{self.status_port}"

    @property
    def pd_path(self) -> str:
        """PD's addresses in TiDB's format: without the scheme, which follows from TiDB's TLS settings."""
        return ",".join(url.partition("://")[2] for url in self._pd)

    def listen_ports(self) -> list[int]:
        """Return its SQL and status ports."""
        return [self.port, self.status_port]

    @abstractmethod
    def violations(self) -> list[str]:
        """Return the log lines, of all its runs, about clients that violated the protocol."""

    def log_lines_containing(self, *texts: str) -> list[str]:
        """Return the log lines, of all its runs, that contain any of these texts."""
        log = self.directory / f"{self.name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return [line for line in lines if any(text in line for text in texts)]

    async def is_serving(self) -> bool:
        """Return whether `GET /status` is answered with 200, which a server that shuts down does not do."""
        return await http_responds(f"{self.status_url}/status")


class FakeTidb(Tidb):
    """One simulated TiDB server. `mariadb`: address of the server with the data."""

    def __init__(
        self, directory: Path, port: int, status_port: int, *, mariadb: str, **options: Unpack[TidbOptions]
    ) -> None:
        super().__init__(directory, port, status_port, **options)
        self._mariadb = mariadb

    def command(self) -> list[str]:
        """Return the command of the simulated server, with all settings as options."""
        return [
            *(sys.executable, "-P", "-m", _MODULE),
            *("--host", "127.0.0.1", "-P", str(self.port)),
            *("--status-host", "127.0.0.1", "--status", str(self.status_port)),
            *("--advertise-address", "127.0.0.1"),
            *("--store", "tikv", "--path", self.pd_path),
            *("--mariadb", self._mariadb),
            *("--graceful-wait", str(self.graceful_wait)),
            *self.arguments,
        ]

    def environment(self) -> Mapping[str, str]:
        """Return our environment with unbuffered output."""
        return dict(os.environ) | {"PYTHONUNBUFFERED": "1"}

    def violations(self) -> list[str]:
        """Return the protocol violations, each of which the simulated server logs."""
        return self.log_lines_containing("protocol violation")
