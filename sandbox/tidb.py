"""One TiDB server as a child process, and the stand-in for it (sandbox/tidb_sim)."""

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
    """What every TiDB server is started with, real or not.

    `pd`: URLs to register at. `graceful_wait`: seconds between SIGTERM and the close of the SQL port.
    `arguments` go to the program as they are.
    """

    name: Required[str]
    pd: Required[Sequence[str]]
    graceful_wait: float
    arguments: Sequence[str]


class Tidb(Server):
    """One TiDB server on 127.0.0.1, real or not. `terminate` is TiDB's graceful shutdown, `kill` a crash."""

    def __init__(self, directory: Path, port: int, status_port: int, **options: Unpack[TidbOptions]) -> None:
        super().__init__(options["name"], directory)
        self.port = port
        self.status_port = status_port
        self.graceful_wait = options.get("graceful_wait", 0.0)
        self.arguments = options.get("arguments", ())
        self._pd = options["pd"]

    @property
    def stop_timeout(self) -> float:  # type: ignore[override]
        """The longest that a graceful shutdown takes: the wait, then 15 s for transactions."""
        return self.graceful_wait + 20.0

    @property
    def address(self) -> str:
        """Its name in PD, and everywhere."""
        return f"127.0.0.1:{self.port}"

    @property
    def status_url(self) -> str:
        """Base URL of its status port."""
        return f"http://127.0.0.1:{self.status_port}"

    @property
    def pd_path(self) -> str:
        """PD as TiDB takes it: without the scheme, which follows from its TLS settings."""
        return ",".join(url.partition("://")[2] for url in self._pd)

    def listen_ports(self) -> list[int]:
        """Its SQL and status ports."""
        return [self.port, self.status_port]

    @abstractmethod
    def violations(self) -> list[str]:
        """The lines of its log about clients that broke the protocol, over all its runs."""

    def log_lines_containing(self, *texts: str) -> list[str]:
        """The lines of its log that contain any of these texts, over all its runs."""
        log = self.directory / f"{self.name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return [line for line in lines if any(text in line for text in texts)]

    async def is_serving(self) -> bool:
        """Whether `GET /status` is answered with 200, which a server that shuts down does not do."""
        return await http_responds(f"{self.status_url}/status")


class FakeTidb(Tidb):
    """One stand-in. `mariadb`: address of the server with the data."""

    def __init__(
        self, directory: Path, port: int, status_port: int, *, mariadb: str, **options: Unpack[TidbOptions]
    ) -> None:
        super().__init__(directory, port, status_port, **options)
        self._mariadb = mariadb

    def command(self) -> list[str]:
        """The stand-in; its command line holds all settings."""
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
        """Ours, with output that is not held back."""
        return dict(os.environ) | {"PYTHONUNBUFFERED": "1"}

    def violations(self) -> list[str]:
        """The stand-in reports each of them."""
        return self.log_lines_containing("protocol violation")
