"""KILL ends a session through Envoy at any time; a session is restored elsewhere only if its node is gone.

With TIDEVOY_SOAK=1, tests kill 500 sessions instead of 60, spread over the minute for which Envoy keeps
states.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.soak import SOAK
from tests.support.tidb.kill_victims import (
    KilledSession,
    KillScenario,
    log_kills,
    logged_kills,
    run_kill_scenario,
)
from tests.support.waiting import wait_until

SESSIONS = 500 if SOAK else 60
KILL_SECONDS = 60.0 if SOAK else 1.5
"""Time over which the tests spread the kills of sessions with saved states."""
_DRAIN_INTERVAL_SECONDS = 0.2
"""Interval after which the other node is drained, so that some KILLs arrive during a migration."""
_MAX_ROUNDS = 20
pytestmark = pytest.mark.timeout(300 if SOAK else 60)


async def kill_all(scenario: KillScenario, victims: Sequence[KilledSession], seconds: float) -> None:
    """KILL one session after the other, by the id that the process list shows at that moment."""
    started = time.monotonic()
    for index, victim in enumerate(victims):
        due = started + index * seconds / len(victims)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        scenario.kill(victim, scenario.listed()[victim.name])
    await scenario.wait_until_ended(victims)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("state", ["active", "draining", "undrained"])
async def test_kill_ends_sessions_that_have_not_migrated(
    tmp_path: Path, cluster: TidbCluster, state: str, busy: bool
) -> None:
    """Envoy has the states of sessions on a drained node, because it has tried to migrate them."""
    node, other, _ = cluster.tidb
    async with run_kill_scenario(tmp_path, [node, other]) as scenario:
        victims = await scenario.connect(SESSIONS)
        if state != "active":
            scenario.publish_nodes(node, only=[node], denying=True)
            await scenario.wait_until_denied(len(victims))
        if state == "undrained":
            scenario.publish_nodes()
        if busy:
            await scenario.run_statements(victims)
        await kill_all(scenario, victims, 0.0 if busy or state == "active" else KILL_SECONDS)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_kill_ends_migrated_sessions(tmp_path: Path, cluster: TidbCluster, busy: bool) -> None:
    old, new, _ = cluster.tidb
    async with run_kill_scenario(tmp_path, [old, new]) as scenario:
        victims = await scenario.connect(SESSIONS)
        scenario.publish_nodes(old)
        await scenario.wait_until_on(new, victims)
        scenario.publish_nodes()
        if busy:
            await scenario.run_statements(victims)
        await kill_all(scenario, victims, 0.0 if busy else KILL_SECONDS)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_kill_ends_sessions_of_a_stopping_node(
    tmp_path: Path, cluster: TidbCluster, busy: bool
) -> None:
    """During the graceful wait the status port answers 500, and the SQL port still accepts connections."""
    node, other, _ = cluster.tidb
    node.graceful_wait = 30.0
    await node.restart()
    async with run_kill_scenario(tmp_path, [node, other]) as scenario:
        victims = await scenario.connect(SESSIONS)
        scenario.publish_nodes(node, only=[node], denying=True)
        await scenario.wait_until_denied(len(victims))
        scenario.publish_nodes()
        if busy:
            await scenario.run_statements(victims)
        stopping = asyncio.create_task(node.terminate(60.0))

        async def is_shutting_down() -> bool:
            return not await node.is_serving()

        await wait_until(is_shutting_down)
        await kill_all(scenario, victims, 0.0)
        assert node.is_running
        scenario.close_admin(node)
        await node.kill()
        await asyncio.gather(stopping, return_exceptions=True)


async def test_kill_ends_sessions_during_a_migration(tmp_path: Path, cluster: TidbCluster) -> None:
    """If a session has migrated before the KILL of its listed id arrives, a KILL of its next id ends it."""
    nodes = cluster.tidb[:2]
    async with log_kills(nodes), run_kill_scenario(tmp_path, nodes) as scenario:
        victims = await scenario.connect(SESSIONS)
        migrating = asyncio.create_task(_migrate_back_and_forth(scenario, nodes))
        try:
            remaining = await _kill_migrating(scenario, victims)
        finally:
            migrating.cancel()
            await asyncio.gather(migrating, return_exceptions=True)
        assert not remaining
        killed_ids = set().union(*map(logged_kills, nodes))
        survived = [victim.name for victim in victims if any(ids & killed_ids for ids in victim.kills[:-1])]
        late_kills = sum(len(victim.kills) - 1 for victim in victims)
        print(f"{len(victims)} sessions were killed while they migrated; {late_kills} kills came too late")
        assert not survived


@pytest.mark.parametrize("history", ["failed migration", "migrated"])
@pytest.mark.parametrize("stop_signal", ["SIGKILL", "SIGTERM"])
async def test_idle_sessions_are_restored_when_their_node_is_gone(
    tmp_path: Path, cluster: TidbCluster, stop_signal: str, history: str
) -> None:
    """Envoy has migrated the sessions or tried to, so it has their states. The test announces no shutdown."""
    first, second, _ = cluster.tidb
    lost, other = (first, second) if history == "failed migration" else (second, first)
    if stop_signal == "SIGTERM":
        lost.graceful_wait = 0.0 if history == "migrated" else 5.0 if SOAK else 1.0
        await lost.restart()
    async with run_kill_scenario(tmp_path, [first, second]) as scenario:
        victims = await scenario.connect(SESSIONS)
        if history == "migrated":
            scenario.publish_nodes(first)
            await scenario.wait_until_on(second, victims)
        else:
            scenario.publish_nodes(first, only=[first], denying=True)
            await scenario.wait_until_denied(len(victims))
        scenario.publish_nodes()
        # Without this wait, Envoy may know only the node that denies logins when it restores sessions.
        await scenario.wait_until_known()
        scenario.close_admin(lost)
        await (lost.kill() if stop_signal == "SIGKILL" else lost.terminate(60.0))
        await scenario.wait_until_on(other, victims)
        await scenario.check_alive(victims, other)


async def _migrate_back_and_forth(scenario: KillScenario, nodes: Sequence[Tidb]) -> None:
    while True:
        for node in nodes:
            scenario.publish_nodes(node)
            await asyncio.sleep(_DRAIN_INTERVAL_SECONDS)


async def _kill_migrating(scenario: KillScenario, victims: Sequence[KilledSession]) -> list[KilledSession]:
    """KILL sessions while they migrate. Return the sessions that have not ended."""
    remaining = list(victims)
    for _ in range(_MAX_ROUNDS):
        random.shuffle(remaining)
        for victim in remaining:
            # In a thread, so that the task that changes the nodes continues.
            listed = await asyncio.to_thread(scenario.listed)
            await asyncio.to_thread(scenario.kill, victim, listed.get(victim.name, []))
        # A session whose KILL came too late does not end.
        with suppress(TimeoutError):
            await wait_until(lambda: all(victim.has_ended for victim in victims), 0.5)
        remaining = [victim for victim in remaining if not victim.has_ended]
        if not remaining:
            break
    return remaining
