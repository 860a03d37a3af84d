"""A capture on real servers, with moves and restarts within, gives equal results when it is replayed.

With TIDEVOY_SOAK=1: a million statements of 500 sessions.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb_cluster import TidbCluster
from tests.support.soak import SOAK
from tests.support.tidb.deterministic_load import fill_table, open_session, run_sessions, table_checksum
from tests.support.tidb.node_operations import drain, undrain
from tests.support.traffic.capture_reader import capture_files, read_results

SESSIONS = 500 if SOAK else 24
STEPS = 1_270 if SOAK else 60
OPEN_BEFORE = SESSIONS // 4
"""Sessions that are open when the capture begins."""
_REPLAY = Path("filters/target/release/tidevoy-replay")


async def capture_load(stack: LocalCluster, database: str) -> int:
    """Capture sessions while all servers are restarted. Return the number of statements."""
    early = [await open_session(stack.sql_port, database, number) for number in range(OPEN_BEFORE)]
    started = await stack.api.post("/v1/traffic/capture", json={"name": "load", "duration_seconds": 3600})
    assert started.status_code == 201, started.text

    async def is_active() -> bool:
        envoys = (await stack.api.get("/v1/traffic/capture")).json()["envoys"]
        return bool(envoys) and all(envoy["active"] for envoy in envoys)

    await stack.wait_until(is_active, "a capture")
    others = range(OPEN_BEFORE, SESSIONS)
    late_load = asyncio.create_task(run_sessions(stack.sql_port, database, others, STEPS))
    early_load = asyncio.gather(*(session.run(STEPS) for session in early))
    restarts = 0
    while not late_load.done() and restarts < 3:
        node = stack.tidb[restarts]
        await drain(stack, node, 120)
        assert await node.terminate() == 0
        await node.launch()
        await undrain(stack, node)
        restarts += 1
    await early_load
    statements = await late_load + sum(session.statements - 3 for session in early)
    for session in early:
        await session.quit()
    assert restarts > 0
    await stack.api.delete("/v1/traffic/capture")

    async def has_ended() -> bool:
        status = (await stack.api.get("/v1/traffic/capture")).json()
        return not any(envoy["active"] for envoy in status["envoys"])

    await stack.wait_until(has_ended, "the end of the capture")
    status = (await stack.api.get("/v1/traffic/capture")).json()
    assert [(envoy["dropped"], envoy["write_errors"]) for envoy in status["envoys"]] == [(0, 0)]
    return statements


async def run_program(*arguments: str) -> dict[str, Any]:
    """Run `tidevoy-replay`, which must succeed. Return the JSON that it prints."""
    process = await asyncio.create_subprocess_exec(
        _REPLAY, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    result: dict[str, Any] = json.loads(output)
    return result


def sequences(directory: Path, name: str) -> dict[int, list[int]]:
    """Return the times of the statements of each session, in the order of the results."""
    times: dict[int, list[int]] = defaultdict(list)
    for file in capture_files(directory, name):
        for result in read_results(file):
            times[result["conn"]].append(result["time"])
    return times


@pytest.mark.timeout(3600 if SOAK else 300)
async def test_replays_give_equal_results(tmp_path: Path, cluster: TidbCluster, database: str) -> None:
    settings = {"rebalance": {"enabled": False}, "capture": {"directory": str(tmp_path / "captures")}}
    fill_table(cluster.tidb[0], database, SESSIONS)
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
        began_at = time.monotonic()
        statements = await capture_load(stack, database)
        captured_seconds = time.monotonic() - began_at
    captured = tmp_path / "captures/load"
    content = table_checksum(cluster.tidb[0], database)
    print(f"captured {statements:,} statements of {SESSIONS} sessions in {captured_seconds:.0f} s")
    for speed in (["--unbounded"], ["--speed", "1"]):
        fill_table(cluster.tidb[0], database, SESSIONS)
        assert table_checksum(cluster.tidb[0], database) != content
        output = tmp_path / f"replay{speed[0]}"
        began_at = time.monotonic()
        target = f"127.0.0.1:{cluster.tidb[1].port}"
        arguments = ["--target", target, "--user", "root", "--output", str(output), *speed, "--json"]
        summary = await run_program("run", str(captured), *arguments)
        print(f"replayed {speed} in {time.monotonic() - began_at:.0f} s: {summary}")
        comparison = await run_program("compare", str(captured), str(output))
        totals = comparison["totals"]
        assert totals["pairs"] >= statements
        assert (totals["missing"], totals["extra"], totals["differing_results"]) == (0, 0, 0), totals
        assert (comparison["new_errors"], comparison["gone_errors"]) == ([], [])
        assert table_checksum(cluster.tidb[0], database) == content
