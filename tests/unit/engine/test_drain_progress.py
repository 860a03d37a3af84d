"""Drain progress: counts since the drain started, the final report, and the estimated time left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.engine.drain_progress import DrainProgressTracker
from controlplane.model.facts import Facts
from controlplane.model.module_switches import ModuleSwitches, SwitchOverrides
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, Policy
from controlplane.model.traffic import MigrationCounts, ModuleReport, SessionCounts, Traffic
from controlplane.model.views import DrainProgress

A = "10.0.0.1:4000"
MOVED, SLOW, LOST = ("moved", "ok"), ("failed", "slow"), ("lost", "lost")
EARLIER: MigrationCounts = {MOVED: 100, SLOW: 5}


def plan(state: State | None) -> Plan:
    node = NodePlan(
        Node(A, Source.PD), state or State.ACTIVE, "a reason", 0.0, EdsHealth.DRAINING, endpoint=A
    )
    return Plan({A: node} if state is not None else {})


def facts(sessions: int, migrations: MigrationCounts = EARLIER, **not_movable: int) -> Facts:
    report = ModuleReport(
        "one", 1.0, nodes={A: Traffic(not_movable=not_movable), "": Traffic(not_movable={"opaque": 9})}
    )
    return Facts(
        session_counts={"one": SessionCounts(1.0, 0.0, {A: sessions})},
        sessions_by_address={A: sessions},
        migrations={A: migrations},
        module_reports={"one": report},
    )


def progress_of(
    tracker: DrainProgressTracker, observed: Facts, now: float, state: State = State.DRAINING
) -> DrainProgress:
    progress = tracker.get(plan(state).nodes[A], observed, now)
    assert progress is not None
    return progress


def test_progress_counts_only_from_the_start_of_the_drain() -> None:
    tracker = DrainProgressTracker()
    assert tracker.update(plan(State.ACTIVE), facts(100), 5.0) == []
    assert tracker.get(plan(State.ACTIVE).nodes[A], facts(100), 5.0) is None
    assert tracker.update(plan(State.DRAINING), facts(100), 10.0) == []
    assert progress_of(tracker, facts(100), 10.0) == DrainProgress(10.0, 0.0, 100)
    later = facts(20, {MOVED: 170, SLOW: 7, LOST: 1}, transaction=3, cursor=0)
    tracker.update(plan(State.DRAINING), later, 14.0)
    assert progress_of(tracker, later, 14.0) == DrainProgress(
        since=10.0,
        elapsed_seconds=4.0,
        sessions_left=20,
        migrated=70,
        failed={"slow": 2},
        lost=1,
        not_movable={"transaction": 3},
        seconds_left=0.85,  # 80 sessions have left in 4 s; 17 of the other 20 can migrate
    )


def test_drain_finishes_when_the_node_is_drained_and_keeps_its_record() -> None:
    tracker = DrainProgressTracker()
    tracker.update(plan(State.DRAINING), facts(3), 10.0)
    moved = facts(0, {MOVED: 103, SLOW: 5})
    assert tracker.update(plan(State.DRAINING), moved, 16.0) == []  # not confirmed empty yet
    ((address, finished),) = tracker.update(plan(State.DRAINED), moved, 19.0)
    assert (
        address,
        finished.elapsed_seconds,
        finished.migrated,
        finished.sessions_left,
        finished.seconds_left,
    ) == (
        A,
        6.0,
        3,
        0,
        0.0,
    )
    assert tracker.update(plan(State.DRAINED), moved, 20.0) == []
    assert progress_of(tracker, moved, 30.0, State.DRAINED).elapsed_seconds == 6.0
    # A session arrives late, so the drain goes on.
    assert tracker.update(plan(State.DRAINING), facts(1, {MOVED: 103, SLOW: 5}), 20.0) == []
    assert progress_of(tracker, facts(1), 21.0).elapsed_seconds == 11.0
    ((_, second),) = tracker.update(plan(State.DRAINED), facts(0, {MOVED: 104, SLOW: 5}), 22.0)
    assert (second.elapsed_seconds, second.migrated) == (12.0, 4)
    assert tracker.update(plan(State.ACTIVE), moved, 40.0) == []
    assert tracker.get(plan(State.ACTIVE).nodes[A], moved, 40.0) is None


@pytest.mark.parametrize(("after", "sessions_left"), [(State.ACTIVE, 2), (State.UNHEALTHY, 2), (None, None)])
def test_canceled_drain_finishes_with_its_remaining_sessions(
    after: State | None, sessions_left: int | None
) -> None:
    tracker = DrainProgressTracker()
    tracker.update(plan(State.DRAINING), facts(3), 10.0)
    ((_, finished),) = tracker.update(plan(after), facts(2, {MOVED: 101, SLOW: 5}), 12.0)
    assert (finished.migrated, finished.sessions_left) == (1, sessions_left)


def test_drain_without_sessions_is_not_reported() -> None:
    tracker = DrainProgressTracker()
    tracker.update(plan(State.DRAINING), facts(0), 10.0)
    assert tracker.update(plan(State.DRAINED), facts(0), 12.0) == []


def test_time_left_needs_a_known_pace() -> None:
    tracker = DrainProgressTracker()
    tracker.update(plan(State.DRAINING), Facts(), 10.0)
    assert progress_of(tracker, Facts(), 12.0) == DrainProgress(10.0, 2.0, None, had_sessions=False)
    tracker.update(plan(State.DRAINING), facts(5), 13.0)
    assert progress_of(tracker, facts(5), 14.0).seconds_left is None
    fewer = replace(facts(4), migrations={})
    tracker.update(plan(State.DRAINING), fewer, 14.0)
    assert progress_of(tracker, fewer, 14.0).seconds_left == 16.0
    tracker.update(plan(State.DRAINING), fewer, 18.9)
    assert progress_of(tracker, fewer, 18.9).seconds_left is not None
    assert progress_of(tracker, fewer, 19.0).seconds_left is None  # no session has left for 5 s


def test_time_left_ignores_sessions_that_cannot_migrate() -> None:
    tracker = DrainProgressTracker()
    tracker.update(plan(State.DRAINING), facts(10), 10.0)
    stuck = facts(4, cursor=3, transaction=1)
    tracker.update(plan(State.DRAINING), stuck, 12.0)
    assert progress_of(tracker, stuck, 12.0).seconds_left is None
    assert progress_of(tracker, facts(0), 12.0).seconds_left == 0.0


def test_sessions_of_envoys_with_migration_off_cannot_migrate() -> None:
    idle = {"one": Traffic(sessions={"idle": 5, "transaction": 1}, not_movable={"transaction": 1})}
    idle["two"] = Traffic(sessions={"idle": 3, "transaction": 2}, not_movable={"transaction": 2})
    observed = replace(
        facts(11), module_reports={e: ModuleReport(e, 1.0, nodes={A: traffic}) for e, traffic in idle.items()}
    )
    overridden = replace(plan(State.DRAINING), switch_overrides={"one": SwitchOverrides(migration=False)})
    tracker = DrainProgressTracker()
    tracker.update(overridden, observed, 10.0)
    assert progress_of(tracker, observed, 10.0).not_movable == {"transaction": 2, "switched_off": 6}
    by_runtime = replace(observed.module_reports["two"], runtime_off=frozenset({"migration"}))
    all_off = replace(observed, module_reports={**observed.module_reports, "two": by_runtime})
    assert progress_of(tracker, all_off, 10.0).not_movable == {"switched_off": 11}
    tracker.policy = Policy(module_switches=ModuleSwitches(migration=False))
    progress = progress_of(tracker, observed, 10.0)
    assert (progress.not_movable, progress.seconds_left) == ({"switched_off": 11}, None)
