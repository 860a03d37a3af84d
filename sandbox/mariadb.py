"""A MariaDB server for tests and the sandbox (Debian package mariadb-server). Its data is not durable."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Self

from sandbox.child_process import ChildProcess, ProcessFailed, describe_exit, find_program
from sandbox.ports import Ports
from sandbox.server import Server, sends_mysql_greeting

PACKAGE = "mariadb-server"
_SOCKET = "mariadb.sock"
_MAX_UNIX_SOCKET_PATH_BYTES = 107

# Use little memory, and do not wait for the disk: this data is not needed after a crash of the machine.
_LOW_RESOURCE_OPTIONS = (
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=16M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-flush-method=nosync",
    "--innodb-doublewrite=0",
    "--skip-log-bin",
    "--performance-schema=OFF",
)


class MariaDb(Server):
    """A MariaDB server on 127.0.0.1 whose user root has no password."""

    start_timeout_seconds = 90.0
    stop_timeout = 20.0
    hidden_variables = "MYSQL_.*"

    def __init__(self, directory: Path, port: int, *, max_connections: int = 2000) -> None:
        super().__init__("mariadb", directory)
        self.port = port
        self._max_connections = max_connections

    @classmethod
    def start(cls, directory: Path, *, max_connections: int = 2000) -> Self:
        """Create a server on a free port, for use as `async with MariaDb.start(directory) as mariadb`."""
        ports = Ports()
        server = cls(directory, ports.allocate(), max_connections=max_connections)
        server.ports = ports
        return server

    @property
    def socket(self) -> Path:
        return self._data_directory / _SOCKET

    @property
    def address(self) -> str:
        """Where to connect: the path of the socket, or `host:port` if the path is too long (unix(7))."""
        path = str(self.socket)
        return path if len(os.fsencode(path)) <= _MAX_UNIX_SOCKET_PATH_BYTES else f"127.0.0.1:{self.port}"

    @property
    def _data_directory(self) -> Path:
        return self.directory / "mariadb.data"

    @property
    def _installed_marker(self) -> Path:
        return self.directory / "mariadb.installed"

    def listen_ports(self) -> list[int]:
        return [self.port]

    def command(self) -> list[str]:
        return [
            find_program("mariadbd", PACKAGE),
            "--no-defaults",
            *self._user_option(),
            f"--datadir={self._data_directory}",
            # A private directory: at its start, MariaDB removes all temporary tables in it, even those of
            # other servers.
            f"--tmpdir={self._data_directory}",
            # Relative to the data directory: the absolute path may be too long for a socket address
            # (unix(7)).
            f"--socket={_SOCKET}",
            f"--pid-file={self.directory / 'mariadb.pid'}",
            "--skip-networking=0",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            f"--max-connections={self._max_connections}",
            "--skip-name-resolve",
            "--local-infile=1",
            "--character-set-server=utf8mb4",
            "--collation-server=utf8mb4_bin",
            *_LOW_RESOURCE_OPTIONS,
        ]

    async def prepare(self) -> None:
        """Create the system tables before the first start."""
        if self._installed_marker.exists():
            return
        command = [
            find_program("mariadb-install-db", PACKAGE),
            "--no-defaults",
            *self._user_option(),
            f"--datadir={self._data_directory}",
            f"--tmpdir={self._data_directory}",  # private, as in `command`
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            *_LOW_RESOURCE_OPTIONS,
        ]
        install = ChildProcess(
            "mariadb-install-db", command, directory=self.directory, env=self.environment()
        )
        try:
            async with asyncio.timeout(self.start_timeout_seconds):
                code = await install.wait()
        except TimeoutError:
            reason = f"took more than {self.start_timeout_seconds:.0f} s"
            raise ProcessFailed(install.name, reason, install.tail()) from None
        finally:
            await install.kill()
        if code != 0:
            raise ProcessFailed(install.name, describe_exit(code), install.tail())
        self._installed_marker.touch()

    async def is_serving(self) -> bool:
        return await sends_mysql_greeting(self.port)

    def _user_option(self) -> list[str]:
        return ["--user=root"] if os.geteuid() == 0 else []
