"""sysbench (Debian package), which plays the clients of a MySQL server and counts what they do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.process import Process, ProcessFailed, describe_exit, find_program

DATABASE = "sbtest"
TEXT = "--db-ps-mode=disable"
"""The text protocol, without prepared statements."""
POINT_SELECT = ("oltp_point_select", TEXT)
_QUERIES = re.compile(r"^\s*queries:\s+(\d+)\s+\(([\d.]+) per sec\.\)", re.MULTILINE)
_P95 = re.compile(r"^\s*95th percentile:\s+([\d.]+)", re.MULTILINE)
_PATIENCE = 60.0  # seconds beyond those that were asked for


def simple_range(rows: int) -> tuple[str, ...]:
    """The script and options whose one query gives so many rows."""
    return (
        "oltp_read_only",
        TEXT,
        "--skip-trx=on",
        "--point-selects=0",
        "--simple-ranges=1",
        "--sum-ranges=0",
        "--order-ranges=0",
        "--distinct-ranges=0",
        f"--range-size={rows}",
        # Ranges begin around the middle of the table, so that none is cut off by its end.
        "--rand-type=gaussian",
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the clients of one run did. `p95` is of one event, in milliseconds."""

    queries: int
    per_second: float
    p95: float

    @classmethod
    def read(cls, output: str) -> Outcome | None:
        """From what sysbench prints; None when it does not say how many queries there were, or says 0."""
        queries, p95 = _QUERIES.search(output), _P95.search(output)
        if queries is None or p95 is None or int(queries[1]) == 0:
            return None
        return cls(int(queries[1]), float(queries[2]), float(p95[1]))


class Sysbench:
    """One table of so many rows, and clients that read it as the user root, who has no password."""

    def __init__(self, directory: Path, *, rows: int, clients: int) -> None:
        self._directory = directory
        self._rows = rows
        self._clients = clients

    async def prepare(self, port: int) -> None:
        """Make the table on the server at `port`. ProcessFailed, TimeoutError."""
        mariadb = find_program("mariadb", "mariadb-client")
        server = ("--no-defaults", "--host=127.0.0.1", f"--port={port}", "--user=root")
        await self._run("mariadb", [mariadb, *server, f"--execute=create database {DATABASE}"], 0)
        await self._run("sysbench-prepare", self._command(port, ["oltp_point_select"], "prepare"), 0)

    async def run(self, port: int, workload: Sequence[str], seconds: int) -> Outcome:
        """Let clients work: `workload` is a script and its options. ProcessFailed, TimeoutError."""
        options = [*workload, f"--threads={self._clients}", f"--time={seconds}"]
        process = await self._run("sysbench", self._command(port, options, "run"), seconds)
        outcome = Outcome.read(process.output())
        if outcome is None:
            raise ProcessFailed("sysbench", "does not say how many queries it sent", process.tail())
        return outcome

    def _command(self, port: int, workload: Sequence[str], verb: str) -> list[str]:
        return [
            find_program("sysbench", "sysbench"),
            *workload,
            "--db-driver=mysql",
            "--mysql-host=127.0.0.1",
            f"--mysql-port={port}",
            "--mysql-user=root",
            f"--mysql-db={DATABASE}",
            "--tables=1",
            f"--table-size={self._rows}",
            verb,
        ]

    def load(self, *workload: str) -> SysbenchLoad:
        """These clients with a script and its options, as one of several kinds of load."""
        return SysbenchLoad(self, workload)

    async def _run(self, name: str, command: Sequence[str], seconds: int) -> Process:
        process = Process.start(name, command, directory=self._directory)
        try:
            async with asyncio.timeout(seconds + _PATIENCE):
                code = await process.wait()
        finally:
            await process.kill()  # nothing, when it has ended
        if code != 0:
            raise ProcessFailed(name, describe_exit(code), process.tail())
        return process


@dataclass(frozen=True, slots=True)
class SysbenchLoad:
    """What sysbench's clients do (`bench.workloads.Load`)."""

    sysbench: Sysbench
    workload: Sequence[str]

    async def run(self, port: int, seconds: float) -> Outcome:
        """Let them work; sysbench knows whole seconds only. ProcessFailed, TimeoutError."""
        return await self.sysbench.run(port, self.workload, max(1, round(seconds)))
