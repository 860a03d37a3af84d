"""Tidevoy replays what TiProxy has captured, and TiProxy replays what Tidevoy has captured.

The program `tiproxy` must be in the folder of the TiDB programs, or on the PATH.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.ports import Ports
from sandbox.tidb_cluster import TidbCluster
from tests.support.tidb.deterministic_load import fill_table, open_session, run_sessions, table_checksum
from tests.support.tidb.tiproxy import TiProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

SESSIONS = 12
STEPS = 40
OPEN_BEFORE = 4
"""Sessions that are open when the capture begins: their states are in the capture."""
_REPLAY = Path("filters/target/release/tidevoy-replay")


async def copy_for(tiproxy: TiProxy, database: str, captured: Path, directory: Path) -> Path:
    """Copy a capture. Releases of TiProxy that number their files find no others: its files get numbers."""
    probe, copied = directory / "probe", directory / "copied"
    await tiproxy.start_traffic_job("capture", output=str(probe), duration="1h")
    await run_sessions(tiproxy.sql_port, database, range(1), 1)
    await tiproxy.cancel_traffic_jobs()
    shutil.copytree(captured, copied)
    if list(probe.glob("traffic-1.log.gz")):
        files = sorted(copied.glob("traffic-*"))
        for number, file in enumerate(files, start=1):
            file.rename(copied / f"traffic-{number}.log.gz")
    return copied


async def test_tidevoy_replays_captures_of_tiproxy(
    tmp_path: Path, cluster: TidbCluster, database: str, ports: Ports, tiproxy_program: str
) -> None:
    captured, replayed = tmp_path / "captured", tmp_path / "replayed"
    fill_table(cluster.tidb[0], database, SESSIONS)
    tiproxy = TiProxy(tiproxy_program, tmp_path / "tiproxy", ports, cluster.pd.url.removeprefix("http://"))
    async with tiproxy:
        early = [await open_session(tiproxy.sql_port, database, number) for number in range(OPEN_BEFORE)]
        await tiproxy.start_traffic_job("capture", output=str(captured), duration="1h")
        await asyncio.gather(*(session.run(STEPS) for session in early))
        late = await run_sessions(tiproxy.sql_port, database, range(OPEN_BEFORE, SESSIONS), STEPS)
        for session in early:
            await session.quit()
        await tiproxy.cancel_traffic_jobs()
    content = table_checksum(cluster.tidb[0], database)
    fill_table(cluster.tidb[0], database, SESSIONS)
    assert table_checksum(cluster.tidb[0], database) != content

    arguments = ["run", str(captured), "--target", f"127.0.0.1:{cluster.tidb[1].port}", "--user", "root"]
    process = await asyncio.create_subprocess_exec(
        _REPLAY,
        *arguments,
        *("--output", str(replayed), "--unbounded", "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    totals = json.loads(output)["totals"]
    print(f"{sorted(path.name for path in captured.iterdir())}: {totals}")
    meta = json.loads((captured / "meta").read_bytes())
    assert totals["records"] == meta["Cmds"] >= late + sum(session.statements - 3 for session in early)
    assert (totals["errors"], totals["sessions"]) == (0, SESSIONS)
    assert table_checksum(cluster.tidb[0], database) == content


async def test_tiproxy_replays_captures_of_tidevoy(
    tmp_path: Path, cluster: TidbCluster, database: str, ports: Ports, tiproxy_program: str
) -> None:
    fill_table(cluster.tidb[0], database, SESSIONS)
    settings = {"rebalance": {"enabled": False}, "capture": {"directory": str(tmp_path / "captures")}}
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
        early = [await open_session(stack.sql_port, database, number) for number in range(OPEN_BEFORE)]
        await stack.api.post("/v1/traffic/capture", json={"name": "load", "duration_seconds": 3600})

        async def is_active(expected: bool) -> bool:
            envoys = (await stack.api.get("/v1/traffic/capture")).json()["envoys"]
            return bool(envoys) and all(envoy["active"] == expected for envoy in envoys)

        await stack.wait_until(lambda: is_active(True), "a capture")
        await asyncio.gather(*(session.run(STEPS) for session in early))
        await run_sessions(stack.sql_port, database, range(OPEN_BEFORE, SESSIONS), STEPS)
        for session in early:
            await session.quit()
        await stack.api.delete("/v1/traffic/capture")
        await stack.wait_until(lambda: is_active(False), "the end of the capture")
    content = table_checksum(cluster.tidb[0], database)

    [captured] = (tmp_path / "captures/load").iterdir()
    tiproxy = TiProxy(tiproxy_program, tmp_path / "tiproxy", ports, cluster.pd.url.removeprefix("http://"))
    async with tiproxy:
        directory = await copy_for(tiproxy, database, captured, tmp_path)
        fill_table(cluster.tidb[0], database, SESSIONS)
        assert table_checksum(cluster.tidb[0], database) != content
        await tiproxy.start_traffic_job(
            "replay", input=str(directory), username="root", password="", speed="10"
        )

        async def has_ended() -> bool:
            return bool((await tiproxy.traffic_job("replay"))["status"] != "running")

        await wait_until(has_ended, timeout_seconds=60)
        job = await tiproxy.traffic_job("replay")
    print(f"{sorted(path.name for path in directory.iterdir())}: {job}")
    assert job["status"] == "done", job
    assert table_checksum(cluster.tidb[0], database) == content
