"""Rollouts while leading control planes are killed, and while etcd is suspended.

`make soak` kills 50 leaders instead of a few, and suspends etcd for a minute.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb import Tidb
from tests.support.e2e.replicated_cluster import (
    EnvoyWatcher,
    ReplicatedCluster,
    WorkingClients,
    run_replicated_cluster,
)
from tests.support.e2e.restart_action import (
    ROLLOUT_REQUEST,
    CommandRun,
    RestartCommand,
    restart_node,
    stage_by_node,
    wait_for_event,
    wait_for_phase,
)
from tests.support.soak import SOAK
from tests.support.suspension import suspended
from tests.support.waiting import wait_until

KILLS = 50 if SOAK else 2
SUSPENDED_SECONDS = 60.0 if SOAK else 10.0
pytestmark = pytest.mark.timeout(3600 if SOAK else 300)

NODES = 3
CLIENTS = 8
MAX_ANSWERS_BEFORE_KILL = 3600 if SOAK else 900
"""Maximal number of answers that clients receive before a kill. They receive about 300 per second.

Every other kill then also waits for an action to run, and for up to MAX_ANSWERS_IN_ACTION answers.
"""
MAX_ANSWERS_IN_ACTION = 900 if SOAK else 420
MAX_ACTION_DELAY_SECONDS = 1.5 if SOAK else 0.7
"""Maximal seconds that the rollout's restart command waits before the restart, and again after it."""
MAX_TAKEOVER_SECONDS = 8.0
"""Maximal seconds until another control plane leads."""
MAX_RETRY_SECONDS = 30.0
"""Maximal seconds in which a call is retried."""
MAX_ANSWER_SECONDS = 8.0
"""Maximal seconds until a write fails while etcd is suspended."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def restarter(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RestartCommand]:
    async with RestartCommand(tmp_path_factory.mktemp("action")).serving() as restarter:
        yield restarter


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory,
    mariadb: MariaDb,
    signing: SessionCertificate,
    restarter: RestartCommand,
) -> AsyncIterator[ReplicatedCluster]:
    cluster_context = run_replicated_cluster(
        tmp_path_factory.mktemp("cluster"),
        mariadb,
        nodes=NODES,
        arguments=signing.arguments,
        settings={
            "rollouts": restarter.settings,
            "health": {"sql": {"interval": 0.2}, "status": {"interval": 0.2}},
        },
    )
    async with cluster_context as cluster:
        restarter.nodes = lambda: cluster.nodes
        yield cluster


in_module = pytest.mark.asyncio(loop_scope="module")


@dataclass
class LeaderKiller:
    """Kills the leader at random moments, every other time while an action runs, and restarts it."""

    cluster: ReplicatedCluster
    rng: random.Random
    restarter: RestartCommand
    clients: WorkingClients
    takeovers: list[float] = field(default_factory=list)

    async def kill(self, times: int) -> None:
        for count in range(times):
            await self.clients.wait_for_answers(self.rng.randint(60, MAX_ANSWERS_BEFORE_KILL))
            if count % 2:
                await wait_until(lambda: bool(self.restarter.active_addresses), 60)
                await self.clients.wait_for_answers(self.rng.randint(0, MAX_ANSWERS_IN_ACTION))
            # With equal chances, an interrupted command stops at once, or finishes in the background.
            self.restarter.continues_when_killed = self.rng.random() < 0.5
            leader = await self.cluster.wait_for_leader()
            await leader.kill()
            killed_at = time.monotonic()
            await self.cluster.wait_for_leader(excluded_name=leader.name)
            self.takeovers.append(time.monotonic() - killed_at)
            await leader.launch()


async def call_api(cluster: ReplicatedCluster, method: str, path: str, **options: Any) -> httpx2.Response:
    """Call any running control plane; retry if it has been killed or if there is no leader.

    Raises TimeoutError if no control plane answers for MAX_RETRY_SECONDS.
    """
    async with asyncio.timeout(MAX_RETRY_SECONDS):
        while True:
            with suppress(httpx2.TransportError):
                response = await cluster.api().request(method, path, **options)
                if response.status_code != 503:
                    return response
            await asyncio.sleep(0.1)


async def run_rollout(cluster: ReplicatedCluster, restarter: RestartCommand, version: str) -> tuple[str, int]:
    """Run a rollout to this version; repair and resume it when it pauses. Return its id and pause count."""
    request = {
        **ROLLOUT_REQUEST,
        "version": version,
        "return_deadline_seconds": 5,
        "drain_deadline_seconds": 30,
    }
    response = await call_api(cluster, "POST", "/v1/rollouts", json=request)
    listed = (await call_api(cluster, "GET", "/v1/rollouts")).json()["rollouts"]
    # If a control plane was killed after it had created the rollout, the repeated request gets 409.
    (name,) = [item["id"] for item in listed if item["phase"] not in ("done", "aborted")]
    assert response.status_code in (201, 409), response.text
    pauses = 0
    while True:
        rollout = (await call_api(cluster, "GET", f"/v1/rollouts/{name}")).json()
        assert rollout["phase"] in ("running", "paused", "done"), rollout
        if rollout["phase"] == "done":
            assert set(stage_by_node(rollout).values()) == {"done"}
            return name, pauses
        if rollout["phase"] == "paused":
            pauses += 1
            await repair(cluster, restarter, rollout)
            await call_api(cluster, "POST", f"/v1/rollouts/{name}/resume")
        await asyncio.sleep(0.2)


async def repair(cluster: ReplicatedCluster, restarter: RestartCommand, rollout: dict[str, Any]) -> None:
    """Start the nodes that an interrupted restart left stopped. Check that no other failure has occurred."""
    failed_steps = [step for step in rollout["steps"] if step["stage"] == "failed"]
    assert failed_steps, rollout
    for step in failed_steps:
        assert step["interrupted"], rollout
        assert "may have been interrupted" in step["reason"]
        assert "may have been interrupted" in rollout["reason"]
        node = next(node for node in cluster.nodes if node.address == step["address"])
        # The node is still drained, and the API shows it.
        listed = (await call_api(cluster, "GET", "/v1/nodes")).json()["nodes"]
        assert next(item for item in listed if item["address"] == node.address)["drain"] is not None
        assert step["drained_by_rollout"]
        if not node.is_running:
            await start_node(node, rollout["spec"]["version"], restarter)


async def start_node(node: Tidb, version: str, restarter: RestartCommand) -> None:
    run = CommandRun(node.address, version, "", node.address, "")
    assert await restart_node(node, run) == "done"


@in_module
async def test_rollouts_survive_killed_leaders(cluster: ReplicatedCluster, restarter: RestartCommand) -> None:
    seed = int(os.environ.get("TIDEVOY_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
    print(f"\nTIDEVOY_SEED={seed}")
    rng = random.Random(seed)

    async def restart_slowly(node: Tidb, run: CommandRun) -> str:
        await asyncio.sleep(rng.uniform(0.0, MAX_ACTION_DELAY_SECONDS))
        result = await restart_node(node, run)
        await asyncio.sleep(rng.uniform(0.0, MAX_ACTION_DELAY_SECONDS))
        return result

    restarter.default_behavior = restart_slowly
    names: list[str] = []
    pauses = 0
    async with (
        EnvoyWatcher(cluster.envoy).watching() as envoy_watcher,
        WorkingClients.run(cluster.sql_port, CLIENTS) as sessions,
    ):
        killer = LeaderKiller(cluster, rng, restarter, sessions)
        async with asyncio.TaskGroup() as tasks:  # An error of the killer cancels the rollout.
            killing = tasks.create_task(killer.kill(KILLS))
            while not killing.done():
                name, pause_count = await run_rollout(cluster, restarter, f"v8.5.{4 + len(names)}")
                names.append(name)
                pauses += pause_count
        await cluster.wait_all_in_service()
        assert sessions.failures == []
    runs = restarter.runs()
    repeated = [
        run for run, count in Counter((r.rollout, r.node, r.attempt) for r in runs).items() if count > 1
    ]
    assert repeated == []
    for control_plane in cluster.control_planes:
        assert await cluster.nodes_with_drain(control_plane) == set()
    # Only the restarting node may be missing from the endpoints, because it has no entry in PD.
    assert envoy_watcher.min_endpoints >= NODES - 1
    assert envoy_watcher.samples_without_listener == 0
    assert max(killer.takeovers) < MAX_TAKEOVER_SECONDS, killer.takeovers
    print(
        f"{KILLS} kills in {len(names)} rollouts: {len(runs)} runs of the action,"
        f" {len(restarter.interrupted_runs)} interrupted, {pauses} pauses;"
        f" takeover {max(killer.takeovers):.1f} s at most;"
        f" {sessions.answers:,} answers, {sessions.slowest * 1000:.0f} ms at most"
    )


@in_module
async def test_suspended_etcd_stops_writes_but_not_traffic_or_reads(
    cluster: ReplicatedCluster, restarter: RestartCommand
) -> None:
    restarter.continues_when_killed = True
    leader = await cluster.wait_for_leader()
    first, second = cluster.nodes[0].address, cluster.nodes[1].address
    may_finish = asyncio.Event()
    restarter.set_behavior(first, wait_for_event(may_finish))
    request = {**ROLLOUT_REQUEST, "nodes": f"{first},{second}", "return_deadline_seconds": 60}
    created = await cluster.http[leader.name].post("/v1/rollouts", json=request)
    assert created.status_code == 201, created.text
    name = created.json()["id"]
    await restarter.wait_started(first)
    third = cluster.nodes[2].address
    async with (
        EnvoyWatcher(cluster.envoy).watching() as envoy_watcher,
        WorkingClients.run(cluster.sql_port, CLIENTS) as sessions,
    ):
        async with suspended(cluster.etcd.process.pid):
            deadline = time.monotonic() + SUSPENDED_SECONDS
            before = sessions.answers
            for control_plane in cluster.control_planes:
                started_at = time.monotonic()
                rejected = await cluster.http[control_plane.name].post(f"/v1/nodes/{third}/drain")
                assert time.monotonic() - started_at < MAX_ANSWER_SECONDS
                assert rejected.status_code == 503, rejected.text
                assert rejected.json()["type"] == "urn:tidevoy:problem:unavailable"
                assert await cluster.nodes_with_drain(control_plane) <= {first}
            may_finish.set()  # the action ends, but its result cannot be stored
            while time.monotonic() < deadline:
                for control_plane in cluster.control_planes:
                    states = await cluster.states(control_plane)
                    assert len(states) >= NODES - 1
                    assert (await cluster.get(control_plane, f"/v1/rollouts/{name}"))["id"] == name
                await asyncio.sleep(0.5)
            assert sessions.answers > before + SUSPENDED_SECONDS
            assert [run.address for run in restarter.runs(name)] == [first]
        await cluster.wait_for_leader()
        await wait_same_drains(cluster)
        for address in await cluster.nodes_with_drain(cluster.control_planes[0]) - {first, second}:
            # etcd may have applied a drain that a control plane rejected. Then all control planes see it.
            (await call_api(cluster, "POST", f"/v1/nodes/{address}/undrain")).raise_for_status()
        rollout = await wait_for_phase(cluster.http[leader.name], name, "done", "paused", seconds=90)
        if rollout["phase"] == "paused":
            await repair(cluster, restarter, rollout)
            await call_api(cluster, "POST", f"/v1/rollouts/{name}/resume")
            await wait_for_phase(cluster.http[leader.name], name, "done", seconds=90)
        await cluster.wait_all_in_service()
        assert sessions.failures == []
    runs = Counter((run.node, run.attempt) for run in restarter.runs(name))
    assert set(runs.values()) == {1}
    assert envoy_watcher.min_endpoints >= NODES - 1
    assert envoy_watcher.samples_without_listener == 0


async def wait_same_drains(cluster: ReplicatedCluster) -> None:
    """Wait until all control planes report the same drains."""

    async def have_same_drains() -> bool:
        views = {
            frozenset(await cluster.nodes_with_drain(control_plane))
            for control_plane in cluster.control_planes
        }
        return len(views) == 1

    await wait_until(have_same_drains, 30)
