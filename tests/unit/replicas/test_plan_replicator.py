"""A plan that matters to Envoys of others is written at once; weights and counts wait for each other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Counter

from controlplane.errors import NotLeader, StateUnavailable, VersionConflict
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, RebalanceState
from controlplane.replicas.plan_replicator import PlanReplicator, is_urgent, min_interval
from controlplane.storage.store import SavedPlan
from tests.support.waiting import wait_until

NODE = NodePlan(Node("a:1", Source.PD), State.ACTIVE, "why", 0.0, EdsHealth.HEALTHY, 5, "10.0.0.1:1")
PLAN = Plan(nodes={"a:1": NODE})


def changed(**fields: object) -> Plan:
    return Plan(nodes={"a:1": replace(NODE, **fields)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "urgent"),
    [
        (PLAN, True),  # the first of a leader
        (changed(weight=6), False),
        (changed(reason="another", local_weight=3), False),
        (changed(weight=0, eds_health=EdsHealth.DRAINING, state=State.DRAINING), True),
        (changed(endpoint="10.0.0.2:1"), True),
        (changed(group="g"), True),
        (changed(zone="z"), True),
        (changed(closed_since=1.0), True),
        (changed(terminate_sessions=True), True),
        (Plan(), True),
        (replace(PLAN, panic_threshold_reason="why"), True),
        (replace(PLAN, nodes={"a:1": replace(NODE)}, rebalance=RebalanceState(since=1.0, round=1)), True),
        (replace(PLAN, nodes={"a:1": replace(NODE)}, weights_computed_at=5.0), False),
    ],
)
def test_what_others_are_not_to_wait_for(after: Plan, urgent: bool) -> None:
    assert is_urgent(PLAN, after) is urgent


def test_many_nodes_are_written_less_often() -> None:
    assert (min_interval(0), min_interval(400), min_interval(5000)) == (0.2, 0.2, 2.5)


class Plans:
    """A store that keeps plans and says when; it fails as it is told."""

    def __init__(self) -> None:
        self.saved: list[tuple[float, SavedPlan]] = []
        self.failures: list[Exception] = []

    async def save_plan(self, saved: SavedPlan) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.saved.append((asyncio.get_running_loop().time(), saved))


@pytest.fixture
def plans() -> Plans:
    return Plans()


async def written(plans: Plans, count: int) -> list[float]:
    await wait_until(lambda: len(plans.saved) >= count, 5)
    return [at for at, _ in plans.saved]


async def test_weights_wait_for_each_other_and_states_do_not(plans: Plans) -> None:
    current = PLAN
    failures = Counter("failures", "", registry=CollectorRegistry())
    writer = PlanReplicator(plans, lambda: SavedPlan(current), failures)  # type: ignore[arg-type]
    running = asyncio.create_task(writer.run())
    try:
        writer.notify_changed(PLAN, PLAN)
        await written(plans, 1)
        for weight in (6, 7, 8):
            before, current = current, changed(weight=weight)
            writer.notify_changed(before, current)
            await asyncio.sleep(0.01)
        first, second = await written(plans, 2)
        assert second - first >= 0.19
        assert plans.saved[1][1].plan == changed(weight=8)
        before, current = current, changed(closed_since=1.0)
        writer.notify_changed(before, current)
        _, second, third = await written(plans, 3)
        assert third - second < 0.15
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_what_could_not_be_written_is_tried_again_unless_another_leads(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.replicas.plan_replicator._RETRY_SECONDS", 0.01)
    failures = Counter("failures", "", registry=CollectorRegistry())
    writer = PlanReplicator(plans, lambda: SavedPlan(PLAN), failures)  # type: ignore[arg-type]
    plans.failures = [StateUnavailable("plan", "no"), StateUnavailable("plan", "no")]
    running = asyncio.create_task(writer.run())
    try:
        writer.notify_changed(PLAN, PLAN)
        await written(plans, 1)
        plans.failures = [VersionConflict("plan")]
        writer.notify_changed(PLAN, PLAN)
        await written(plans, 2)
        plans.failures = [NotLeader("writing")]
        writer.notify_changed(PLAN, PLAN)
        await asyncio.sleep(0.1)
        assert (len(plans.saved), plans.failures) == (2, [])
        assert failures._value.get() == 3.0
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_now_and_then_it_is_written_though_nothing_changes(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.replicas.plan_replicator._MAX_INTERVAL_SECONDS", 0.01)
    failures = Counter("failures", "", registry=CollectorRegistry())
    writer = PlanReplicator(plans, lambda: SavedPlan(PLAN), failures)  # type: ignore[arg-type]
    running = asyncio.create_task(writer.run())
    await written(plans, 2)
    running.cancel()
    await asyncio.wait({running})


async def test_of_many_nodes_that_change_all_the_time_not_every_plan_is_kept(plans: Plans) -> None:
    many = Plan(nodes={f"a:{number}": NODE for number in range(2000)})
    failures = Counter("failures", "", registry=CollectorRegistry())
    writer = PlanReplicator(plans, lambda: SavedPlan(many), failures)  # type: ignore[arg-type]
    running = asyncio.create_task(writer.run())
    for _ in range(25):
        writer.notify_changed(many, many)
        await asyncio.sleep(0.01)
    first, second = (await written(plans, 2))[:2]
    assert second - first >= 0.2
    running.cancel()
    await asyncio.wait({running})
