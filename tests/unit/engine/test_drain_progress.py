"""What has come of the sessions of a node that is being left, from when that began."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.engine.drain_progress import DrainProgressTracker
from controlplane.model.facts import Facts
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan
from controlplane.model.traffic import MigrationCounts, ModuleReport, SessionCounts, Traffic
from controlplane.model.views import DrainProgress

A = "10.0.0.1:4000"
MOVED, SLOW, LOST = ("moved", "ok"), ("stayed", "slow"), ("lost", "lost")
EARLIER: MigrationCounts = {MOVED: 100, SLOW: 5}


def plan(state: State | None) -> Plan:
    node = NodePlan(
        Node(A, Source.PD), state or State.ACTIVE, "a reason", 0.0, EdsHealth.DRAINING, endpoint=A
    )
    return Plan({A: node} if state is not None else {})


def facts(sessions: int, moves: MigrationCounts = EARLIER, **pinned: int) -> Facts:
    report = ModuleReport(
        "one", 1.0, nodes={A: Traffic(not_movable=pinned), "": Traffic(not_movable={"opaque": 9})}
    )
    return Facts(
        session_counts={"one": SessionCounts(1.0, 0.0, {A: sessions})},
        sessions_by_address={A: sessions},
        migrations={A: moves},
        module_reports={"one": report},
    )


def of(
    departures: DrainProgressTracker, known: Facts, now: float, state: State = State.DRAINING
) -> DrainProgress:
    told = departures.get(plan(state).nodes[A], known, now)
    assert told is not None
    return told


def test_only_what_happens_from_then_on_counts() -> None:
    departures = DrainProgressTracker()
    assert departures.update(plan(State.ACTIVE), facts(100), 5.0) == []
    assert departures.get(plan(State.ACTIVE).nodes[A], facts(100), 5.0) is None
    assert departures.update(plan(State.DRAINING), facts(100), 10.0) == []
    assert of(departures, facts(100), 10.0) == DrainProgress(10.0, 0.0, 100)
    later = facts(20, {MOVED: 170, SLOW: 7, LOST: 1}, transaction=3, cursor=0)
    departures.update(plan(State.DRAINING), later, 14.0)
    assert of(departures, later, 14.0) == DrainProgress(
        since=10.0,
        elapsed_seconds=4.0,
        sessions_left=20,
        moved=70,
        failed={"slow": 2},
        lost=1,
        not_movable={"transaction": 3},
        seconds_left=0.85,  # 80 left in 4 s, and 17 can
    )


def test_it_ends_when_the_node_is_drained_and_is_kept_as_long_as_it_is() -> None:
    departures = DrainProgressTracker()
    departures.update(plan(State.DRAINING), facts(3), 10.0)
    moved = facts(0, {MOVED: 103, SLOW: 5})
    assert departures.update(plan(State.DRAINING), moved, 16.0) == []  # not surely empty yet
    ((address, told),) = departures.update(plan(State.DRAINED), moved, 19.0)
    assert (address, told.elapsed_seconds, told.moved, told.sessions_left, told.seconds_left) == (
        A,
        6.0,
        3,
        0,
        0.0,
    )
    assert departures.update(plan(State.DRAINED), moved, 20.0) == []
    assert of(departures, moved, 30.0, State.DRAINED).elapsed_seconds == 6.0
    # A session was on its way for long.
    assert departures.update(plan(State.DRAINING), facts(1, {MOVED: 103, SLOW: 5}), 20.0) == []
    assert of(departures, facts(1), 21.0).elapsed_seconds == 11.0
    ((_, again),) = departures.update(plan(State.DRAINED), facts(0, {MOVED: 104, SLOW: 5}), 22.0)
    assert (again.elapsed_seconds, again.moved) == (12.0, 4)
    assert departures.update(plan(State.ACTIVE), moved, 40.0) == []
    assert departures.get(plan(State.ACTIVE).nodes[A], moved, 40.0) is None


@pytest.mark.parametrize(("after", "left"), [(State.ACTIVE, 2), (State.UNHEALTHY, 2), (None, None)])
def test_it_ends_with_the_sessions_that_are_left_when_the_node_is_not_left_any_more(
    after: State | None, left: int | None
) -> None:
    departures = DrainProgressTracker()
    departures.update(plan(State.DRAINING), facts(3), 10.0)
    ((_, told),) = departures.update(plan(after), facts(2, {MOVED: 101, SLOW: 5}), 12.0)
    assert (told.moved, told.sessions_left) == (1, left)


def test_nothing_is_told_of_a_node_that_had_no_session() -> None:
    departures = DrainProgressTracker()
    departures.update(plan(State.DRAINING), facts(0), 10.0)
    assert departures.update(plan(State.DRAINED), facts(0), 12.0) == []


def test_a_pace_needs_to_be_known() -> None:
    departures = DrainProgressTracker()
    departures.update(plan(State.DRAINING), Facts(), 10.0)
    assert of(departures, Facts(), 12.0) == DrainProgress(10.0, 2.0, None, had_sessions=False)
    departures.update(plan(State.DRAINING), facts(5), 13.0)
    assert of(departures, facts(5), 14.0).seconds_left is None
    fewer = replace(facts(4), migrations={})
    departures.update(plan(State.DRAINING), fewer, 14.0)
    assert of(departures, fewer, 14.0).seconds_left == 16.0
    departures.update(plan(State.DRAINING), fewer, 18.9)
    assert of(departures, fewer, 18.9).seconds_left is not None
    assert of(departures, fewer, 19.0).seconds_left is None  # no other has left for a while


def test_those_that_cannot_move_leave_at_no_pace() -> None:
    departures = DrainProgressTracker()
    departures.update(plan(State.DRAINING), facts(10), 10.0)
    stuck = facts(4, cursor=3, transaction=1)
    departures.update(plan(State.DRAINING), stuck, 12.0)
    assert of(departures, stuck, 12.0).seconds_left is None
    assert of(departures, facts(0), 12.0).seconds_left == 0.0
