"""`tidevoy run` on real servers: what it starts is said, works, and keeps its data with --dir."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from sandbox.ports import Ports
from sandbox.process import Process
from sandbox.tidb_binaries import TidbBinaries
from tests.tidb.sessions import connect, rows, value

TIDEVOY = str(Path(sys.executable).with_name("tidevoy"))
_START_SECONDS = 120
pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def running(directory: Path, *options: str) -> AsyncIterator[tuple[Process, int]]:
    """`tidevoy run` of one node that is ready, and the port for clients; told to end with SIGINT."""
    with Ports() as ports:
        sql, api, xds, admin = (ports.take() for _ in range(4))
    advertised = (f"--port={sql}", f"--api-port={api}", f"--xds-port={xds}", f"--admin-port={admin}")
    command = [TIDEVOY, "run", "--nodes=1", "--graceful-wait=0", *advertised, *options]
    process = Process.start("run", command, directory=directory)
    try:
        async with asyncio.timeout(_START_SECONDS):
            while "Ctrl-C ends it." not in process.output():
                assert process.returncode is None, process.output()
                await asyncio.sleep(0.05)
        yield process, sql
        process.send(signal.SIGINT)
        async with asyncio.timeout(_START_SECONDS):
            assert await process.wait() == 0
    finally:
        await process.kill()


async def test_a_cluster_of_real_servers_keeps_its_data(tmp_path: Path, tidb_bin: TidbBinaries) -> None:
    kept = ("--dir", str(tmp_path / "kept"))
    folders = {tidb_bin.tidb.parent, tidb_bin.pd.parent, tidb_bin.store.program.parent}
    # TiUP has a folder for each: there is no option for them.
    named = ("--tidb-bin", str(tidb_bin.tidb.parent)) if len(folders) == 1 else ()
    async with running(tmp_path, *kept) as (process, port):
        said = process.output()
        for line in (
            rf"Starting PD v\S+ \({tidb_bin.pd}\) \.\.\.",
            rf"Starting the store .*\({tidb_bin.store.program}\) \.\.\.",
            rf"Starting TiDB v\S+ \({tidb_bin.tidb}\), 1 of 1",
        ):
            assert re.search(line, said), said
        parts = [" ".join(part.cmdline()) for part in psutil.Process(process.pid).children(recursive=True)]
        assert len(parts) == 5, parts  # PD, the store, TiDB, the control plane, Envoy
        with connect(port) as connection:
            assert "TiDB" in value(connection, "select version()")
            rows(connection, "create table test.kept (n int)")
            rows(connection, "insert into test.kept values (42)")
    async with running(tmp_path, *kept, *named) as (_, port):
        with connect(port) as connection:
            assert value(connection, "select n from test.kept") == 42


async def test_a_folder_without_the_programs_is_named(tmp_path: Path) -> None:
    process = Process.start("run", [TIDEVOY, "run", "--tidb-bin", str(tmp_path)], directory=tmp_path)
    assert await process.wait() == 1
    told = process.output()
    assert told.startswith(f"tidevoy: {tmp_path} has no tidb-server and no pd-server and no tikv-server; ")
    assert told.count("\n") == 1
