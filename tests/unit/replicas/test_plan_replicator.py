"""Urgent plans are written at once unless they are large; changes of weights or counts are rate-limited."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Counter

from controlplane.errors import NotLeader, StateUnavailable, VersionConflict
from controlplane.model.capture import Capture
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, RebalanceState
from controlplane.model.rules import StatementRule
from controlplane.replicas.plan_replicator import PlanReplicator, has_urgent_change, min_interval
from controlplane.storage.store import SavedPlan
from tests.support.waiting import wait_until

NODE = NodePlan(Node("a:1", Source.PD), State.ACTIVE, "reason", 0.0, EdsHealth.HEALTHY, 5, "10.0.0.1:1")
PLAN = Plan(nodes={"a:1": NODE})


def changed(**fields: object) -> Plan:
    return Plan(nodes={"a:1": replace(NODE, **fields)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "urgent"),
    [
        (PLAN, False),
        (changed(weight=6), False),
        (changed(reason="another", local_weight=3), False),
        (changed(weight=0, eds_health=EdsHealth.DRAINING, state=State.DRAINING), True),
        (changed(endpoint="10.0.0.2:1"), True),
        (changed(group="g"), True),
        (changed(zone="z"), True),
        (changed(closed_since=1.0), True),
        (changed(terminate_sessions=True), True),
        (Plan(), True),
        (replace(PLAN, panic_threshold_reason="reason"), True),
        (replace(PLAN, rules=(StatementRule("r", "{}"),)), True),
        (replace(PLAN, capture=Capture("c", 1.0, 2.0)), True),
        (replace(PLAN, nodes={"a:1": replace(NODE)}, rebalance=RebalanceState(since=1.0, round=1)), True),
        (replace(PLAN, nodes={"a:1": replace(NODE)}, weights_computed_at=5.0), False),
    ],
)
def test_urgent_changes(after: Plan, urgent: bool) -> None:
    assert has_urgent_change(PLAN, after) is urgent


def test_min_interval_grows_with_the_node_count() -> None:
    assert (min_interval(0), min_interval(400), min_interval(5000)) == (0.2, 0.2, 2.5)


class FakeStore:
    """Records saved plans with their times, and raises the failures that the test queues."""

    def __init__(self) -> None:
        self.saved: list[tuple[float, SavedPlan]] = []
        self.failures: list[Exception] = []

    async def save_plan(self, saved: SavedPlan) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.saved.append((asyncio.get_running_loop().time(), saved))


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


async def wait_saved(store: FakeStore, count: int) -> list[float]:
    await wait_until(lambda: len(store.saved) >= count, 5)
    return [at for at, _ in store.saved]


async def test_weight_changes_are_batched_and_state_changes_are_not(store: FakeStore) -> None:
    current = PLAN
    failures = Counter("failures", "", registry=CollectorRegistry())
    replicator = PlanReplicator(store, lambda: SavedPlan(current), failures)  # type: ignore[arg-type]
    task = asyncio.create_task(replicator.run())
    try:
        replicator.notify_changed(PLAN, PLAN, is_urgent=True)
        await wait_saved(store, 1)
        for weight in (6, 7, 8):
            before, current = current, changed(weight=weight)
            replicator.notify_changed(before, current)
            await asyncio.sleep(0.01)
        first, second = await wait_saved(store, 2)
        assert second - first >= 0.19
        assert store.saved[1][1].plan == changed(weight=8)
        before, current = current, changed(closed_since=1.0)
        replicator.notify_changed(before, current)
        _, second, third = await wait_saved(store, 3)
        assert third - second < 0.15
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_failed_write_is_retried_unless_another_replica_leads(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.storage.debounced_writer._MIN_RETRY_SECONDS", 0.01)
    failures = Counter("failures", "", registry=CollectorRegistry())
    replicator = PlanReplicator(store, lambda: SavedPlan(PLAN), failures)  # type: ignore[arg-type]
    store.failures = [StateUnavailable("plan", "no"), StateUnavailable("plan", "no")]
    task = asyncio.create_task(replicator.run())
    try:
        replicator.notify_changed(PLAN, PLAN, is_urgent=True)
        await wait_saved(store, 1)
        store.failures = [VersionConflict("plan")]
        replicator.notify_changed(PLAN, PLAN, is_urgent=True)
        await wait_saved(store, 2)
        store.failures = [NotLeader("writing")]
        replicator.notify_changed(PLAN, PLAN, is_urgent=True)
        await asyncio.sleep(0.1)
        assert (len(store.saved), store.failures) == (2, [])
        assert failures._value.get() == 3.0
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_plan_is_written_soon_after_a_long_outage(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.storage.debounced_writer._MIN_RETRY_SECONDS", 0.02)
    monkeypatch.setattr("controlplane.replicas.plan_replicator._MAX_RETRY_SECONDS", 0.02)
    failures = Counter("failures", "", registry=CollectorRegistry())
    replicator = PlanReplicator(store, lambda: SavedPlan(PLAN), failures)  # type: ignore[arg-type]
    store.failures = [StateUnavailable("plan", "no") for _ in range(9)]
    task = asyncio.create_task(replicator.run())
    replicator.notify_changed(PLAN, PLAN, is_urgent=True)
    await wait_saved(store, 1)  # with growing pauses, it would take 10 s
    task.cancel()
    await asyncio.wait({task})


async def test_unchanged_plan_is_written_periodically(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.replicas.plan_replicator._MAX_INTERVAL_SECONDS", 0.01)
    failures = Counter("failures", "", registry=CollectorRegistry())
    replicator = PlanReplicator(store, lambda: SavedPlan(PLAN), failures)  # type: ignore[arg-type]
    task = asyncio.create_task(replicator.run())
    await wait_saved(store, 2)
    task.cancel()
    await asyncio.wait({task})


async def test_urgent_writes_of_large_plans_are_rate_limited(store: FakeStore) -> None:
    many = Plan(nodes={f"a:{number}": NODE for number in range(2000)})
    failures = Counter("failures", "", registry=CollectorRegistry())
    replicator = PlanReplicator(store, lambda: SavedPlan(many), failures)  # type: ignore[arg-type]
    task = asyncio.create_task(replicator.run())
    for _ in range(25):
        replicator.notify_changed(many, many, is_urgent=True)
        await asyncio.sleep(0.01)
    first, second = (await wait_saved(store, 2))[:2]
    assert second - first >= 0.2
    task.cancel()
    await asyncio.wait({task})
