"""One TiDB server as tests use it, and the stand-in for it (sandbox/tidb_sim) as a child process."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandbox.server import Server, answers

_MODULE = "sandbox.tidb_sim"


class Tidb(Server):
    """One TiDB server on 127.0.0.1, real or not. `terminate` is TiDB's graceful shutdown, `kill` a crash.

    `pd`: URLs to register at. `graceful_wait`: seconds between SIGTERM and the close of the SQL port.
    `arguments` go to the program as they are.
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
        self.port = port
        self.status_port = status_port
        self.graceful_wait = graceful_wait
        self.arguments = arguments
        self._pd = pd

    @property
    def stop_grace(self) -> float:  # type: ignore[override]
        """As long as a graceful shutdown takes at most: the wait, then 15 s for transactions."""
        return self.graceful_wait + 20.0

    @property
    def address(self) -> str:
        """What it is called in PD, and everywhere."""
        return f"127.0.0.1:{self.port}"

    @property
    def status(self) -> str:
        """Base URL of its status port."""
        return f"http://127.0.0.1:{self.status_port}"

    @property
    def pd_addresses(self) -> str:
        """PD as TiDB wants it: without the scheme, which its own TLS settings decide."""
        return ",".join(url.partition("://")[2] for url in self._pd)

    def listens(self) -> list[int]:
        """Its SQL and status ports."""
        return [self.port, self.status_port]

    @abstractmethod
    def violations(self) -> list[str]:
        """What clients did in its sight that no MySQL client may do; one line each, over all its runs."""

    async def serves(self) -> bool:
        """Whether it says so itself: `GET /status` is answered with 200."""
        return await answers(f"{self.status}/status")


class FakeTidb(Tidb):
    """One stand-in. `mariadb`: address of the server with the data."""

    def __init__(
        self,
        directory: Path,
        port: int,
        status_port: int,
        *,
        name: str,
        pd: Sequence[str],
        mariadb: str,
        graceful_wait: float = 0.0,
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(
            directory, port, status_port, name=name, pd=pd, graceful_wait=graceful_wait, arguments=arguments
        )
        self._mariadb = mariadb

    def command(self) -> list[str]:
        """The stand-in with everything said on its command line."""
        return [
            *(sys.executable, "-P", "-m", _MODULE),
            *("--host", "127.0.0.1", "-P", str(self.port)),
            *("--status-host", "127.0.0.1", "--status", str(self.status_port)),
            *("--advertise-address", "127.0.0.1"),
            *("--store", "tikv", "--path", self.pd_addresses),
            *("--mariadb", self._mariadb),
            *("--graceful-wait", str(self.graceful_wait)),
            *self.arguments,
        ]

    def environment(self) -> Mapping[str, str]:
        """Ours, with output that is not held back."""
        return dict(os.environ) | {"PYTHONUNBUFFERED": "1"}

    def violations(self) -> list[str]:
        """The stand-in writes them."""
        lines = self.process.log.read_text(errors="replace").splitlines()
        return [line for line in lines if "protocol violation" in line]
