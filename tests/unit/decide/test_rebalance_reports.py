"""Rounds of moves in time: each rests on reports from after the last; those that achieve nothing pause."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from controlplane.decide.balance.rebalance import rebalance
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.plan import Plan, RebalanceState
from controlplane.model.traffic import LOST, MOVED
from tests.support.controlplane.balance_inputs import (
    DEFAULT_SESSIONS,
    INSTANCE_X,
    NODES_WITH_NEW_NODE,
    NOW,
    POLICY,
    A,
    B,
    C,
    ReportedSessions,
    decide_rebalance,
    incoming_by_node,
    node_plan,
    node_plans,
    outgoing_by_node,
)

AFTER = {"x": {A: 20, B: 30, C: 10}, "y": {A: 15, B: 15}}  # a third of what the first round asked for
EVEN = {"x": {A: 20, B: 20, C: 20}, "y": {A: 10, B: 10, C: 10}}


def ended(found: RebalanceState) -> RebalanceState:
    return replace(found, outgoing=EMPTY_MAP, incoming=EMPTY_MAP)


def as_of(now: float, sessions: Mapping[str, Mapping[str, int]]) -> ReportedSessions:
    return ReportedSessions(sessions, reported_at=now, counting_since=now)


def test_a_round_stands_until_its_end_and_is_then_withdrawn() -> None:
    first = decide_rebalance(DEFAULT_SESSIONS.facts())
    later = as_of(NOW + 0.9, AFTER).facts()
    assert decide_rebalance(later, before=first, now=NOW + 0.9) is first
    assert decide_rebalance(later, before=first, now=NOW + 1.0) == ended(first)


@pytest.mark.parametrize(("began", "goes_on"), [(2.99, False), (3.0, True)])
def test_the_next_round_rests_on_reports_from_after_the_last_one(began: float, goes_on: bool) -> None:
    """A session may be on its way for a second then, and the module counts once a second."""
    before = ended(decide_rebalance(DEFAULT_SESSIONS.facts()))
    found = decide_rebalance(
        ReportedSessions(AFTER, NOW + 5, NOW + began).facts(), before=before, now=NOW + 5
    )
    if goes_on:
        assert (found.since, found.round, found.round_ends_at) == (NOW, int(NOW) + 5, NOW + 6)
        assert (outgoing_by_node(found), incoming_by_node(found)) == ({A: 5, B: 15}, {C: 20})
    else:
        assert found is before


@pytest.mark.parametrize(
    ("counted_at", "goes_on"),
    [
        (1.99, False),  # it counted while a session of the latest round might have been on its way
        (2.0, True),
        (0.9, True),  # it has not answered for so long that its count is not believed, nor waited for
    ],
)
def test_nodes_that_count_their_connections_are_waited_for_as_well(counted_at: float, goes_on: bool) -> None:
    before = ended(decide_rebalance(DEFAULT_SESSIONS.facts()))
    own = {A: 35, B: 45, C: 10}
    fleet = replace(as_of(NOW + 4, AFTER), node_connections=own, counted_at=NOW + counted_at)
    assert bool(decide_rebalance(fleet.facts(), before=before, now=NOW + 4).outgoing) is goes_on


@pytest.mark.parametrize(("own", "goes_on"), [({A: 35, B: 45, C: 10}, True), ({A: 35, B: 45}, False)])
def test_where_all_nodes_have_counted_no_envoy_is_waited_for(own: dict[str, int], goes_on: bool) -> None:
    before = ended(decide_rebalance(DEFAULT_SESSIONS.facts()))
    fleet = replace(DEFAULT_SESSIONS, reported_at=NOW + 4, node_connections=own, counted_at=NOW + 2)
    found = decide_rebalance(fleet.facts(), before=before, now=NOW + 4)
    assert bool(found.outgoing) is goes_on
    if goes_on:
        assert (outgoing_by_node(found), incoming_by_node(found)) == ({A: 5, B: 15}, {C: 20})


def test_one_envoy_that_lags_behind_is_waited_for_until_it_is_silent() -> None:
    first = decide_rebalance(ReportedSessions({"x": {A: 60, B: 60}, "y": {A: 3, B: 3}}).facts())
    later = as_of(NOW + 5, {"x": {A: 60, B: 60}}).facts()
    lagging = DEFAULT_SESSIONS.facts().session_counts["y"]
    behind = replace(
        later,
        session_counts={**later.session_counts, "y": replace(lagging, sessions={A: 3, B: 3})},
        sessions_by_address={A: 63, B: 63},
    )
    assert decide_rebalance(behind, before=ended(first), now=NOW + 5) == ended(first)
    assert decide_rebalance(behind, before=ended(first), now=NOW + 5.1).outgoing == {
        A: {INSTANCE_X: 18},
        B: {INSTANCE_X: 18},
    }


def test_rounds_are_numbered_upwards_whatever_the_clock_says() -> None:
    high = RebalanceState(round=9_000_000_000)
    assert decide_rebalance(DEFAULT_SESSIONS.facts(), before=high).round == 9_000_000_001


def test_a_few_sessions_move_without_a_word_but_once_told_of_it_goes_on_to_its_end() -> None:
    few = decide_rebalance(ReportedSessions({"x": {A: 15, B: 10, C: 2}}).facts())
    assert (few.since, sum(outgoing_by_node(few).values())) == (None, 7)
    ten = decide_rebalance(ReportedSessions({"x": {A: 20, B: 9, C: 1}}).facts())
    assert (ten.since, sum(outgoing_by_node(ten).values())) == (NOW, 10)
    later = as_of(NOW + 5, {"x": {A: 15, B: 10, C: 2}})
    assert decide_rebalance(later.facts(), before=ended(few), now=NOW + 5).since is None
    going_on = decide_rebalance(later.facts(), before=ended(ten), now=NOW + 5)
    assert (going_on.since, going_on.reason) == (NOW, ten.reason)
    done = decide_rebalance(
        as_of(NOW + 9, {"x": {A: 9, B: 9, C: 9}}).facts(), before=ended(going_on), now=NOW + 9
    )
    assert (done.since, done.surplus, done.stalled_rounds, done.round) == (None, -1, 0, going_on.round)
    assert done.reason.startswith("all nodes have about their share")


def test_it_is_over_when_nobody_is_left_to_be_asked() -> None:
    before = ended(decide_rebalance(DEFAULT_SESSIONS.facts()))
    over = decide_rebalance(DEFAULT_SESSIONS.facts(), before=before, now=NOW + 60)
    assert (over.since, over.reason) == (None, "no Envoy has a module that could be asked")
    assert decide_rebalance(DEFAULT_SESSIONS.facts(), before=over, now=NOW + 61) is over


# --- rounds that achieve nothing ---------------------------------------------------------------------------


def begins(
    seconds: int, before: RebalanceState | None = None, start: float = NOW
) -> tuple[list[float], RebalanceState]:
    """When rounds begin while no session moves; and how it stands at the end."""
    found, begun = before or RebalanceState(), []
    for second in range(seconds):
        now = start + second
        was = found.round
        found = decide_rebalance(as_of(now, DEFAULT_SESSIONS.sessions).facts(), before=found, now=now)
        if found.round != was:
            begun.append(now - start)
    return begun, found


def test_rounds_that_change_nothing_come_ever_more_rarely() -> None:
    begun, _ = begins(2000)
    gaps = [late - early for early, late in itertools.pairwise(begun)]
    # A round is a second long, and two later its outcome is known. The first ones are borne.
    borne = gaps.count(3.0)
    assert 1 <= borne <= 2
    assert gaps[borne:] == [13.0, 23.0, 43.0, 83.0, 163.0, *[303.0] * (len(gaps) - borne - 5)]
    assert len(gaps) > 8


def test_one_round_that_moves_something_ends_the_pauses_after_the_next() -> None:
    _, found = begins(100)
    assert found.stalled_rounds > 2
    assert found.paused_until > NOW + 100
    assert decide_rebalance(as_of(NOW + 100, AFTER).facts(), before=found, now=NOW + 100) is found
    begun, found = begins(1, found, found.paused_until)
    assert begun == [0.0]
    later = NOW + 200
    for known in (
        as_of(later, AFTER).facts(),
        as_of(later, DEFAULT_SESSIONS.sessions).facts(
            migrations={A: {(MOVED, "ok"): 1}}
        ),  # others came meanwhile
    ):
        judged = decide_rebalance(known, before=ended(found), now=later)
        assert (judged.stalled_rounds, judged.paused_until <= later, bool(judged.outgoing)) == (0, True, True)
    failed = as_of(later, DEFAULT_SESSIONS.sessions).facts(migrations={A: {(LOST, "lost"): 1}})
    assert decide_rebalance(failed, before=ended(found), now=later).stalled_rounds == found.stalled_rounds + 1


def test_nodes_that_come_or_go_end_the_pause() -> None:
    _, found = begins(100)
    known = as_of(NOW + 100, DEFAULT_SESSIONS.sessions).facts()
    assert decide_rebalance(known, before=found, now=NOW + 100) is found
    fewer = node_plans(node_plan(A), node_plan(C, NOW))
    heavier = node_plans(node_plan(A), node_plan(B, weight=101), node_plan(C, NOW))
    for before, after in (
        (NODES_WITH_NEW_NODE, fewer),
        (fewer, NODES_WITH_NEW_NODE),
        (NODES_WITH_NEW_NODE, heavier),
    ):
        past = Plan(before, "", found)
        begun = rebalance(after, frozenset(), "", past, known, POLICY, NOW + 100)
        assert (bool(begun.outgoing), begun.stalled_rounds) == (True, 0)


@pytest.mark.parametrize("since", [None, NOW - 100])
def test_an_even_fleet_forgets_the_rounds_that_achieved_nothing(since: float | None) -> None:
    """Whether they were for enough sessions to be told of or not."""
    before = RebalanceState(since, "", 7, NOW - 90, stalled_rounds=5, surplus=6, paused_until=NOW - 1)
    even = decide_rebalance(as_of(NOW, EVEN).facts(), before=before)
    assert (even.since, even.stalled_rounds) == (None, 0)
    judged = replace(before, surplus=-1)
    assert decide_rebalance(as_of(NOW, EVEN).facts(), before=judged).stalled_rounds == 0
