"""Run sysbench clients until they are stopped, and read their counts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench.sysbench_load.table import DATABASE, TEXT_PROTOCOL_OPTION
from sandbox.child_process import ChildProcess, ProcessFailed, describe_exit, find_program
from sandbox.session_certificate import SessionCertificate

READ_WRITE_SCRIPT = Path(__file__).with_name("read_write.lua")
"""Transactions of about 20 statements each, on long sessions."""
SHORT_SESSIONS_SCRIPT = Path(__file__).with_name("short_sessions.lua")
"""Each transaction is a session with one statement."""
_STOP_FILE = "stop"
_COUNT_PATTERNS = {
    "transactions": r"transactions",
    "statements": r"queries",
    "errors": r"ignored errors",
    "reconnects": r"reconnects",
}
_START_STOP_TIMEOUT_SECONDS = 60.0  # until it starts, and until it has stopped
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
        matches = {
            name: re.search(rf"^\s*{label}:\s+(\d+)", output, re.MULTILINE)
            for name, label in _COUNT_PATTERNS.items()
        }
        counts = {name: int(match[1]) for name, match in matches.items() if match}
        return cls(**counts) if len(counts) == len(_COUNT_PATTERNS) else None


@dataclass(frozen=True, slots=True)
class SysbenchLoad:
    """Clients of the table of `make_table` with `rows` rows.

    `rate`: transactions per second; 0: full speed.
    """

    rows: int
    threads: int
    prepared: bool = True
    tls: bool = False
    rate: int = 0
    script: Path = READ_WRITE_SCRIPT

    def command(self, port: int) -> list[str]:
        """Return the command line of sysbench."""
        return [
            find_program("sysbench", "sysbench"),
            str(self.script),
            *(() if self.prepared else (TEXT_PROTOCOL_OPTION,)),
            *(("--mysql-ssl=on",) if self.tls else ()),
            *("--db-driver=mysql", "--mysql-host=127.0.0.1", f"--mysql-port={port}", "--mysql-user=root"),
            *(f"--mysql-db={DATABASE}", "--tables=1", f"--table-size={self.rows}"),
            *(f"--threads={self.threads}", f"--rate={self.rate}", "--time=0", "--report-interval=1", "run"),
        ]

    @asynccontextmanager
    async def running(
        self, port: int, directory: Path, ca: Path | None = None
    ) -> AsyncIterator[RunningSysbench]:
        """Run the clients during the block; `RunningSysbench.stop` stops them. `ca`: the server's, with TLS.

        Raises ProcessFailed if sysbench exits within its first second, and TimeoutError.
        """
        _prepare_directory(directory, ca, tls=self.tls)
        process = ChildProcess.start("sysbench-read-write", self.command(port), directory=directory)
        clients = RunningSysbench(process, directory / _STOP_FILE)
        try:
            async with asyncio.timeout(_START_STOP_TIMEOUT_SECONDS):
                await clients.wait_started()
            yield clients
        finally:
            await process.kill()  # no effect if it has exited


class RunningSysbench:
    """Running sysbench clients."""

    def __init__(self, process: ChildProcess, stop: Path) -> None:
        self.process = process
        self._stop_file = stop

    async def wait_started(self) -> None:
        """Return when the clients have run for a second. Raises ProcessFailed."""
        while "[ 1s ]" not in self.process.output():
            self.raise_if_ended()
            await asyncio.sleep(_POLL_SECONDS)

    def raise_if_ended(self) -> None:
        """Raise ProcessFailed if sysbench has exited: it exits on errors that it does not ignore."""
        code = self.process.returncode
        if code is not None:
            raise ProcessFailed("sysbench", describe_exit(code), self.process.tail())

    async def stop(self) -> SysbenchCounts:
        """Let each client finish its transaction, and return the counts.

        Raises ProcessFailed or TimeoutError.
        """
        self.raise_if_ended()
        self._stop_file.touch()
        async with asyncio.timeout(_START_STOP_TIMEOUT_SECONDS):
            code = await self.process.wait()
        counts = SysbenchCounts.parse(self.process.output())
        if code != 0 or counts is None:
            raise ProcessFailed("sysbench", describe_exit(code), self.process.tail())
        return counts


def _prepare_directory(directory: Path, ca: Path | None, *, tls: bool) -> None:
    """Write the TLS files that sysbench reads under fixed names. No server verifies its certificate."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _STOP_FILE).unlink(missing_ok=True)
    if not tls:
        return
    client_certificate = SessionCertificate.load_or_create(directory / "certificate", rsa=True)
    (directory / "client-cert.pem").write_bytes(client_certificate.cert.read_bytes())
    (directory / "client-key.pem").write_bytes(client_certificate.key.read_bytes())
    (directory / "cacert.pem").write_bytes((ca or client_certificate.cert).read_bytes())
