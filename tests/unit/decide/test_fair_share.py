"""What nodes have of all sessions, and what their share is: sums, limits, and what is not surely known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.fair_share import (
    LoadStatus,
    effective_capacity,
    integer_shares,
    load_statuses,
)
from controlplane.model.plan import Factor
from tests.support.controlplane.balance_inputs import (
    INSTANCE_X,
    NODES_WITH_NEW_NODE,
    NOW,
    POLICY,
    A,
    B,
    C,
    ReportedSessions,
    expected_water_level,
    node_plan,
)

ALIKE = {A: 100.0, B: 100.0, C: 100.0}
FACTORS = {"health": Factor(0.5, 0.02, 1, ""), "cpu": Factor(0.8, 1.0, 0, "")}


def found(fleet: ReportedSessions, capacities: Mapping[str, float] | None = None) -> dict[str, LoadStatus]:
    """How nodes stand. Modules that fell silent or do not name their process cannot be asked."""
    facts = fleet.facts()
    unasked = [c for e, c in facts.session_counts.items() if e in fleet.stale_envoys or not c.instance]
    return load_statuses(
        NODES_WITH_NEW_NODE, ALIKE if capacities is None else capacities, unasked, facts, POLICY, NOW
    )


def sure(sessions: int, share: int) -> LoadStatus:
    return LoadStatus(sessions, sessions, share, share)


def test_what_all_have_is_shared_out_by_capacity() -> None:
    fleet = ReportedSessions({"x": {A: 30, B: 20}, "y": {A: 10}})
    assert found(fleet) == {A: sure(40, 20), B: sure(20, 20), C: sure(0, 20)}
    uneven = found(fleet, {A: 100.0, B: 150.0, C: 50.0})
    assert uneven == {A: sure(40, 20), B: sure(20, 30), C: sure(0, 10)}
    assert (uneven[A].surplus, uneven[B].surplus, uneven[B].deficit, uneven[C].deficit) == (20, -10, 10, 10)


def test_only_nodes_that_share_with_each_other_count() -> None:
    fleet = ReportedSessions({"x": {A: 30, B: 20, C: 900}})
    assert found(fleet, {A: 1.0, B: 1.0}) == {A: sure(30, 25), B: sure(20, 25)}


def test_a_node_that_only_stands_in_has_a_share_of_nothing() -> None:
    assert found(ReportedSessions({"x": {A: 30, B: 20, C: 10}}), {A: 1.0, B: 1.0, C: 0.0}) == {
        A: sure(30, 30),
        B: sure(20, 30),
        C: sure(10, 0),
    }


@pytest.mark.parametrize(
    "fleet",
    [
        ReportedSessions({"x": {A: 6}}, node_connections={A: 86, B: 0, C: 0}),
        ReportedSessions({"x": {A: 6}}, stock_envoy_sessions={"z": {A: 80}}),
        ReportedSessions({"x": {A: 6}, "y": {A: 80}}, instances={"x": INSTANCE_X}),
    ],
)
def test_no_share_is_less_than_what_nobody_can_be_asked_to_move(fleet: ReportedSessions) -> None:
    """Direct clients' sessions, those of Envoys without a module, and those of older modules."""
    assert found(fleet) == {A: sure(86, 80), B: sure(0, 3), C: sure(0, 3)}


def test_a_nodes_own_count_goes_before_that_of_envoys_while_it_is_fresh() -> None:
    fleet = ReportedSessions({"x": {A: 30, B: 30}}, node_connections={A: 60})
    assert found(fleet) == {A: sure(60, 30), B: sure(30, 30), C: sure(0, 30)}
    assert found(replace(fleet, counted_at=NOW - 3.0)) == found(fleet)
    old = replace(fleet, counted_at=NOW - 3.1)
    assert found(old) == found(replace(fleet, node_connections={}))
    # Fewer than the Envoys believe: some have ended, and have not been told of yet.
    assert found(ReportedSessions({"x": {A: 30}}, node_connections={A: 3, B: 0, C: 0}))[A] == sure(3, 1)


def test_sessions_of_a_silent_envoy_may_be_over_or_not() -> None:
    fleet = ReportedSessions({"x": {A: 60, B: 60}, "y": {A: 6, B: 3}}, stale_envoys=frozenset("y"))
    assert found(fleet) == {
        A: LoadStatus(60, 66, 40, 43),
        B: LoadStatus(60, 63, 40, 43),
        C: LoadStatus(0, 0, 40, 43),
    }
    # What the nodes count themselves leaves no doubt.
    assert found(replace(fleet, node_connections={A: 66, B: 60, C: 0})) == {
        A: sure(66, 42),
        B: sure(60, 42),
        C: sure(0, 42),
    }


def test_what_nobody_can_be_asked_to_move_is_so_with_and_without_a_silent_envoy() -> None:
    fleet = ReportedSessions(
        {"x": {B: 30}, "y": {A: 6}}, stale_envoys=frozenset("y"), stock_envoy_sessions={"z": {A: 80}}
    )
    assert found(fleet) == {A: LoadStatus(80, 86, 80, 86), B: sure(30, 15), C: sure(0, 15)}


@pytest.mark.parametrize(
    ("active_for", "factors", "expected"),
    [(1000.0, {}, 200.0), (15.0, {}, 110.0), (0.0, {}, 20.0), (1000.0, FACTORS, 80.0), (15.0, FACTORS, 44.0)],
)
def test_capacity_is_the_weight_less_what_slow_start_and_vital_signs_take(
    active_for: float, factors: Mapping[str, Factor], expected: float
) -> None:
    planned = node_plan(A, NOW - active_for, weight=200, factors=factors)
    assert effective_capacity(planned, replace(POLICY, slow_start=30.0), NOW) == pytest.approx(expected)
    kept = replace(planned, active_since=None)  # the floor keeps it in service
    assert effective_capacity(kept, replace(POLICY, slow_start=30.0), NOW) == pytest.approx(
        200.0 if not factors else 80.0
    )


def test_what_rounding_leaves_goes_where_least_has_to_move_for_it() -> None:
    assert integer_shares([1, 1, 1], [0, 0, 0], [0, 0, 10]) == [3, 3, 4]
    assert integer_shares([1, 1, 1], [0, 0, 0], [5, 6, 0]) == [4, 4, 3]
    assert integer_shares([3, 1, 0], [0, 0, 2], [0, 0, 7]) == [4, 1, 2]
    assert integer_shares([], [], []) == []


# --- whatever there is -------------------------------------------------------------------------------------

node_counts = st.tuples(
    st.floats(0.02, 1000) | st.integers(1, 10_000).map(float),
    st.integers(0, 100_000),  # fixed
    st.integers(0, 100_000),  # movable
)


@given(st.lists(node_counts, min_size=1, max_size=30), st.integers(0, 5))
def test_whole_shares_sum_up_and_are_within_one_of_the_exact_ones(
    counts: list[tuple[float, int, int]], idle: int
) -> None:
    capacities = [width for width, _, _ in counts] + [0.0] * idle
    fixed = [each for _, each, _ in counts] + [3] * idle
    has = [held + more for _, held, more in counts] + [5] * idle
    shares = integer_shares(capacities, fixed, has)
    assert sum(shares) == sum(has)
    assert all(share >= least for share, least in zip(shares, fixed, strict=True))
    assert shares[len(counts) :] == [3] * idle
    # The exact ones: a level that all have by their capacity, but those who hold more than that already.
    height = expected_water_level(capacities[: len(counts)], fixed[: len(counts)], sum(has) - sum(fixed))
    for share, width, least in zip(shares, capacities, fixed, strict=True):
        exact = max(float(least), height * width)
        assert abs(share - exact) < 1 + 1e-4


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=8), st.randoms())
def test_the_order_of_nodes_moves_no_share_by_more_than_rounding(
    counts: list[tuple[int, int]], chance: Random
) -> None:
    order = list(range(len(counts)))
    chance.shuffle(order)
    shares = integer_shares([float(w) for w, _ in counts], [0] * len(counts), [n for _, n in counts])
    turned = [counts[i] for i in order]
    again = integer_shares([float(w) for w, _ in turned], [0] * len(turned), [n for _, n in turned])
    for i, share in zip(order, again, strict=True):
        if share != shares[i]:  # of equal nodes, another one has what is left over
            assert (abs(share - shares[i]), counts.count(counts[i]) > 1) == (1, True)


@given(
    st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 90)),
    st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 90)),
    st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 200)),
)
def test_no_node_has_both_too_many_and_too_few(
    heard: dict[str, int], unheard: dict[str, int], own: dict[str, int]
) -> None:
    fleet = ReportedSessions({"x": heard, "y": unheard}, stale_envoys=frozenset("y"), node_connections=own)
    for standing in found(fleet).values():
        assert standing.min_sessions <= standing.max_sessions
        assert standing.surplus <= 0 or standing.deficit <= 0
