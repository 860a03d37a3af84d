"""KILL ends a session through Envoy whenever it comes; only a session whose node is gone goes on elsewhere.

TIDEVOY_SOAK=1: 500 sessions in place of 60, killed over the whole minute for which states are kept.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.awaiting import until
from tests.tidb.victims import (
    Arena,
    Victim,
    are_busy,
    arena,
    killed_by_log,
    log_kills,
    paced,
    run,
)

SOAK = bool(os.environ.get("TIDEVOY_SOAK"))
MANY = 500 if SOAK else 60
KEPT = 60.0 if SOAK else 1.5
"""Seconds over which sessions are killed whose states are known."""
_ROUNDS = 20
pytestmark = pytest.mark.timeout(300 if SOAK else 60)


async def killed_over(there: Arena, victims: Sequence[Victim], seconds: float) -> None:
    """One after the other, by the number that is shown right before."""
    began = time.monotonic()
    for turn, victim in enumerate(victims):
        await asyncio.sleep(paced(began, turn * seconds / len(victims)))
        there.kill(victim, there.listed()[victim.name])
    await there.gone(victims)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("state", ["active", "drained", "drained before"])
async def test_sessions_that_have_not_moved_are_killed(
    tmp_path: Path, cluster: TidbCluster, state: str, busy: bool
) -> None:
    """In a drained node their states are known, since a move was tried."""
    node, other, _ = cluster.tidb
    async with arena(tmp_path, [node, other]) as there:
        victims = await there.come(MANY)
        if state != "active":
            there.tell(node, only=[node], denying=True)
            await there.stayed(len(victims))
        if state == "drained before":
            there.tell()
        if busy:
            run(victims)
            await are_busy(there, victims)
        await killed_over(there, victims, 0.0 if busy or state == "active" else KEPT)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_sessions_that_have_moved_are_killed(tmp_path: Path, cluster: TidbCluster, busy: bool) -> None:
    old, new, _ = cluster.tidb
    async with arena(tmp_path, [old, new]) as there:
        victims = await there.come(MANY)
        there.tell(old)
        await there.are_on(new, victims)
        there.tell()
        if busy:
            run(victims)
            await are_busy(there, victims)
        await killed_over(there, victims, 0.0 if busy else KEPT)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_sessions_of_a_node_that_stops_are_killed(
    tmp_path: Path, cluster: TidbCluster, busy: bool
) -> None:
    """While it waits, its status port says 500 and its SQL port accepts."""
    node, other, _ = cluster.tidb
    node.graceful_wait = 30.0
    await node.restart()
    async with arena(tmp_path, [node, other]) as there:
        victims = await there.come(MANY)
        there.tell(node, only=[node], denying=True)
        await there.stayed(len(victims))
        there.tell()
        if busy:
            run(victims)
            await are_busy(there, victims)
        stopping = asyncio.create_task(node.terminate(60.0))

        async def says_so() -> bool:
            return not await node.serves()

        await until(says_so)
        await killed_over(there, victims, 0.0)
        assert node.running
        there.leave(node)
        await node.kill()
        await asyncio.gather(stopping, return_exceptions=True)


async def test_sessions_are_killed_while_they_move(tmp_path: Path, cluster: TidbCluster) -> None:
    """Who was not there any more by the number that was shown is killed by the next one."""
    nodes = cluster.tidb[:2]
    logs = [cluster.directory / f"{name}.log" for name in ("tidb-1", "tidb-2")]
    for node in nodes:
        await log_kills(node)
    async with arena(tmp_path, nodes) as there:
        victims = await there.come(MANY)
        moving = asyncio.create_task(_to_and_fro(there, nodes))
        try:
            left = await _kill_moving(there, victims)
        finally:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
        assert not left
        hit = set().union(*(killed_by_log(node, log) for node, log in zip(nodes, logs, strict=True)))
        kills = {victim.name: [numbers & hit for numbers in victim.kills] for victim in victims}
        missed = sum(len(victim.kills) - 1 for victim in victims)
        print(f"{len(victims)} sessions killed while they moved, {missed} times not there any more")
        assert not [name for name, each in kills.items() if any(each[:-1])], "killed, and lived on"


GONE = [
    ("SIGKILL", 0.0, "a move failed"),
    ("SIGKILL", 0.0, "moved"),
    ("SIGTERM", 5.0 if SOAK else 1.0, "a move failed"),
    ("SIGTERM", 0.0, "moved"),
]


@pytest.mark.parametrize(("end", "graceful_wait", "known"), GONE)
async def test_idle_sessions_go_on_when_their_node_is_gone(
    tmp_path: Path, cluster: TidbCluster, end: str, graceful_wait: float, known: str
) -> None:
    """Their states are known, since a move was tried. Nobody tells Envoy that the node goes."""
    first, second, _ = cluster.tidb
    here, there = (first, second) if known == "a move failed" else (second, first)
    if end == "SIGTERM":
        here.graceful_wait = graceful_wait
        await here.restart()
    async with arena(tmp_path, [first, second]) as nodes:
        victims = await nodes.come(MANY)
        if known == "moved":
            nodes.tell(first)
            await nodes.are_on(second, victims)
        else:
            nodes.tell(first, only=[first], denying=True)
            await nodes.stayed(len(victims))
        nodes.tell()
        nodes.leave(here)
        began = time.monotonic()
        await (here.kill() if end == "SIGKILL" else here.terminate(60.0))
        print(f"{len(victims)} sessions, {end} took {time.monotonic() - began:.1f} s")
        await nodes.are_on(there, victims)
        await nodes.still(victims, there)


async def _to_and_fro(there: Arena, nodes: Sequence[Tidb]) -> None:
    while True:
        for node in nodes:
            there.tell(node)
            await asyncio.sleep(0.2)


async def _kill_moving(there: Arena, victims: Sequence[Victim]) -> list[Victim]:
    left = list(victims)
    for _ in range(_ROUNDS):
        random.shuffle(left)
        for victim in left:
            there.kill(victim, there.listed().get(victim.name, []))
            await asyncio.sleep(0)
        await asyncio.sleep(0.5)
        left = [victim for victim in left if not victim.is_gone]
    return left
