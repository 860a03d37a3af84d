"""Control planes of two builds share their state in PD, while clients work through Envoys of both builds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.revisions import ControlPlaneOfBuild, ModuleBuild
from controlplane.model.nodes import CLUSTER_NAME
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.e2e.envoy_replacement import run_working_sessions, wait_for_statements
from tests.support.upgrade.builds import Upgrade
from tests.support.upgrade.mixed_cluster import MixedCluster, rejection_of, run_mixed_cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)  # the first build takes minutes

SESSIONS = 24
UNREADABLE = "a newer Tidevoy wrote fields to it that this version does not know"


@asynccontextmanager
async def run_replicas(
    directory: Path, mariadb: MariaDb, signing: SessionCertificate, leader: ModuleBuild, follower: ModuleBuild
) -> AsyncIterator[tuple[MixedCluster, ControlPlaneOfBuild, ControlPlaneOfBuild]]:
    """Run two control planes; the first one leads."""
    async with run_mixed_cluster(
        directory, mariadb, [leader, follower], node_arguments=signing.arguments
    ) as cluster:
        first, second = cluster.planes
        yield cluster, first, second


async def endpoints(cluster: MixedCluster, envoy: str) -> dict[str, tuple[Any, Any]]:
    """Return health and weight of each node that an Envoy has."""
    hosts = await cluster.envoys[envoy].process.hosts(CLUSTER_NAME)
    return {
        address: (host["health_status"].get("eds_health_status"), host["weight"])
        for address, host in hosts.items()
    }


async def wait_for_same_plan(cluster: MixedCluster) -> None:
    """Wait until all Envoys have the same nodes with the same health and weights."""
    plans: list[dict[str, tuple[Any, Any]]] = []

    async def are_equal() -> bool:
        plans[:] = [await endpoints(cluster, name) for name in cluster.envoys]
        return len(plans[0]) == len(cluster.nodes) and all(plan == plans[0] for plan in plans)

    try:
        await wait_until(are_equal, 30)
    except TimeoutError:
        raise AssertionError(f"the Envoys have different plans: {plans}") from None


@pytest.mark.parametrize("leader", ["older", "newer"])
async def test_replicas_of_two_builds_lead_in_turn(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, upgrade: Upgrade, leader: str
) -> None:
    if upgrade.changes_formats:
        pytest.skip("the older build does not read what the newer one writes")
    builds = [upgrade.older, upgrade.newer][:: 1 if leader == "older" else -1]
    async with run_replicas(tmp_path, mariadb, signing, *builds) as (cluster, first, second):
        await cluster.add_envoy(upgrade.older, "envoy-older")
        await cluster.add_envoy(upgrade.newer, "envoy-newer")
        async with run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks):
            # Each control plane accepts requests, and the sessions of each Envoy migrate.
            for node, plane in ((cluster.nodes[0], second), (cluster.nodes[1], first)):
                await cluster.drain(plane, node)
                await wait_for_same_plan(cluster)
                await cluster.undrain(plane, node)
            for name in cluster.envoys:
                moved = [await cluster.migrations(name, node) for node in cluster.nodes]
                assert sum(results.get("moved ok", 0) for results in moved) > 0, moved
            # The other one leads, and then the first one again.
            for lost, survivor in ((first, second), (second, first)):
                await lost.kill()
                await cluster.wait_for_leader(survivor)
                await cluster.wait_until_up_to_date(*cluster.envoys)
                await cluster.drain(survivor, cluster.nodes[2])
                await wait_for_same_plan(cluster)
                await lost.launch()
                await cluster.wait_for_leader(survivor)
                await cluster.undrain(lost, cluster.nodes[2])
                await wait_for_statements(sessions, tasks)
        for plane in cluster.planes:
            assert await cluster.events(plane, "state.load_failed", "replica.standalone") == []


async def wait_for_unreadable(cluster: MixedCluster, plane: ControlPlaneOfBuild, subject: str) -> None:
    """Wait until a control plane reports that it cannot read the intents or the plan in PD."""

    async def is_reported() -> bool:
        messages = [event["message"] for event in await cluster.events(plane, "state.load_failed")]
        return any(text.startswith(subject) and UNREADABLE in text for text in messages)

    await wait_until(is_reported, 30)


async def test_older_leader_rejects_requests_after_the_newer_follower_has_accepted_one(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, upgrade: Upgrade
) -> None:
    """Until then the older build leads the newer one. Afterwards, requests wait until a newer one leads."""
    if not upgrade.changes_formats:
        pytest.skip("the older build reads what the newer one writes")
    async with run_replicas(tmp_path, mariadb, signing, upgrade.older, upgrade.newer) as (
        cluster,
        older,
        newer,
    ):
        await cluster.add_envoy(upgrade.older, "envoy-older", planes=[older])
        async with run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks):
            await cluster.drain(older, cluster.nodes[0])
            await cluster.wait_for_state(newer, cluster.nodes[0], "drained")
            await cluster.undrain(older, cluster.nodes[0])

            drain = f"/v1/nodes/{cluster.nodes[1].address}/drain"
            await cluster.call(newer, "POST", drain)
            await wait_for_unreadable(cluster, older, "intents in PD")
            rejection = await rejection_of(cluster.call(older, "POST", drain))
            print(f"\nthe older leader: {rejection}")
            assert UNREADABLE in rejection
            assert "run the newer Tidevoy here too" in rejection
            for plane in cluster.planes:
                assert (await cluster.node(plane, cluster.nodes[1]))["state"] == "active"
            await wait_for_statements(sessions, tasks)

            await older.terminate()
            older.build = upgrade.newer
            await cluster.wait_for_leader(newer)
            await older.launch()
            await cluster.wait_for_leader(newer)
            for plane in cluster.planes:
                await cluster.wait_for_state(plane, cluster.nodes[1], "draining")
            await wait_for_statements(sessions, tasks)


async def test_older_follower_of_a_newer_leader_decides_alone(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, upgrade: Upgrade
) -> None:
    if not upgrade.changes_formats:
        pytest.skip("the older build reads what the newer one writes")
    async with run_replicas(tmp_path, mariadb, signing, upgrade.newer, upgrade.older) as (
        cluster,
        newer,
        older,
    ):
        await wait_for_unreadable(cluster, older, "the plan in PD")
        await cluster.add_envoy(upgrade.older, "envoy-older", planes=[older])
        (standalone,) = await cluster.events(older, "replica.standalone")
        assert "the shared state cannot be read" in standalone["message"]
        async with run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks):
            await cluster.call(newer, "POST", f"/v1/nodes/{cluster.nodes[0].address}/drain")
            await cluster.wait_for_state(newer, cluster.nodes[0], "draining")
            await wait_for_unreadable(cluster, older, "intents in PD")
            assert (await cluster.node(older, cluster.nodes[0]))["state"] == "active"
            # It never leads, even if no other control plane runs.
            await newer.terminate()
            rejection = await rejection_of(
                cluster.call(older, "POST", f"/v1/nodes/{cluster.nodes[1].address}/drain")
            )
            print(f"\nthe older follower: {rejection}")
            assert UNREADABLE in rejection
            await wait_for_statements(sessions, tasks)
            assert await cluster.leader(older) == ""
            await newer.launch()
            await cluster.wait_for_leader(newer)
            await cluster.wait_for_state(newer, cluster.nodes[0], "draining")
            await wait_for_statements(sessions, tasks)
