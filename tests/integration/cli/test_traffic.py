"""`tidevoy traffic replay` and `compare` with the real program, on a simulated TiDB server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.controlplane.cli_process import CliResult, run_tidevoy
from tests.support.tidb_sim_clients import session_rules
from tests.support.traffic.capture_writer import Capture
from tests.support.traffic.replay_program import require_replay_program

UNUSED_URL = "http://127.0.0.1:1"  # no control plane is needed
STATEMENTS = 30  # of each kind


@pytest.fixture
async def sim(mariadb: MariaDb) -> AsyncIterator[TidbSim]:
    require_replay_program()
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim:
        yield sim


async def traffic(*arguments: str | Path) -> CliResult:
    return await run_tidevoy(UNUSED_URL, "traffic", *map(str, arguments))


async def test_two_replays_are_compared(sim: TidbSim, tmp_path: Path) -> None:
    capture = Capture()
    for number in range(STATEMENTS):
        capture.add(1, f"select {number}").add(2, f"select uuid(), {number}")
    directory = capture.add(1, "create database must_not_exist").write(tmp_path / "capture")
    target = ("--target", sim.sql_address, "--user", "root", "--reads-only", "--unbounded")
    outputs = [tmp_path / "old", tmp_path / "new"]
    replays = [traffic("replay", directory, *target, "--output", output) for output in outputs]
    for replay in await asyncio.gather(*replays):
        assert replay.exit_code == 0, replay
        rows = {" ".join(line.split()[:-1]): line.split()[-1] for line in replay.stdout.splitlines()}
        expected = {"replayed": str(2 * STATEMENTS), "skipped may write": "1", "errors": "0"}
        assert rows | expected == rows
    page = tmp_path / "page.html"
    compared = await traffic("compare", *outputs, "--html", page)
    assert compared.exit_code == 0, compared
    assert f"note: {STATEMENTS} of {STATEMENTS} results differ at `select `uuid` ( ) , ?`" in compared.stdout
    assert "<svg" in page.read_text()
    with_capture = await traffic("compare", directory, outputs[1], "--max-ratio", "1000")
    assert with_capture.exit_code == 0, with_capture
    assert "1 ran on the old side only" in with_capture.stderr


async def test_failure_of_the_program_is_shown(sim: TidbSim, tmp_path: Path) -> None:
    missing = await traffic("replay", tmp_path / "none", "--dry-run")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "none" in missing.stderr
