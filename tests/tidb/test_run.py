"""`tidevoy run` with real servers: it prints what it starts, serves clients, and keeps data with --dir."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from sandbox.child_process import ChildProcess
from sandbox.ports import Ports
from sandbox.tidb_binaries import TidbBinaries
from tests.support.tidb.sessions import connect, query_rows, query_value
from tests.support.waiting import wait_until

TIDEVOY = str(Path(sys.executable).with_name("tidevoy"))
_TIMEOUT_SECONDS = 120.0
pytestmark = pytest.mark.timeout(300)


def free_ports() -> tuple[int, list[str]]:
    """Return the port for clients, and the options for all ports."""
    with Ports() as ports:
        ports_by_name = {name: ports.allocate() for name in ("port", "api-port", "xds-port", "admin-port")}
    return ports_by_name["port"], [f"--{name}={port}" for name, port in ports_by_name.items()]


def start_with_folder(folder: Path) -> ChildProcess:
    """Start `tidevoy run` with the programs in this folder, and none from the environment."""
    _, ports = free_ports()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEVOY_")}
    command = [TIDEVOY, "run", f"--tidb-bin={folder}", *ports]
    return ChildProcess("run", command, directory=folder, env=environment)


@asynccontextmanager
async def run_tidevoy(directory: Path, *options: str) -> AsyncIterator[tuple[ChildProcess, int]]:
    """Run `tidevoy run` with one node. When it is ready, yield the process and the port for clients."""
    port, port_options = free_ports()
    command = [TIDEVOY, "run", "--nodes=1", "--graceful-wait=0", *port_options, *options]
    process = ChildProcess("run", command, directory=directory)

    def is_ready() -> bool:
        assert process.returncode is None, process.output()
        return "Press Ctrl-C to stop." in process.output()

    try:
        await wait_until(is_ready, _TIMEOUT_SECONDS)
        yield process, port
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            assert await process.wait() == 0
    finally:
        await process.kill()


async def test_real_cluster_keeps_its_data(tmp_path: Path, tidb_bin: TidbBinaries) -> None:
    dir_option = ("--dir", str(tmp_path / "kept"))
    folders = {tidb_bin.tidb.parent, tidb_bin.pd.parent, tidb_bin.store.program.parent}
    # TiUP has a folder for each program, which --tidb-bin does not support.
    bin_option = ("--tidb-bin", str(tidb_bin.tidb.parent)) if len(folders) == 1 else ()
    async with run_tidevoy(tmp_path, *dir_option) as (process, port):
        output = process.output()
        for line in (
            rf"Starting PD v\S+ \({tidb_bin.pd}\) \.\.\.",
            rf"Starting the store .*\({tidb_bin.store.program}\) \.\.\.",
            rf"Starting TiDB v\S+ \({tidb_bin.tidb}\), 1 of 1",
        ):
            assert re.search(line, output), output
        commands = [
            " ".join(child.cmdline()) for child in psutil.Process(process.pid).children(recursive=True)
        ]
        assert len(commands) == 5, commands  # PD, the store, TiDB, the control plane, Envoy
        with connect(port) as connection:
            assert "TiDB" in query_value(connection, "select version()")
            query_rows(connection, "create table test.kept (n int)")
            query_rows(connection, "insert into test.kept values (42)")
    async with run_tidevoy(tmp_path, *dir_option, *bin_option) as (_, port):
        with connect(port) as connection:
            assert query_value(connection, "select n from test.kept") == 42


async def test_folder_without_the_programs_is_reported(tmp_path: Path) -> None:
    process = start_with_folder(tmp_path)
    assert await process.wait() == 1
    output = process.output()
    assert output.startswith(f"tidevoy: {tmp_path} has no tidb-server and no pd-server and no tikv-server; ")
    assert output.count("\n") == 1


async def test_program_that_does_not_start_is_reported(tmp_path: Path) -> None:
    for name in ("tidb-server", "pd-server", "tikv-server"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 3\n")
        (tmp_path / name).chmod(0o755)
    process = start_with_folder(tmp_path)
    assert await process.wait() == 1
    *_, last = process.output().splitlines()
    assert last == f"tidevoy: pd ({tmp_path}/pd-server) did not start: it ended with exit code 3"
