"""Envoys of two builds behind control planes of both, and upgrades of a whole deployment under load."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.revisions import ModuleBuild
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.controlplane.cli_process import CliResult, run_tidevoy, start_tidevoy, wait_for_result
from tests.support.e2e.envoy_replacement import (
    SupervisedEnvoy,
    accepts_sessions,
    connect_repeatedly,
    expect_no_failures,
    run_working_sessions,
    wait_for_statements,
)
from tests.support.upgrade.builds import Upgrade, minor_version, version_of
from tests.support.upgrade.mixed_cluster import MixedCluster, run_mixed_cluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("isolated_network")]

SESSIONS, CONNECTING_CLIENTS = 24, 8
OLDER, NEWER = "envoy-older", "envoy-newer"


@asynccontextmanager
async def run_cluster(
    directory: Path, mariadb: MariaDb, signing: SessionCertificate, build: ModuleBuild
) -> AsyncIterator[MixedCluster]:
    async with run_mixed_cluster(directory, mariadb, [build], node_arguments=signing.arguments) as cluster:
        yield cluster


@pytest.mark.parametrize("control_plane", ["older", "newer"])
async def test_a_control_plane_serves_envoys_of_both_builds(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, upgrade: Upgrade, control_plane: str
) -> None:
    build = getattr(upgrade, control_plane)
    async with run_cluster(tmp_path, mariadb, signing, build) as cluster:
        (plane,) = cluster.planes
        await cluster.add_envoy(upgrade.older, OLDER)
        await cluster.add_envoy(upgrade.newer, NEWER)
        fleet = await cluster.fleet(plane)
        own, other = (OLDER, NEWER) if build == upgrade.older else (NEWER, OLDER)
        other_build = upgrade.newer if build == upgrade.older else upgrade.older
        assert (fleet[own]["filter"], fleet[own]["problem"]) == ("module", None)
        table = await run_tidevoy(plane.api_url, "envoys")
        assert table.exit_code == 0
        print(f"\n{table.stdout}{table.stderr}")
        if not upgrade.modules_are_compatible:
            problem = f"its module is version {version_of(other_build)} and this control plane needs"
            assert fleet[other]["filter"] == "none"
            assert f"{other}: {problem} {minor_version(build)}.x" in table.stderr
        else:
            assert (fleet[other]["filter"], fleet[other]["problem"]) == ("module", None)
            assert table.stderr == ""
        async with run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks):
            await wait_for_statements(sessions, tasks)
            if upgrade.modules_are_compatible:
                for node in cluster.nodes:
                    await cluster.drain(plane, node)
                    await cluster.undrain(plane, node)
                for name in (OLDER, NEWER):
                    moved = [await cluster.migrations(name, node) for node in cluster.nodes]
                    print(f"{name}: {moved}")
                    assert all(results.keys() <= {"moved ok"} for results in moved)
                    assert sum(results.get("moved ok", 0) for results in moved) > 0
            await wait_for_statements(sessions, tasks)


async def start_replacement(
    cluster: MixedCluster, old: SupervisedEnvoy, new: SupervisedEnvoy
) -> asyncio.subprocess.Process:
    """Start `tidevoy envoys replace`."""
    return await start_tidevoy(
        cluster.planes[0].api_url,
        *("envoys", "replace", "--old-admin", old.admin, "--new-admin", new.admin),
        *("--start", new.command("start"), "--undo", new.command("stop"), "--stop", old.command("stop")),
        *("--start-timeout", "15s"),
    )


async def replace_envoy(cluster: MixedCluster, old: SupervisedEnvoy, new: SupervisedEnvoy) -> CliResult:
    """Replace an Envoy that has sessions, which run statements until the old Envoy has closed its port."""
    async with run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks):
        command = await start_replacement(cluster, old, new)

        async def has_closed_port() -> bool:
            return command.returncode is not None or await accepts_sessions(old.admin) is False

        await wait_until(has_closed_port, 60)
        await wait_for_statements(sessions, tasks)
        for session in sessions:
            session.stop()
        await asyncio.gather(*tasks)
        return await wait_for_result(command)


async def replace_control_plane(
    cluster: MixedCluster, build: ModuleBuild, *, copy_to: Path | None = None, copy_from: Path | None = None
) -> None:
    """Restart the control plane with another build, and wait until the running Envoys are connected.

    In between, copy its `state_dir` to `copy_to`, or replace it by `copy_from`.
    """
    (plane,) = cluster.planes
    state = Path(plane.settings["state_dir"])
    assert await plane.terminate() == 0
    if copy_to is not None:
        shutil.copytree(state, copy_to)
    if copy_from is not None:
        shutil.rmtree(state)
        shutil.copytree(copy_from, state)
    plane.build = build
    await plane.launch()
    running = {name for name, envoy in cluster.envoys.items() if envoy.process.is_running}

    async def are_connected() -> bool:
        fleet = await cluster.fleet(plane)
        return all(name in fleet and fleet[name]["connected_since"] for name in running)

    await wait_until(are_connected, 60)
    await cluster.wait_all_in_service()


async def drain_each_node(cluster: MixedCluster, envoy: str) -> int:
    """Drain one node after the other. Return how many sessions of the Envoy have migrated."""
    (plane,) = cluster.planes

    async def count_migrations() -> int:
        results = [await cluster.migrations(envoy, node) for node in cluster.nodes]
        assert all(counts.keys() <= {"moved ok"} for counts in results), results
        return sum(counts.get("moved ok", 0) for counts in results)

    before = await count_migrations()
    for node in cluster.nodes:
        await cluster.drain(plane, node)
        await cluster.undrain(plane, node)
    return await count_migrations() - before


async def expect_drain_waits(cluster: MixedCluster, envoy: str) -> None:
    """Check that a drain does not migrate the Envoy's sessions, although the Envoy opens no new ones there.

    The module rejects the configuration of a control plane of another minor version, so it does not know
    that the node is drained.
    """
    (plane,) = cluster.planes
    build = plane.build

    async def is_rejected() -> bool:
        rejection = (await cluster.fleet(plane))[envoy]["config_rejection"]
        return (
            rejection is not None and f"the control plane is version {version_of(build)}" in rejection["text"]
        )

    await wait_until(is_rejected, 60)
    node = cluster.nodes[0]
    await cluster.call(plane, "POST", f"/v1/nodes/{node.address}/drain")
    await cluster.wait_for_state(plane, node, "draining")
    before = await cluster.connections(node)
    async with run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks):
        await wait_for_statements(sessions, tasks, 50)
        assert 0 < await cluster.connections(node) <= before
    assert await cluster.migrations(envoy, node) == {}
    assert (await cluster.node(plane, node))["state"] == "draining"
    await cluster.undrain(plane, node)


@pytest.mark.parametrize("order", ["control plane first", "Envoys first"])
async def test_upgrade_and_rollback_under_load(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, upgrade: Upgrade, order: str
) -> None:
    """No statement fails and no connection is rejected, whatever is replaced first."""
    compatible = upgrade.modules_are_compatible
    async with run_cluster(tmp_path, mariadb, signing, upgrade.older) as cluster:
        older = await cluster.add_envoy(upgrade.older, OLDER)
        newer = await cluster.add_envoy(upgrade.newer, NEWER, launch=False)
        back = await cluster.add_envoy(upgrade.older, f"{OLDER}-again", launch=False)
        async with connect_repeatedly(cluster.sql_port, CONNECTING_CLIENTS) as connections:
            if order == "Envoys first":
                result = await replace_envoy(cluster, older, newer)
                if compatible:
                    assert result.exit_code == 0, result.stderr
                else:
                    problem = (
                        f"its module is version {version_of(upgrade.newer)} and this control plane needs"
                    )
                    assert (result.exit_code, problem in result.stderr) == (1, True), result.stderr
                    assert "keeps serving" in result.stderr
                    assert await accepts_sessions(older.admin) is True
            async with run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks):
                await replace_control_plane(cluster, upgrade.newer, copy_to=tmp_path / "copy")
                await wait_for_statements(sessions, tasks)
                serving = NEWER if order == "Envoys first" and compatible else OLDER
                if compatible:
                    assert await drain_each_node(cluster, serving) > 0
                else:
                    await expect_drain_waits(cluster, serving)
                await wait_for_statements(sessions, tasks)
            if serving == OLDER:
                result = await replace_envoy(cluster, older, newer)
                assert result.exit_code == 0, result.stderr
            async with run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks):
                assert await drain_each_node(cluster, NEWER) > 0
                expect_no_failures(tasks)
            await roll_back(cluster, upgrade, newer, back, tmp_path / "copy")
        print(f"\n{order}: {connections.greeted} connections, {len(connections.failures)} failed")
        assert connections.failures == []
        assert connections.greeted > 0


async def roll_back(
    cluster: MixedCluster, upgrade: Upgrade, newer: SupervisedEnvoy, back: SupervisedEnvoy, copy: Path
) -> None:
    """Replace the control plane and the Envoy by those of the older build.

    `copy`: of the `state_dir` before the upgrade, for a build that cannot read that of the newer one.
    """
    if not upgrade.modules_are_compatible:
        result = await replace_envoy(cluster, newer, back)
        problem = f"its module is version {version_of(upgrade.older)} and this control plane needs"
        assert (result.exit_code, problem in result.stderr) == (1, True), result.stderr
        assert await accepts_sessions(newer.admin) is True
    async with run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks):
        await replace_control_plane(
            cluster, upgrade.older, copy_from=copy if upgrade.changes_formats else None
        )
        await wait_for_statements(sessions, tasks)
    if upgrade.changes_formats:
        # According to the copy it still runs, and may have sessions that no control plane knows of.
        forgotten = await run_tidevoy(cluster.planes[0].api_url, "envoys", "forget", OLDER)
        assert forgotten.exit_code == 0, forgotten.stderr
    result = await replace_envoy(cluster, newer, back)
    assert result.exit_code == 0, result.stderr
    async with run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks):
        assert await drain_each_node(cluster, back.name) > 0
        expect_no_failures(tasks)
