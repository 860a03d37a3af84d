"""Rebalancing over time: each round needs new reports, and pauses follow rounds without effect."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from controlplane.decide.balance.rebalance import rebalance
from controlplane.decide.inputs import Inputs
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

# Sessions after the first round has migrated a third of the requested sessions.
AFTER = {"x": {A: 20, B: 30, C: 10}, "y": {A: 15, B: 15}}
EVEN = {"x": {A: 20, B: 20, C: 20}, "y": {A: 10, B: 10, C: 10}}


def cancelled(state: RebalanceState) -> RebalanceState:
    return replace(state, outgoing=EMPTY_MAP, incoming=EMPTY_MAP)


def as_of(now: float, sessions: Mapping[str, Mapping[str, int]]) -> ReportedSessions:
    return ReportedSessions(sessions, reported_at=now, oldest_count_at=now)


def test_round_lasts_until_its_end_and_is_then_cancelled() -> None:
    first = decide_rebalance(DEFAULT_SESSIONS.facts())
    later = as_of(NOW + 0.9, AFTER).facts()
    assert decide_rebalance(later, before=first, now=NOW + 0.9) is first
    assert decide_rebalance(later, before=first, now=NOW + 1.0) == cancelled(first)


@pytest.mark.parametrize(("counted_since", "proceeds"), [(2.99, False), (3.0, True)])
def test_round_needs_reports_made_after_the_previous_round(counted_since: float, proceeds: bool) -> None:
    """A migration may end a second after its round, and the module counts once per second."""
    before = cancelled(decide_rebalance(DEFAULT_SESSIONS.facts()))
    state = decide_rebalance(
        ReportedSessions(AFTER, NOW + 5, NOW + counted_since).facts(), before=before, now=NOW + 5
    )
    if proceeds:
        assert (state.since, state.round, state.round_ends_at) == (NOW, int(NOW) + 5, NOW + 6)
        assert (outgoing_by_node(state), incoming_by_node(state)) == ({A: 5, B: 15}, {C: 20})
    else:
        assert state is before


@pytest.mark.parametrize(
    ("counted_at", "proceeds"),
    [
        (1.99, False),  # a migration of the round may still be in progress
        (2.0, True),
        (0.9, True),  # TiDB's counts are too old: the round uses the modules' counts
    ],
)
def test_next_round_waits_for_tidb_counts(counted_at: float, proceeds: bool) -> None:
    before = cancelled(decide_rebalance(DEFAULT_SESSIONS.facts()))
    connections = {A: 35, B: 45, C: 10}
    fleet = replace(as_of(NOW + 4, AFTER), node_connections=connections, counted_at=NOW + counted_at)
    assert bool(decide_rebalance(fleet.facts(), before=before, now=NOW + 4).outgoing) is proceeds


@pytest.mark.parametrize(
    ("connections", "proceeds"), [({A: 35, B: 45, C: 10}, True), ({A: 35, B: 45}, False)]
)
def test_complete_tidb_counts_replace_envoy_reports(connections: dict[str, int], proceeds: bool) -> None:
    before = cancelled(decide_rebalance(DEFAULT_SESSIONS.facts()))
    fleet = replace(DEFAULT_SESSIONS, reported_at=NOW + 4, node_connections=connections, counted_at=NOW + 2)
    state = decide_rebalance(fleet.facts(), before=before, now=NOW + 4)
    assert bool(state.outgoing) is proceeds
    if proceeds:
        assert (outgoing_by_node(state), incoming_by_node(state)) == ({A: 5, B: 15}, {C: 20})


def test_round_waits_for_envoy_until_its_report_is_stale() -> None:
    first = decide_rebalance(ReportedSessions({"x": {A: 60, B: 60}, "y": {A: 3, B: 3}}).facts())
    later = as_of(NOW + 5, {"x": {A: 60, B: 60}}).facts()
    old_counts = DEFAULT_SESSIONS.facts().session_counts["y"]
    facts_with_old_counts = replace(
        later,
        session_counts={**later.session_counts, "y": replace(old_counts, sessions={A: 3, B: 3})},
        sessions_by_address={A: 63, B: 63},
    )
    assert decide_rebalance(facts_with_old_counts, before=cancelled(first), now=NOW + 5) == cancelled(first)
    assert decide_rebalance(facts_with_old_counts, before=cancelled(first), now=NOW + 5.1).outgoing == {
        A: {INSTANCE_X: 18},
        B: {INSTANCE_X: 18},
    }


def test_round_numbers_only_grow() -> None:
    high = RebalanceState(round=9_000_000_000)
    assert decide_rebalance(DEFAULT_SESSIONS.facts(), before=high).round == 9_000_000_001


def test_small_rebalancing_is_reported_only_if_it_continues_a_large_one() -> None:
    few = decide_rebalance(ReportedSessions({"x": {A: 15, B: 10, C: 2}}).facts())
    assert (few.since, sum(outgoing_by_node(few).values())) == (None, 7)
    ten = decide_rebalance(ReportedSessions({"x": {A: 20, B: 9, C: 1}}).facts())
    assert (ten.since, sum(outgoing_by_node(ten).values())) == (NOW, 10)
    later = as_of(NOW + 5, {"x": {A: 15, B: 10, C: 2}})
    assert decide_rebalance(later.facts(), before=cancelled(few), now=NOW + 5).since is None
    continued = decide_rebalance(later.facts(), before=cancelled(ten), now=NOW + 5)
    assert (continued.since, continued.reason) == (NOW, ten.reason)
    done = decide_rebalance(
        as_of(NOW + 9, {"x": {A: 9, B: 9, C: 9}}).facts(), before=cancelled(continued), now=NOW + 9
    )
    assert (done.since, done.surplus, done.stalled_rounds, done.round) == (None, -1, 0, continued.round)
    assert done.reason.startswith("all nodes have about their share")


def test_rebalancing_ends_without_capable_envoys() -> None:
    before = cancelled(decide_rebalance(DEFAULT_SESSIONS.facts()))
    over = decide_rebalance(DEFAULT_SESSIONS.facts(), before=before, now=NOW + 60)
    assert (over.since, over.reason) == (None, "no Envoy has a module that can migrate sessions")
    assert decide_rebalance(DEFAULT_SESSIONS.facts(), before=over, now=NOW + 61) is over


# --- rounds without effect ---------------------------------------------------------------------------------


def simulate_rounds(
    seconds: int, before: RebalanceState | None = None, start: float = NOW
) -> tuple[list[float], RebalanceState]:
    """Return the start times of rounds while no session migrates, and the final state."""
    state, started = before or RebalanceState(), []
    for second in range(seconds):
        now = start + second
        previous_round = state.round
        state = decide_rebalance(as_of(now, DEFAULT_SESSIONS.sessions).facts(), before=state, now=now)
        if state.round != previous_round:
            started.append(now - start)
    return started, state


def test_pauses_between_rounds_without_effect_double_after_a_minute() -> None:
    started, _ = simulate_rounds(2000)
    gaps = [late - early for early, late in itertools.pairwise(started)]
    # A round lasts one second, and its result is known two seconds later. After the first one or two rounds
    # without effect, there is no pause.
    without_pause = gaps.count(3.0)
    assert 1 <= without_pause <= 2
    growing = [*[13.0] * 4, 23.0, 43.0, 83.0, 163.0]
    assert gaps[without_pause:] == growing + [303.0] * (len(gaps) - without_pause - len(growing))
    assert len(gaps) > without_pause + len(growing)


def test_round_with_effect_ends_the_pauses() -> None:
    _, state = simulate_rounds(100)
    assert state.stalled_rounds > 2
    assert state.paused_until > NOW + 100
    assert decide_rebalance(as_of(NOW + 100, AFTER).facts(), before=state, now=NOW + 100) is state
    started, state = simulate_rounds(1, state, state.paused_until)
    assert started == [0.0]
    later = NOW + 200
    for facts in (
        as_of(later, AFTER).facts(),
        # a session migrated, but a new session arrived
        as_of(later, DEFAULT_SESSIONS.sessions).facts(migrations={A: {(MOVED, "ok"): 1}}),
    ):
        evaluated = decide_rebalance(facts, before=cancelled(state), now=later)
        assert (evaluated.stalled_rounds, evaluated.paused_until <= later, bool(evaluated.outgoing)) == (
            0,
            True,
            True,
        )
    failed = as_of(later, DEFAULT_SESSIONS.sessions).facts(migrations={A: {(LOST, "lost"): 1}})
    assert (
        decide_rebalance(failed, before=cancelled(state), now=later).stalled_rounds
        == state.stalled_rounds + 1
    )


def test_changed_set_of_nodes_ends_the_pause() -> None:
    _, state = simulate_rounds(100)
    facts = as_of(NOW + 100, DEFAULT_SESSIONS.sessions).facts()
    assert decide_rebalance(facts, before=state, now=NOW + 100) is state
    fewer = node_plans(node_plan(A), node_plan(C, NOW))
    heavier = node_plans(node_plan(A), node_plan(B, weight=101), node_plan(C, NOW))
    for before, after in (
        (NODES_WITH_NEW_NODE, fewer),
        (fewer, NODES_WITH_NEW_NODE),
        (NODES_WITH_NEW_NODE, heavier),
    ):
        past = Plan(before, "", state)
        started = rebalance(after, frozenset(), "", Inputs(past, facts, POLICY, NOW + 100))
        assert (bool(started.outgoing), started.stalled_rounds) == (True, 0)


@pytest.mark.parametrize("since", [None, NOW - 100])
def test_balanced_fleet_resets_stalled_rounds(since: float | None) -> None:
    """`since` is `None` if the rebalancing is too small to be reported."""
    before = RebalanceState(since, "", 7, NOW - 90, stalled_rounds=5, surplus=6, paused_until=NOW - 1)
    even = decide_rebalance(as_of(NOW, EVEN).facts(), before=before)
    assert (even.since, even.stalled_rounds) == (None, 0)
    already_evaluated = replace(before, surplus=-1)  # -1: the result of the last round is evaluated
    assert decide_rebalance(as_of(NOW, EVEN).facts(), before=already_evaluated).stalled_rounds == 0
