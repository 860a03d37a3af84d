"""Control planes that are killed in the middle of rollouts, and an etcd that stands still.

`make soak` kills 50 leaders instead of a few, and lets etcd stand still for a minute.
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
STILL = 60.0 if SOAK else 10.0
pytestmark = pytest.mark.timeout(3600 if SOAK else 300)

NODES = 3
CLIENTS = 8
BETWEEN = 12.0 if SOAK else 6.0
"""Seconds between two kills at most, and until the next action, when one is to be hit."""
LONGEST_STEP = 1.5
"""Seconds that the action takes at most beside the restart, before it and after it."""
TAKEOVER = 8.0
"""Seconds after which another one leads."""
ANSWER = 8.0
"""Seconds in which a write that cannot be made says so."""


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
    started = run_replicated_cluster(
        tmp_path_factory.mktemp("site"),
        mariadb,
        nodes=NODES,
        arguments=signing.arguments,
        settings={
            "rollouts": restarter.settings,
            "health": {"sql": {"interval": 0.2}, "status": {"interval": 0.2}},
        },
    )
    async with started as site:
        restarter.nodes = lambda: site.nodes
        yield site


in_module = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Killer:
    """Kills the leader at random moments, every other time while an action runs, and starts it again once
    another one leads.
    """

    site: ReplicatedCluster
    chance: random.Random
    restarter: RestartCommand
    takeovers: list[float] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def kill(self, times: int) -> None:
        try:
            for count in range(times):
                await asyncio.sleep(self.chance.uniform(0.2, BETWEEN))
                if count % 2:
                    await wait_until(lambda: bool(self.restarter.active_addresses), 60)
                    await asyncio.sleep(self.chance.uniform(0.0, 2 * LONGEST_STEP))
                # Half of the commands that are cut off leave the node as it is, half had handed the work on.
                self.restarter.survives_interruption = self.chance.random() < 0.5
                leader = await self.site.wait_for_leader()
                await leader.kill()
                killed = time.monotonic()
                await self.site.wait_for_leader(excluded_name=leader.name)
                self.takeovers.append(time.monotonic() - killed)
                await leader.launch()
        finally:
            self.over.set()


async def asked(site: ReplicatedCluster, method: str, path: str, **more: Any) -> httpx2.Response:
    """A call at any control plane that runs, repeated while it meets a killed one, or there is no leader."""
    while True:
        try:
            answer = await site.api().request(method, path, **more)
        except httpx2.TransportError:
            await asyncio.sleep(0.1)
            continue
        if answer.status_code != 503:
            return answer
        await asyncio.sleep(0.2)


async def rolled(site: ReplicatedCluster, restarter: RestartCommand, version: str) -> tuple[str, int]:
    """A whole rollout to this version, mended and resumed when it pauses; its id, and how often that was."""
    order = {
        **ROLLOUT_REQUEST,
        "version": version,
        "return_deadline_seconds": 5,
        "drain_deadline_seconds": 30,
    }
    answer = await asked(site, "POST", "/v1/rollouts", json=order)
    listed = (await asked(site, "GET", "/v1/rollouts")).json()["rollouts"]
    # The answer to an earlier try may have been lost with who gave it: then that one goes on.
    (name,) = [one["id"] for one in listed if one["phase"] not in ("done", "aborted")]
    assert answer.status_code in (201, 409), answer.text
    pauses = 0
    while True:
        rollout = (await asked(site, "GET", f"/v1/rollouts/{name}")).json()
        assert rollout["phase"] in ("running", "paused", "done"), rollout
        if rollout["phase"] == "done":
            assert set(stage_by_node(rollout).values()) == {"done"}
            return name, pauses
        if rollout["phase"] == "paused":
            pauses += 1
            await mended(site, restarter, rollout)
            await asked(site, "POST", f"/v1/rollouts/{name}/resume")
        await asyncio.sleep(0.2)


async def mended(site: ReplicatedCluster, restarter: RestartCommand, rollout: dict[str, Any]) -> None:
    """What an operator does with a node whose restart was cut off: start it. Nothing else may have failed."""
    failed = [step for step in rollout["steps"] if step["stage"] == "failed"]
    assert failed, rollout
    for step in failed:
        assert step["cut_off"], rollout
        assert "may have been cut off" in step["reason"]
        assert "may have been cut off" in rollout["reason"]
        node = next(node for node in site.nodes if node.address == step["address"])
        # It is drained, and that can be seen.
        listed = (await asked(site, "GET", "/v1/nodes")).json()["nodes"]
        assert next(one for one in listed if one["address"] == node.address)["drain"] is not None
        assert step["drained_by_rollout"]
        if not node.is_running:
            await started(node, rollout["order"]["version"], restarter)


async def started(node: Tidb, version: str, restarter: RestartCommand) -> None:
    run = CommandRun(node.address, version, "", node.address, "")
    assert await restart_node(node, run) == "done"


@in_module
async def test_leaders_are_killed_at_random_moments_of_rollouts(
    site: ReplicatedCluster, restarter: RestartCommand
) -> None:
    seed = int(os.environ.get("TIDEVOY_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
    print(f"\nTIDEVOY_SEED={seed}")
    chance = random.Random(seed)
    killer = Killer(site, chance, restarter)

    async def slowly(node: Tidb, run: CommandRun) -> str:
        await asyncio.sleep(chance.uniform(0.0, LONGEST_STEP))
        said = await restart_node(node, run)
        await asyncio.sleep(chance.uniform(0.0, LONGEST_STEP))
        return said

    restarter.default_behavior = slowly
    names: list[str] = []
    pauses = 0
    async with (
        EnvoyWatcher(site.envoy).watching() as watch,
        WorkingClients.run(site.sql_port, CLIENTS) as sessions,
    ):
        killing = asyncio.create_task(killer.kill(KILLS))
        try:
            while not killer.over.is_set():
                name, paused = await rolled(site, restarter, f"v8.5.{4 + len(names)}")
                names.append(name)
                pauses += paused
            await killing
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        await site.wait_all_in_service()
        assert sessions.failures == []
    runs = restarter.runs()
    again = [run for run, count in Counter((r.rollout, r.node, r.attempt) for r in runs).items() if count > 1]
    assert again == []
    for plane in site.control_planes:
        assert await site.drained(plane) == set()
    # A node that is being restarted has no entry in PD, so it may be missing, but no other ever was.
    assert watch.min_endpoints >= NODES - 1
    assert watch.samples_without_listener == 0
    assert max(killer.takeovers) < TAKEOVER, killer.takeovers
    print(
        f"{KILLS} kills in {len(names)} rollouts: {len(runs)} runs of the action,"
        f" {len(restarter.interrupted_runs)} cut off, {pauses} pauses; takeover {max(killer.takeovers):.1f} s at most;"
        f" {sessions.answers:,} answers, {sessions.slowest * 1000:.0f} ms at most"
    )


@in_module
async def test_while_etcd_stands_still_traffic_and_reads_go_on_and_writes_say_no(
    site: ReplicatedCluster, restarter: RestartCommand
) -> None:
    restarter.survives_interruption = True
    leader = await site.wait_for_leader()
    first, second = site.nodes[0].address, site.nodes[1].address
    go = asyncio.Event()
    restarter.set_behavior(first, wait_for_event(go))
    order = {**ROLLOUT_REQUEST, "nodes": f"{first},{second}", "return_deadline_seconds": 60}
    begun = await site.http[leader.name].post("/v1/rollouts", json=order)
    assert begun.status_code == 201, begun.text
    name = begun.json()["id"]
    await restarter.wait_started(first)
    third = site.nodes[2].address
    async with (
        EnvoyWatcher(site.envoy).watching() as watch,
        WorkingClients.run(site.sql_port, CLIENTS) as sessions,
    ):
        site.etcd.process.send_signal(signal.SIGSTOP)
        try:
            until_then = time.monotonic() + STILL
            before = sessions.answers
            for plane in site.control_planes:
                begin = time.monotonic()
                refused = await site.http[plane.name].post(f"/v1/nodes/{third}/drain")
                assert time.monotonic() - begin < ANSWER
                assert refused.status_code == 503, refused.text
                assert refused.json()["type"] == "urn:tidevoy:problem:unavailable"
                assert await site.drained(plane) <= {first}
            go.set()  # the action ends, or was ended; nothing can be written down of it
            while time.monotonic() < until_then:
                for plane in site.control_planes:
                    states = await site.states(plane)
                    assert len(states) >= NODES - 1
                    assert (await site.get(plane, f"/v1/rollouts/{name}"))["id"] == name
                await asyncio.sleep(0.5)
            assert sessions.answers > before + STILL
            assert [run.address for run in restarter.runs(name)] == [first]
        finally:
            site.etcd.process.send_signal(signal.SIGCONT)
        await site.wait_for_leader()
        await unanimous(site)
        for address in await site.drained(site.control_planes[0]) - {first, second}:
            # A write that got no answer may have been made: then it is whole, and all see it.
            (await asked(site, "POST", f"/v1/nodes/{address}/undrain")).raise_for_status()
        rollout = await wait_for_phase(site.http[leader.name], name, "done", "paused", seconds=90)
        if rollout["phase"] == "paused":
            await mended(site, restarter, rollout)
            await asked(site, "POST", f"/v1/rollouts/{name}/resume")
            await wait_for_phase(site.http[leader.name], name, "done", seconds=90)
        await site.wait_all_in_service()
        assert sessions.failures == []
    runs = Counter((run.node, run.attempt) for run in restarter.runs(name))
    assert set(runs.values()) == {1}
    assert watch.min_endpoints >= NODES - 1
    assert watch.samples_without_listener == 0


async def unanimous(site: ReplicatedCluster) -> None:
    """Returns when all control planes say the same of drains."""

    async def agreed() -> bool:
        said = {frozenset(await site.drained(plane)) for plane in site.control_planes}
        return len(said) == 1

    await wait_until(agreed, 30)
