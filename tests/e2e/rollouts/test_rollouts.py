"""Rollouts with real commands, simulated TiDB servers and clients: the normal case and every failure."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from bench.sysbench import SysbenchLoad
from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb import Tidb
from tests.support.controlplane.cli_process import run_tidevoy, start_tidevoy, wait_for_result
from tests.support.e2e.cluster import get_events, run_cluster
from tests.support.e2e.restart_action import (
    NEW_VERSION,
    ROLLOUT_REQUEST,
    RestartCommand,
    control_rollout,
    fail_with,
    get_rollout,
    restart_node,
    restart_with_version,
    stage_by_node,
    start_rollout,
    stop_node,
    wait_for_event,
    wait_for_phase,
    wait_for_rollout,
)

OLD_VERSION = "v8.5.3"
NODES = 3
CLIENTS = 16
TRANSACTIONS_PER_SECOND = 40  # Full speed would only slow down concurrent tests.
ROLLOUT_TIMEOUT_SECONDS = 150.0


QUICK_SETTINGS = {
    "balance": {"slow_start": 0},
    "drain": {"reconnect_grace": 0},
    "health": {"sql": {"interval": 0.2}, "status": {"interval": 0.2}},
}


async def have_equal_weights(stack: LocalCluster) -> bool:
    return len({node["published_weight"] for node in (await stack.nodes()).values()}) == 1


@pytest.mark.timeout(240)
async def test_rollout_upgrades_all_nodes_under_load(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, sysbench_rows: int
) -> None:
    async with RestartCommand(tmp_path / "action").serving() as restarter:
        cluster_context = run_cluster(
            tmp_path / "cluster",
            mariadb,
            nodes=NODES,
            arguments=signing.arguments,
            settings={**QUICK_SETTINGS, "balance": {"slow_start": 1}, "rollouts": restarter.settings},
        )
        async with cluster_context as stack:
            restarter.nodes = lambda: stack.tidb
            # During slow start a node might get no session, and then no session would migrate away from it.
            await stack.wait_until(lambda: have_equal_weights(stack), "the end of the slow start")
            load = SysbenchLoad(sysbench_rows, CLIENTS, rate=TRANSACTIONS_PER_SECOND)
            async with load.running(stack.sql_port, tmp_path / "load") as clients:
                command = await start_tidevoy(
                    stack.control_plane.api_url,
                    *("rollout", "start", "--nodes", "all", "--action", "restart", "--version", NEW_VERSION),
                    *("--healthy-for", "1s", "--wait"),
                )
                result = await wait_for_result(command, ROLLOUT_TIMEOUT_SECONDS)
                clients.raise_if_ended()
                totals = await clients.stop()
            assert result.exit_code == 0, (result, await stack.nodes())
            assert (totals.errors, totals.reconnects) == (0, 0)
            assert totals.transactions > 0
            nodes = await stack.nodes()
            assert {node["version"] for node in nodes.values()} == {NEW_VERSION}
            assert {node["drain"] is None for node in nodes.values()} == {True}
            runs = restarter.runs()
            assert sorted(run.address for run in runs) == sorted(nodes)
            (name,) = {run.rollout for run in runs}
            rollout = await get_rollout(stack.api, name)
            # No node had sessions when it was restarted, because they had migrated away.
            assert [step["terminated_sessions"] for step in rollout["steps"]] == [0] * NODES
            migrated_counts = [step["migrated_sessions"] for step in rollout["steps"]]
            assert min(migrated_counts) > 0, migrated_counts
            for node in stack.tidb:
                assert re.search(
                    rf"^{node.address} +done .*{OLD_VERSION} -> {NEW_VERSION}", result.stdout, re.MULTILINE
                ), result.stdout
                assert f"tidevoy: {node.address} draining" in result.stderr
            assert result.stdout.splitlines()[-1].startswith(
                f"rollout {name} (restart to {NEW_VERSION}, all, by "
            )
            assert [event["subject"] for event in await get_events(stack, "rollout.done")] == [name]


@dataclass
class RolloutCluster:
    """Three nodes without load. Each test decides how their restarts behave."""

    stack: LocalCluster
    restarter: RestartCommand

    @property
    def addresses(self) -> list[str]:
        """Return the addresses in the order of the selector `all`."""
        return sorted(node.address for node in self.stack.tidb)

    def node(self, address: str) -> Tidb:
        return next(node for node in self.stack.tidb if node.address == address)

    async def nodes_with_drain(self) -> set[str]:
        """Return the nodes that a rollout or an operator has drained."""
        return {address for address, node in (await self.stack.nodes()).items() if node["drain"] is not None}

    async def start(self, address: str) -> None:
        """Start a stopped node with the new version."""
        node = self.node(address)
        node.arguments = (*node.arguments, f"--version={NEW_VERSION}")
        await node.launch()

    async def passes(self, address: str) -> bool:
        """Return whether both checks of a node pass."""
        health = (await self.stack.nodes())[address]["health"]
        return all(health[check]["status"] == "pass" for check in ("status", "sql"))

    async def clear(self) -> None:
        """Clean up after a failed test, so that later tests do not fail for the same reason."""
        for rollout in (await self.stack.api.get("/v1/rollouts")).json()["rollouts"]:
            if rollout["phase"] not in ("done", "aborted"):
                await control_rollout(self.stack.api, rollout["id"], "abort")
                await wait_for_phase(self.stack.api, rollout["id"], "aborted")
        for address in self.addresses:
            if not self.node(address).is_running:
                await self.start(address)
        for address in await self.nodes_with_drain():
            (await self.stack.api.post(f"/v1/nodes/{address}/undrain")).raise_for_status()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_cluster(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb, signing: SessionCertificate
) -> AsyncIterator[RolloutCluster]:
    directory = tmp_path_factory.mktemp("rollouts")
    async with RestartCommand(directory / "action").serving() as restarter:
        settings = {**QUICK_SETTINGS, "rollouts": restarter.settings}
        cluster_context = run_cluster(
            directory / "cluster", mariadb, nodes=3, arguments=signing.arguments, settings=settings
        )
        async with cluster_context as stack:
            restarter.nodes = lambda: stack.tidb
            yield RolloutCluster(stack, restarter)


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared_cluster: RolloutCluster) -> AsyncIterator[RolloutCluster]:
    """Yield the cluster with all nodes active and undrained, and check the same afterwards."""
    shared_cluster.restarter.reset_behaviors()
    await shared_cluster.clear()
    await shared_cluster.stack.wait_until(
        lambda: shared_cluster.stack.has_active_nodes(3), "all nodes in service", 30
    )
    yield shared_cluster
    assert await shared_cluster.nodes_with_drain() == set()
    await shared_cluster.stack.wait_until(
        lambda: shared_cluster.stack.has_active_nodes(3), "all nodes in service", 30
    )


in_module = pytest.mark.asyncio(loop_scope="module")


@in_module
async def test_failed_action_pauses_and_resume_retries(cluster: RolloutCluster) -> None:
    api, (first, second, _) = cluster.stack.api, cluster.addresses
    cluster.restarter.set_behavior(first, fail_with("no space left on device"))
    name = await start_rollout(api, nodes=f"{first},{second}")
    paused = await wait_for_phase(api, name, "paused")
    assert stage_by_node(paused) == {first: "failed", second: "pending"}
    assert "no space left on device" in paused["reason"]
    assert first in paused["reason"]
    assert await cluster.nodes_with_drain() == {first}  # a node in an unknown state stays drained
    cluster.restarter.reset_behaviors()
    await control_rollout(api, name, "resume")
    finished = await wait_for_phase(api, name, "done")
    assert stage_by_node(finished) == {first: "done", second: "done"}
    assert [(run.address, run.attempt) for run in cluster.restarter.runs(name)] == [
        (first, "1"),
        (first, "2"),
        (second, "1"),
    ]


@in_module
async def test_wrong_version_pauses_and_abort_undrains_the_node(cluster: RolloutCluster) -> None:
    api, (first, second, third) = cluster.stack.api, cluster.addresses
    cluster.restarter.set_behavior(first, restart_with_version(OLD_VERSION))
    name = await start_rollout(api)
    paused = await wait_for_phase(api, name, "paused")
    assert stage_by_node(paused) == {first: "failed", second: "pending", third: "pending"}
    assert OLD_VERSION in paused["reason"]
    assert NEW_VERSION in paused["reason"]
    assert await cluster.nodes_with_drain() == {first}
    await control_rollout(api, name, "abort")
    aborted = await wait_for_phase(api, name, "aborted")
    assert stage_by_node(aborted) == {first: "failed", second: "skipped", third: "skipped"}
    assert await cluster.nodes_with_drain() == set()
    assert len(cluster.restarter.runs(name)) == 1


@in_module
async def test_missing_node_pauses_and_is_not_restarted_again(
    cluster: RolloutCluster,
) -> None:
    api, (first, second, _) = cluster.stack.api, cluster.addresses
    cluster.restarter.set_behavior(first, stop_node)
    name = await start_rollout(api, nodes=f"{first},{second}", return_deadline_seconds=3)
    paused = await wait_for_phase(api, name, "paused")
    assert stage_by_node(paused) == {first: "failed", second: "pending"}
    assert first in paused["reason"]
    cluster.restarter.reset_behaviors()
    await cluster.start(first)
    await cluster.stack.wait_until(lambda: cluster.passes(first), "the node to pass its checks", 20)
    await control_rollout(api, name, "resume")
    await wait_for_phase(api, name, "done")
    assert [run.address for run in cluster.restarter.runs(name)] == [first, second]


@in_module
async def test_pause_finishes_the_current_node_and_starts_no_other(cluster: RolloutCluster) -> None:
    api, (first, second, _) = cluster.stack.api, cluster.addresses
    may_finish = asyncio.Event()
    cluster.restarter.set_behavior(first, wait_for_event(may_finish))
    name = await start_rollout(api, nodes=f"{first},{second}")
    await cluster.restarter.wait_started(first)
    paused = await control_rollout(api, name, "pause")
    assert paused["phase"] == "paused"
    assert paused["reason"]
    may_finish.set()
    await wait_for_rollout(api, name, lambda rollout: stage_by_node(rollout)[first] == "done")
    assert stage_by_node(await get_rollout(api, name)) == {first: "done", second: "pending"}
    resumed = await api.post(f"/v1/rollouts/{name}/resume")
    assert resumed.json()["phase"] == "running"
    await wait_for_phase(api, name, "done")
    assert [run.address for run in cluster.restarter.runs(name)] == [first, second]


@in_module
async def test_abort_undrains_only_what_the_rollout_drained(cluster: RolloutCluster) -> None:
    api, (first, second, third) = cluster.stack.api, cluster.addresses
    (await api.post(f"/v1/nodes/{third}/drain")).raise_for_status()
    may_finish = asyncio.Event()
    cluster.restarter.set_behavior(first, wait_for_event(may_finish, restart_node))
    name = await start_rollout(api, force=True)  # `force`, because only two nodes are active
    await cluster.restarter.wait_started(first)
    await control_rollout(api, name, "abort")
    may_finish.set()
    aborted = await wait_for_phase(api, name, "aborted")
    assert stage_by_node(aborted)[second] == stage_by_node(aborted)[third] == "skipped"
    assert await cluster.nodes_with_drain() == {third}
    (await api.post(f"/v1/nodes/{third}/undrain")).raise_for_status()
    assert [run.address for run in cluster.restarter.runs(name)] == [first]


@in_module
async def test_node_drained_by_an_operator_stays_drained(cluster: RolloutCluster) -> None:
    api, (first, _, _) = cluster.stack.api, cluster.addresses
    (await api.post(f"/v1/nodes/{first}/drain")).raise_for_status()
    name = await start_rollout(api, nodes=first)
    await wait_for_phase(api, name, "done")
    assert await cluster.nodes_with_drain() == {first}
    assert [run.address for run in cluster.restarter.runs(name)] == [first]
    (await api.post(f"/v1/nodes/{first}/undrain")).raise_for_status()


@in_module
async def test_manual_action_waits_for_a_restart(cluster: RolloutCluster) -> None:
    api, (first, _, _) = cluster.stack.api, cluster.addresses
    name = await start_rollout(api, nodes=first, action="manual")
    await wait_for_rollout(api, name, lambda rollout: stage_by_node(rollout)[first] == "returning")
    await cluster.node(first).restart()
    finished = await wait_for_phase(api, name, "done")
    assert finished["steps"][0]["started_before"] is not None
    assert cluster.restarter.runs(name) == []


@in_module
async def test_rollout_continues_after_a_control_plane_restart(cluster: RolloutCluster) -> None:
    api, (first, second, _) = cluster.stack.api, cluster.addresses
    may_finish = asyncio.Event()
    cluster.restarter.set_behavior(first, wait_for_event(may_finish))
    name = await start_rollout(api, nodes=f"{first},{second}")
    await cluster.restarter.wait_started(first)
    await cluster.stack.control_plane.kill()
    may_finish.set()  # the requested restart continues without the control plane
    await cluster.stack.control_plane.launch()
    finished = await wait_for_phase(api, name, "done")
    assert stage_by_node(finished) == {first: "done", second: "done"}
    assert [run.address for run in cluster.restarter.runs(name)] == [first, second]


@in_module
async def test_dry_run_lists_the_steps_and_changes_nothing(cluster: RolloutCluster) -> None:
    arguments = (
        "rollout",
        "start",
        "--nodes",
        "all",
        "--action",
        "restart",
        "--version",
        NEW_VERSION,
        "--dry-run",
    )
    dry_run = await run_tidevoy(cluster.stack.control_plane.api_url, *arguments)
    assert dry_run.exit_code == 0, dry_run
    assert dry_run.stdout.splitlines()[0] == f"3 nodes, 1 at a time: {', '.join(cluster.addresses)}"
    rejected = await cluster.stack.api.post("/v1/rollouts", json={**ROLLOUT_REQUEST, "max_unavailable": 3})
    assert rejected.status_code == 409, rejected.text
    assert rejected.json()["type"] == "urn:tidevoy:problem:rollout-precondition-failed"
    assert rejected.json()["reasons"]
    assert await cluster.nodes_with_drain() == set()
