"""The planner wakes tasks that wait for applied intents after a role change or a plan of the leader."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controlplane.engine.engine import Engine
from controlplane.intents.changes import drain
from controlplane.model.intents import Intents
from controlplane.storage.store import SavedPlan, Versioned
from tests.support.controlplane.engine import settings

A = "10.0.0.1:4000"


@pytest.fixture
def follower(tmp_path: Path) -> Engine:
    """Return a follower with intents that the leader's plan does not apply yet."""
    config = settings(
        tmp_path,
        pd={"urls": ["http://127.0.0.1:1"]},
        replicas={"enabled": True, "name": "a"},
        nodes=[{"address": A}],
        health={"sql": {"enabled": False}, "status": {"enabled": False}},
    )
    engine = Engine(config)
    engine._intents.restore(Versioned(drain(Intents(), A, 1.0, 600.0), 7))
    engine._planner.decide()
    return engine


async def start_waiting(engine: Engine, version: int) -> asyncio.Task[None]:
    waiting = asyncio.create_task(engine._planner.wait_applied(version))
    await asyncio.sleep(0)
    assert not waiting.done()
    return waiting


@pytest.mark.parametrize("role", ["leader", "standalone"])
async def test_follower_that_starts_to_decide_has_applied_its_intents(follower: Engine, role: str) -> None:
    waiting = await start_waiting(follower, 7)
    if role == "leader":
        follower._planner.become_leader(3, None)
    else:
        follower._planner.become_standalone()
    await asyncio.wait_for(waiting, 5)
    assert follower.cluster.node(A).drain is not None
    assert follower.cluster.plan.nodes[A].closed_since is not None


async def test_new_leader_has_not_applied_intents_that_it_does_not_know(follower: Engine) -> None:
    waiting = await start_waiting(follower, 8)
    follower._planner.become_leader(3, None)
    await asyncio.sleep(0)
    assert not waiting.done()
    follower._intents.accept(Versioned(Intents(), 8))
    follower._planner.decide(at_once=True)
    await asyncio.wait_for(waiting, 5)


async def test_follower_has_applied_intents_when_the_plan_of_the_leader_does(follower: Engine) -> None:
    waiting = await start_waiting(follower, 7)
    plan = follower.cluster.plan
    follower._planner.adopt_plan(SavedPlan(plan, intents_version=6, term=2, serial=1), 2)
    await asyncio.sleep(0)
    assert not waiting.done()
    follower._planner.adopt_plan(SavedPlan(plan, intents_version=7, term=2, serial=2), 2)
    await asyncio.wait_for(waiting, 5)
