"""Create the table that sysbench's clients use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sandbox.child_process import ChildProcess, ProcessFailed, describe_exit, find_program

DATABASE = "sbtest"
TEXT_PROTOCOL_OPTION = "--db-ps-mode=disable"
"""Selects the text protocol, without prepared statements."""
_PROGRAM_TIMEOUT_SECONDS = 120.0  # TiDB needs half a minute for 100,000 rows


async def make_table(port: int, directory: Path, *, rows: int) -> None:
    """Create sysbench's database and its table sbtest1 on a server whose user root has no password.

    `directory`: for logs. Raises ProcessFailed, ProgramMissing or TimeoutError.
    """
    server = ("--no-defaults", "--host=127.0.0.1", f"--port={port}", "--user=root")
    mariadb = find_program("mariadb", "mariadb-client")
    await _run_program("mariadb", [mariadb, *server, f"--execute=create database {DATABASE}"], directory)
    command = [
        *(find_program("sysbench", "sysbench"), "oltp_point_select", "--db-driver=mysql"),
        *("--mysql-host=127.0.0.1", f"--mysql-port={port}", "--mysql-user=root", f"--mysql-db={DATABASE}"),
        *("--tables=1", f"--table-size={rows}", "prepare"),
    ]
    await _run_program("sysbench-prepare", command, directory)


async def _run_program(name: str, command: Sequence[str], directory: Path) -> None:
    process = ChildProcess.start(name, command, directory=directory)
    try:
        async with asyncio.timeout(_PROGRAM_TIMEOUT_SECONDS):
            code = await process.wait()
    finally:
        await process.kill()  # no effect if it has exited
    if code != 0:
        raise ProcessFailed(name, describe_exit(code), process.tail())
