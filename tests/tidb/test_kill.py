"""KILL ends a session through Envoy at any time; a session continues elsewhere only when its node is gone.

TIDEVOY_SOAK=1: 500 sessions instead of 60, which are killed over the whole minute for which states are kept.
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
from tests.support.tidb.kill_victims import KillArena, KilledSession, log_kills, logged_kills, run_kill_arena
from tests.support.waiting import wait_until

SESSIONS = 500 if SOAK else 60
KILL_SECONDS = 60.0 if SOAK else 1.5
"""The time over which the kills of sessions with known states are spread."""
_TURN_SECONDS = 0.2
"""After so long all sessions are to move back, even those still on the way: so a KILL meets some there."""
_MAX_ROUNDS = 20
pytestmark = pytest.mark.timeout(300 if SOAK else 60)


async def kill_all(there: KillArena, victims: Sequence[KilledSession], seconds: float) -> None:
    """KILL one after the other, by the id that is listed at that moment."""
    began = time.monotonic()
    for turn, victim in enumerate(victims):
        due = began + turn * seconds / len(victims)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        there.kill(victim, there.listed()[victim.name])
    await there.wait_until_ended(victims)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("state", ["active", "drained", "drained before"])
async def test_sessions_that_have_not_moved_are_killed(
    tmp_path: Path, cluster: TidbCluster, state: str, busy: bool
) -> None:
    """The states of sessions on a drained node are known, since a move was tried."""
    node, other, _ = cluster.tidb
    async with run_kill_arena(tmp_path, [node, other]) as there:
        victims = await there.connect(SESSIONS)
        if state != "active":
            there.publish_nodes(node, only=[node], denying=True)
            await there.wait_until_denied(len(victims))
        if state == "drained before":
            there.publish_nodes()
        if busy:
            await there.run_statements(victims)
        await kill_all(there, victims, 0.0 if busy or state == "active" else KILL_SECONDS)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_sessions_that_have_moved_are_killed(tmp_path: Path, cluster: TidbCluster, busy: bool) -> None:
    old, new, _ = cluster.tidb
    async with run_kill_arena(tmp_path, [old, new]) as there:
        victims = await there.connect(SESSIONS)
        there.publish_nodes(old)
        await there.wait_until_on(new, victims)
        there.publish_nodes()
        if busy:
            await there.run_statements(victims)
        await kill_all(there, victims, 0.0 if busy else KILL_SECONDS)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_sessions_of_a_node_that_shuts_down_are_killed(
    tmp_path: Path, cluster: TidbCluster, busy: bool
) -> None:
    """During its graceful wait the status port answers 500, and the SQL port accepts."""
    node, other, _ = cluster.tidb
    node.graceful_wait = 30.0
    await node.restart()
    async with run_kill_arena(tmp_path, [node, other]) as there:
        victims = await there.connect(SESSIONS)
        there.publish_nodes(node, only=[node], denying=True)
        await there.wait_until_denied(len(victims))
        there.publish_nodes()
        if busy:
            await there.run_statements(victims)
        stopping = asyncio.create_task(node.terminate(60.0))

        async def reports_it() -> bool:
            return not await node.is_serving()

        await wait_until(reports_it)
        await kill_all(there, victims, 0.0)
        assert node.is_running
        there.close_admin(node)
        await node.kill()
        await asyncio.gather(stopping, return_exceptions=True)


async def test_sessions_are_killed_while_they_move(tmp_path: Path, cluster: TidbCluster) -> None:
    """A session that has left the listed id before the KILL arrives is killed by its next id."""
    nodes = cluster.tidb[:2]
    async with log_kills(nodes), run_kill_arena(tmp_path, nodes) as there:
        victims = await there.connect(SESSIONS)
        moving = asyncio.create_task(_move_back_and_forth(there, nodes))
        try:
            left = await _kill_moving(there, victims)
        finally:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
        assert not left
        hit = set().union(*map(logged_kills, nodes))
        survived = [victim.name for victim in victims if any(ids & hit for ids in victim.kills[:-1])]
        missed = sum(len(victim.kills) - 1 for victim in victims)
        print(f"{len(victims)} sessions were killed while they moved; {missed} kills came too late")
        assert not survived


@pytest.mark.parametrize("known", ["a move failed", "moved"])
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM"])
async def test_idle_sessions_continue_when_their_node_is_gone(
    tmp_path: Path, cluster: TidbCluster, end: str, known: str
) -> None:
    """Their states are known, since a move was tried. Nothing tells Envoy in advance that the node goes."""
    first, second, _ = cluster.tidb
    lost, other = (first, second) if known == "a move failed" else (second, first)
    if end == "SIGTERM":
        lost.graceful_wait = 0.0 if known == "moved" else 5.0 if SOAK else 1.0
        await lost.restart()
    async with run_kill_arena(tmp_path, [first, second]) as there:
        victims = await there.connect(SESSIONS)
        if known == "moved":
            there.publish_nodes(first)
            await there.wait_until_on(second, victims)
        else:
            there.publish_nodes(first, only=[first], denying=True)
            await there.wait_until_denied(len(victims))
        there.publish_nodes()
        # Else Envoy may know only the denying node when the sessions look for another one.
        await there.wait_until_known()
        there.close_admin(lost)
        await (lost.kill() if end == "SIGKILL" else lost.terminate(60.0))
        await there.wait_until_on(other, victims)
        await there.check_alive(victims, other)


async def _move_back_and_forth(there: KillArena, nodes: Sequence[Tidb]) -> None:
    while True:
        for node in nodes:
            there.publish_nodes(node)
            await asyncio.sleep(_TURN_SECONDS)


async def _kill_moving(there: KillArena, victims: Sequence[KilledSession]) -> list[KilledSession]:
    """The sessions that no KILL has ended."""
    left = list(victims)
    for _ in range(_MAX_ROUNDS):
        random.shuffle(left)
        for victim in left:
            there.kill(victim, there.listed().get(victim.name, []))
            await asyncio.sleep(0)  # lets the nodes change meanwhile
        # Those whose KILL came too late do not end.
        with suppress(TimeoutError):
            await wait_until(lambda: all(victim.has_ended for victim in victims), 0.5)
        left = [victim for victim in left if not victim.has_ended]
    return left
