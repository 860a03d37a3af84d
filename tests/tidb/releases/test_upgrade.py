"""Rollouts upgrade real servers from release to release under load, unnoticed by clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.migration.stopwatch import run_stopwatch, slowest_ms, stop_stopwatch
from bench.sysbench import RunningSysbench, SysbenchLoad, make_table
from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from sandbox.tidb_binaries import TidbBinaries
from sandbox.tidb_cluster import TidbCluster
from sandbox.tidb_servers import TidbServer
from tests.support.controlplane.cli_process import start_tidevoy, wait_for_result
from tests.support.e2e.restart_action import ACTION, CommandRun, RestartCommand, get_rollout
from tests.support.tidb.node_operations import migration_counts
from tests.tidb.conftest import GRACEFUL_WAIT, NODES
from tests.tidb.releases.conftest import known_releases

THREADS = 32
ROWS = 10_000
TRANSACTIONS_PER_SECOND = 30
"""A moderate load: the servers, their store and all clients share this machine."""
_SLOW_START_SECONDS = 2.0
_RESTART_TIMEOUT_SECONDS = 300
"""The first server of a newer release upgrades the system tables."""
_ROLLOUT_TIMEOUT_SECONDS = 600


@pytest.mark.timeout(1800)
async def test_rollouts_upgrade_servers_release_by_release(tmp_path: Path, tidb_bin: TidbBinaries) -> None:
    releases = known_releases()
    first, *later = releases
    if not later:
        pytest.skip(f"there is only one release of TiDB, {first.version}")
    binaries = replace(tidb_bin, tidb=first.program)

    async def upgrade(node: Tidb, run: CommandRun) -> str:
        assert isinstance(node, TidbServer)
        node.release = next(release for release in releases if release.version == run.version)
        await node.restart()
        return "done"

    async with (
        RestartCommand(tmp_path / "action", timeout=_RESTART_TIMEOUT_SECONDS).serving() as restarter,
        TidbCluster.start(tmp_path / "tidb", binaries, nodes=NODES, graceful_wait=GRACEFUL_WAIT) as cluster,
        LocalCluster.start(
            tmp_path / "stack",
            cluster=cluster,
            settings={"rollouts": restarter.settings, "balance": {"slow_start": _SLOW_START_SECONDS}},
        ) as stack,
    ):
        restarter.nodes, restarter.default_behavior = lambda: stack.tidb, upgrade
        await make_table(stack.tidb[0].port, tmp_path / "table", rows=ROWS)
        load = SysbenchLoad(ROWS, THREADS, rate=TRANSACTIONS_PER_SECOND)
        async with (
            run_stopwatch(stack.sql_port, tmp_path / "stopwatch", interval=0.01) as stopwatch,
            load.running(stack.sql_port, tmp_path / "load") as sysbench,
        ):
            for release in later:
                await run_rollout(stack, release.version, sysbench)
                versions = {node["version"] for node in (await stack.nodes()).values()}
                assert versions == {release.version}
            counts = await sysbench.stop()
            statements = await stop_stopwatch(stopwatch)
        migrations = await migration_counts(stack)
        print(
            f"\n{' -> '.join(release.version for release in releases)}: {counts};"
            f" slowest statement of an idle session {slowest_ms(statements):.0f} ms; {migrations}"
        )
        assert (counts.errors, counts.reconnects) == (0, 0)
        assert counts.transactions > 0
        assert stack.violations() == []


async def run_rollout(stack: LocalCluster, version: str, sysbench: RunningSysbench) -> None:
    """Upgrade all nodes with `tidevoy rollout`. Check that all sessions moved, and none was cut."""
    command = await start_tidevoy(
        stack.control_plane.api_url,
        *("rollout", "start", "--nodes", "all", "--action", ACTION, "--version", version),
        *("--healthy-for", "2s", "--wait", "--json"),
    )
    result = await wait_for_result(command, _ROLLOUT_TIMEOUT_SECONDS)
    sysbench.raise_if_ended()
    assert result.exit_code == 0, (result, await stack.nodes())
    (rollout,) = [
        rollout
        for rollout in (await stack.api.get("/v1/rollouts")).raise_for_status().json()["rollouts"]
        if rollout["spec"]["version"] == version
    ]
    steps = (await get_rollout(stack.api, rollout["id"]))["steps"]
    assert [step["terminated_sessions"] for step in steps] == [0] * len(stack.tidb)
    assert min(step["migrated_sessions"] for step in steps) > 0
