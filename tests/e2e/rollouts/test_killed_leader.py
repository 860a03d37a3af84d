"""Rollouts while leading control planes are killed, and while etcd is suspended.

`make soak` kills 50 leaders instead of a few, and suspends etcd for a minute.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
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
from tests.support.waiting import wait_until

SOAK = bool(os.environ.get("TIDEVOY_SOAK"))
KILLS = 50 if SOAK else 3
SUSPENDED_SECONDS = 60.0 if SOAK else 10.0
pytestmark = pytest.mark.timeout(3600 if SOAK else 300)

NODES = 3
CLIENTS = 8
MAX_KILL_INTERVAL_SECONDS = 12.0 if SOAK else 6.0
"""Maximal seconds between two kills."""
MAX_ACTION_DELAY_SECONDS = 1.5
"""Maximal seconds that the action waits before the restart, and again after it."""
MAX_TAKEOVER_SECONDS = 8.0
"""Maximal seconds until another control plane leads."""
MAX_ANSWER_SECONDS = 8.0
"""Maximal seconds until a write that is impossible fails."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def restarter(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RestartCommand]:
    async with RestartCommand(tmp_path_factory.mktemp("action")).serving() as restarter:
        yield restarter


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    tmp_path_factory: pytest.TempPathFactory,
    mariadb: MariaDb,
    signing: SessionCertificate,
    restarter: RestartCommand,
) -> AsyncIterator[ReplicatedCluster]:
    cluster_context = run_replicated_cluster(
        tmp_path_factory.mktemp("site"),
        mariadb,
        nodes=NODES,
        arguments=signing.arguments,
        settings={
            "rollouts": restarter.settings,
            "health": {"sql": {"interval": 0.2}, "status": {"interval": 0.2}},
        },
    )
    async with cluster_context as site:
        restarter.nodes = lambda: site.nodes
        yield site


in_module = pytest.mark.asyncio(loop_scope="module")


@dataclass
class LeaderKiller:
    """Kills the leader at random moments, every second time during an action.

    Restarts it after the takeover.
    """

    site: ReplicatedCluster
    rng: random.Random
    restarter: RestartCommand
    takeovers: list[float] = field(default_factory=list)
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    async def kill(self, times: int) -> None:
        try:
            for count in range(times):
                await asyncio.sleep(self.rng.uniform(0.2, MAX_KILL_INTERVAL_SECONDS))
                if count % 2:
                    await wait_until(lambda: bool(self.restarter.active_addresses), 60)
                    await asyncio.sleep(self.rng.uniform(0.0, 2 * MAX_ACTION_DELAY_SECONDS))
                # Half of the interrupted commands leave the node unchanged, half finish in the background.
                self.restarter.survives_interruption = self.rng.random() < 0.5
                leader = await self.site.wait_for_leader()
                await leader.kill()
                killed_at = time.monotonic()
                await self.site.wait_for_leader(excluded_name=leader.name)
                self.takeovers.append(time.monotonic() - killed_at)
                await leader.launch()
        finally:
            self.finished.set()


async def call_api(site: ReplicatedCluster, method: str, path: str, **options: Any) -> httpx2.Response:
    """Call any running control plane; retry if it has been killed or if there is no leader."""
    while True:
        try:
            response = await site.api().request(method, path, **options)
        except httpx2.TransportError:
            await asyncio.sleep(0.1)
            continue
        if response.status_code != 503:
            return response
        await asyncio.sleep(0.2)


async def run_rollout(site: ReplicatedCluster, restarter: RestartCommand, version: str) -> tuple[str, int]:
    """Run a rollout to this version; repair and resume it when it pauses. Return its id and the pauses."""
    request = {
        **ROLLOUT_REQUEST,
        "version": version,
        "return_deadline_seconds": 5,
        "drain_deadline_seconds": 30,
    }
    response = await call_api(site, "POST", "/v1/rollouts", json=request)
    listed = (await call_api(site, "GET", "/v1/rollouts")).json()["rollouts"]
    # The answer to an earlier attempt may be lost with a killed control plane; then that rollout runs.
    (name,) = [item["id"] for item in listed if item["phase"] not in ("done", "aborted")]
    assert response.status_code in (201, 409), response.text
    pauses = 0
    while True:
        rollout = (await call_api(site, "GET", f"/v1/rollouts/{name}")).json()
        assert rollout["phase"] in ("running", "paused", "done"), rollout
        if rollout["phase"] == "done":
            assert set(stage_by_node(rollout).values()) == {"done"}
            return name, pauses
        if rollout["phase"] == "paused":
            pauses += 1
            await repair(site, restarter, rollout)
            await call_api(site, "POST", f"/v1/rollouts/{name}/resume")
        await asyncio.sleep(0.2)


async def repair(site: ReplicatedCluster, restarter: RestartCommand, rollout: dict[str, Any]) -> None:
    """Start nodes whose restart was interrupted, as an operator does. Nothing else may have failed."""
    failed_steps = [step for step in rollout["steps"] if step["stage"] == "failed"]
    assert failed_steps, rollout
    for step in failed_steps:
        assert step["cut_off"], rollout
        assert "may have been interrupted" in step["reason"]
        assert "may have been interrupted" in rollout["reason"]
        node = next(node for node in site.nodes if node.address == step["address"])
        # The node is still drained, and the API shows it.
        listed = (await call_api(site, "GET", "/v1/nodes")).json()["nodes"]
        assert next(item for item in listed if item["address"] == node.address)["drain"] is not None
        assert step["drained_by_rollout"]
        if not node.is_running:
            await start_node(node, rollout["order"]["version"], restarter)


async def start_node(node: Tidb, version: str, restarter: RestartCommand) -> None:
    run = CommandRun(node.address, version, "", node.address, "")
    assert await restart_node(node, run) == "done"


@in_module
async def test_rollouts_survive_killed_leaders(site: ReplicatedCluster, restarter: RestartCommand) -> None:
    seed = int(os.environ.get("TIDEVOY_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
    print(f"\nTIDEVOY_SEED={seed}")
    rng = random.Random(seed)
    killer = LeaderKiller(site, rng, restarter)

    async def restart_slowly(node: Tidb, run: CommandRun) -> str:
        await asyncio.sleep(rng.uniform(0.0, MAX_ACTION_DELAY_SECONDS))
        result = await restart_node(node, run)
        await asyncio.sleep(rng.uniform(0.0, MAX_ACTION_DELAY_SECONDS))
        return result

    restarter.default_behavior = restart_slowly
    names: list[str] = []
    pauses = 0
    async with (
        EnvoyWatcher(site.envoy).watching() as envoy_watcher,
        WorkingClients.run(site.sql_port, CLIENTS) as sessions,
    ):
        killing = asyncio.create_task(killer.kill(KILLS))
        try:
            while not killer.finished.is_set():
                name, pause_count = await run_rollout(site, restarter, f"v8.5.{4 + len(names)}")
                names.append(name)
                pauses += pause_count
            await killing
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        await site.wait_all_in_service()
        assert sessions.failures == []
    runs = restarter.runs()
    repeated = [
        run for run, count in Counter((r.rollout, r.node, r.attempt) for r in runs).items() if count > 1
    ]
    assert repeated == []
    for control_plane in site.control_planes:
        assert await site.drained(control_plane) == set()
    # A restarting node has no entry in PD, so it may be missing, but no other node ever was.
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
    site: ReplicatedCluster, restarter: RestartCommand
) -> None:
    restarter.survives_interruption = True
    leader = await site.wait_for_leader()
    first, second = site.nodes[0].address, site.nodes[1].address
    may_finish = asyncio.Event()
    restarter.set_behavior(first, wait_for_event(may_finish))
    request = {**ROLLOUT_REQUEST, "nodes": f"{first},{second}", "return_deadline_seconds": 60}
    created = await site.http[leader.name].post("/v1/rollouts", json=request)
    assert created.status_code == 201, created.text
    name = created.json()["id"]
    await restarter.wait_started(first)
    third = site.nodes[2].address
    async with (
        EnvoyWatcher(site.envoy).watching() as envoy_watcher,
        WorkingClients.run(site.sql_port, CLIENTS) as sessions,
    ):
        site.etcd.process.send_signal(signal.SIGSTOP)
        try:
            deadline = time.monotonic() + SUSPENDED_SECONDS
            before = sessions.answers
            for control_plane in site.control_planes:
                started_at = time.monotonic()
                rejected = await site.http[control_plane.name].post(f"/v1/nodes/{third}/drain")
                assert time.monotonic() - started_at < MAX_ANSWER_SECONDS
                assert rejected.status_code == 503, rejected.text
                assert rejected.json()["type"] == "urn:tidevoy:problem:unavailable"
                assert await site.drained(control_plane) <= {first}
            may_finish.set()  # the action ends or has been ended; its result cannot be stored
            while time.monotonic() < deadline:
                for control_plane in site.control_planes:
                    states = await site.states(control_plane)
                    assert len(states) >= NODES - 1
                    assert (await site.get(control_plane, f"/v1/rollouts/{name}"))["id"] == name
                await asyncio.sleep(0.5)
            assert sessions.answers > before + SUSPENDED_SECONDS
            assert [run.address for run in restarter.runs(name)] == [first]
        finally:
            site.etcd.process.send_signal(signal.SIGCONT)
        await site.wait_for_leader()
        await wait_same_drains(site)
        for address in await site.drained(site.control_planes[0]) - {first, second}:
            # A write without an answer may have been applied: then completely, and all control planes see it.
            (await call_api(site, "POST", f"/v1/nodes/{address}/undrain")).raise_for_status()
        rollout = await wait_for_phase(site.http[leader.name], name, "done", "paused", seconds=90)
        if rollout["phase"] == "paused":
            await repair(site, restarter, rollout)
            await call_api(site, "POST", f"/v1/rollouts/{name}/resume")
            await wait_for_phase(site.http[leader.name], name, "done", seconds=90)
        await site.wait_all_in_service()
        assert sessions.failures == []
    runs = Counter((run.node, run.attempt) for run in restarter.runs(name))
    assert set(runs.values()) == {1}
    assert envoy_watcher.min_endpoints >= NODES - 1
    assert envoy_watcher.samples_without_listener == 0


async def wait_same_drains(site: ReplicatedCluster) -> None:
    """Wait until all control planes report the same drains."""

    async def have_same_drains() -> bool:
        views = {frozenset(await site.drained(control_plane)) for control_plane in site.control_planes}
        return len(views) == 1

    await wait_until(have_same_drains, 30)
