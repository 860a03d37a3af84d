"""Load with sysbench: create its table, run clients until they are stopped, and read their counts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench.programs import run_program
from sandbox.child_process import ChildProcess, ProcessFailed, describe_exit, find_program
from sandbox.session_certificate import SessionCertificate

DATABASE = "sbtest"
_SCRIPTS = Path(__file__).with_name("sysbench_scripts")
READ_WRITE_SCRIPT = _SCRIPTS / "read_write.lua"
"""Transactions of about 20 statements each, on long sessions."""
SHORT_SESSIONS_SCRIPT = _SCRIPTS / "short_sessions.lua"
"""Each transaction is a session with one statement."""
_TEXT_PROTOCOL_OPTION = "--db-ps-mode=disable"
_TABLE_TIMEOUT_SECONDS = 120.0  # TiDB needs half a minute for 100,000 rows
_STOP_FILE = "stop"
_COUNT_LABELS = ("transactions", "queries", "ignored errors", "reconnects")
_START_STOP_TIMEOUT_SECONDS = 60.0  # until sysbench has started, and until it has stopped
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class SysbenchCounts:
    """The counts of sysbench. `errors`: failed statements, which sysbench retries."""

    transactions: int
    statements: int
    errors: int
    reconnects: int

    @classmethod
    def parse(cls, output: str) -> Self | None:
        """Parse sysbench's final output; None if a count is missing."""
        matches = [re.search(rf"^\s*{label}:\s+(\d+)", output, re.MULTILINE) for label in _COUNT_LABELS]
        counts = [int(match[1]) for match in matches if match]
        return cls(*counts) if len(counts) == len(_COUNT_LABELS) else None


def _sysbench(script: Path | str, port: int, rows: int) -> list[str]:
    return [
        *(find_program("sysbench", "sysbench"), str(script), "--db-driver=mysql"),
        *("--mysql-host=127.0.0.1", f"--mysql-port={port}", "--mysql-user=root", f"--mysql-db={DATABASE}"),
        *("--tables=1", f"--table-size={rows}"),
    ]


async def make_table(port: int, directory: Path, *, rows: int) -> None:
    """Create sysbench's database and its table sbtest1 on a server whose user root has no password.

    `directory`: for logs. Raises ProcessFailed, ProgramMissing or TimeoutError.
    """
    server = ("--no-defaults", "--host=127.0.0.1", f"--port={port}", "--user=root")
    mariadb = [find_program("mariadb", "mariadb-client"), *server, f"--execute=create database {DATABASE}"]
    await run_program("mariadb", mariadb, directory, _TABLE_TIMEOUT_SECONDS)
    command = [*_sysbench("oltp_point_select", port, rows), "prepare"]
    await run_program("sysbench-prepare", command, directory, _TABLE_TIMEOUT_SECONDS)


@dataclass(frozen=True, slots=True)
class SysbenchLoad:
    """Clients of the table that `make_table` creates. `rate`: transactions per second; 0: full speed."""

    rows: int
    threads: int
    prepared: bool = True
    tls: bool = False
    rate: int = 0
    script: Path = READ_WRITE_SCRIPT

    def command(self, port: int) -> list[str]:
        return [
            *_sysbench(self.script, port, self.rows),
            *(() if self.prepared else (_TEXT_PROTOCOL_OPTION,)),
            *(("--mysql-ssl=on",) if self.tls else ()),
            *(f"--threads={self.threads}", f"--rate={self.rate}", "--time=0", "--report-interval=1", "run"),
        ]

    @asynccontextmanager
    async def running(
        self, port: int, directory: Path, ca: Path | None = None
    ) -> AsyncIterator[RunningSysbench]:
        """Run the clients during the block; `RunningSysbench.stop` stops them. `ca`: the server's CA.

        Raises ProcessFailed if sysbench exits within its first second, and TimeoutError.
        """
        _prepare_directory(directory, ca, tls=self.tls)
        process = ChildProcess("sysbench", self.command(port), directory=directory)
        clients = RunningSysbench(process, directory / _STOP_FILE)
        try:
            async with asyncio.timeout(_START_STOP_TIMEOUT_SECONDS):
                await clients.wait_started()
            yield clients
        finally:
            await process.kill()  # no effect if the process has exited


class RunningSysbench:
    def __init__(self, process: ChildProcess, stop: Path) -> None:
        self.process = process
        self._stop_file = stop

    async def wait_started(self) -> None:
        """Return when the clients have run for a second. Raises ProcessFailed."""
        while "[ 1s ]" not in self.process.output():
            self.raise_if_ended()
            await asyncio.sleep(_POLL_SECONDS)

    def raise_if_ended(self) -> None:
        """Raise ProcessFailed if sysbench has exited, as it does on errors that it does not ignore."""
        code = self.process.returncode
        if code is not None:
            raise ProcessFailed("sysbench", describe_exit(code), self.process.tail())

    async def stop(self) -> SysbenchCounts:
        """Stop after the current transactions; return the counts. Raises ProcessFailed or TimeoutError."""
        self.raise_if_ended()
        self._stop_file.touch()
        async with asyncio.timeout(_START_STOP_TIMEOUT_SECONDS):
            code = await self.process.wait()
        counts = SysbenchCounts.parse(self.process.output())
        if code != 0 or counts is None:
            raise ProcessFailed("sysbench", describe_exit(code), self.process.tail())
        return counts


def _prepare_directory(directory: Path, ca: Path | None, *, tls: bool) -> None:
    """Write TLS files under the names that sysbench expects. The server verifies no client certificate."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _STOP_FILE).unlink(missing_ok=True)
    if not tls:
        return
    client_certificate = SessionCertificate.load_or_create(directory / "certificate", rsa=True)
    (directory / "client-cert.pem").write_bytes(client_certificate.cert.read_bytes())
    (directory / "client-key.pem").write_bytes(client_certificate.key.read_bytes())
    (directory / "cacert.pem").write_bytes((ca or client_certificate.cert).read_bytes())
