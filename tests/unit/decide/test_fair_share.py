"""Fair shares and load statuses: sums, limits, and uncertain counts."""

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
from controlplane.decide.inputs import Inputs
from controlplane.model.plan import Factor, Plan
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

EQUAL_CAPACITIES = {A: 100.0, B: 100.0, C: 100.0}
FACTORS = {"health": Factor(0.5, 0.02, 1, ""), "cpu": Factor(0.8, 1.0, 0, "")}


def statuses(fleet: ReportedSessions, capacities: Mapping[str, float] | None = None) -> dict[str, LoadStatus]:
    """Return the load statuses. Modules that are silent or have no instance id cannot migrate sessions."""
    facts = fleet.facts()
    incapable = [c for e, c in facts.session_counts.items() if e in fleet.stale_envoys or not c.instance]
    return load_statuses(
        NODES_WITH_NEW_NODE,
        EQUAL_CAPACITIES if capacities is None else capacities,
        incapable,
        Inputs(Plan(), facts, POLICY, NOW),
    )


def certain(sessions: int, share: int) -> LoadStatus:
    return LoadStatus(sessions, sessions, share, share)


def test_shares_are_proportional_to_capacity() -> None:
    fleet = ReportedSessions({"x": {A: 30, B: 20}, "y": {A: 10}})
    assert statuses(fleet) == {A: certain(40, 20), B: certain(20, 20), C: certain(0, 20)}
    uneven = statuses(fleet, {A: 100.0, B: 150.0, C: 50.0})
    assert uneven == {A: certain(40, 20), B: certain(20, 30), C: certain(0, 10)}
    assert (uneven[A].surplus, uneven[B].surplus, uneven[B].deficit, uneven[C].deficit) == (20, -10, 10, 10)


def test_nodes_outside_the_group_do_not_count() -> None:
    fleet = ReportedSessions({"x": {A: 30, B: 20, C: 900}})
    assert statuses(fleet, {A: 1.0, B: 1.0}) == {A: certain(30, 25), B: certain(20, 25)}


def test_node_of_capacity_zero_has_no_share() -> None:
    assert statuses(ReportedSessions({"x": {A: 30, B: 20, C: 10}}), {A: 1.0, B: 1.0, C: 0.0}) == {
        A: certain(30, 30),
        B: certain(20, 30),
        C: certain(10, 0),
    }


@pytest.mark.parametrize(
    "fleet",
    [
        ReportedSessions({"x": {A: 6}}, node_connections={A: 86, B: 0, C: 0}),
        ReportedSessions({"x": {A: 6}}, stock_envoy_sessions={"z": {A: 80}}),
        ReportedSessions({"x": {A: 6}, "y": {A: 80}}, instances={"x": INSTANCE_X}),
    ],
)
def test_share_is_at_least_the_immovable_sessions(fleet: ReportedSessions) -> None:
    """Sessions of direct clients, of Envoys without a module and of older modules cannot migrate."""
    assert statuses(fleet) == {A: certain(86, 80), B: certain(0, 3), C: certain(0, 3)}


def test_fresh_tidb_count_takes_precedence() -> None:
    fleet = ReportedSessions({"x": {A: 30, B: 30}}, node_connections={A: 60})
    assert statuses(fleet) == {A: certain(60, 30), B: certain(30, 30), C: certain(0, 30)}
    assert statuses(replace(fleet, counted_at=NOW - 3.0)) == statuses(fleet)
    old = replace(fleet, counted_at=NOW - 3.1)
    assert statuses(old) == statuses(replace(fleet, node_connections={}))
    # TiDB counts fewer sessions than the Envoys report: some have ended since the reports.
    assert statuses(ReportedSessions({"x": {A: 30}}, node_connections={A: 3, B: 0, C: 0}))[A] == certain(3, 1)


def test_sessions_opened_after_tidb_counted_are_included() -> None:
    """Servers count at different times, so that one count may include a burst of new sessions and one not."""
    fleet = ReportedSessions(
        {"x": {A: 30, B: 30}, "y": {B: 9}},
        oldest_count_at=NOW,
        stale_envoys=frozenset("y"),
        node_connections={A: 40, B: 0, C: 0},
        counted_at=NOW - 1.1,
    )
    assert statuses(fleet) == {A: certain(40, 24), B: certain(30, 23), C: certain(0, 23)}
    # Reports from the same time may be the older ones.
    assert statuses(replace(fleet, counted_at=NOW - 0.9))[B] == certain(0, 13)
    # The same with an Envoy that sends only load reports.
    late = replace(fleet, stock_envoy_sessions={"z": {}}, reported_at=NOW - 1.2)
    assert statuses(late)[B] == certain(0, 13)


def test_silent_envoy_makes_counts_uncertain() -> None:
    fleet = ReportedSessions({"x": {A: 60, B: 60}, "y": {A: 6, B: 3}}, stale_envoys=frozenset("y"))
    assert statuses(fleet) == {
        A: LoadStatus(60, 66, 40, 43),
        B: LoadStatus(60, 63, 40, 43),
        C: LoadStatus(0, 0, 40, 43),
    }
    # TiDB's own counts are exact.
    assert statuses(replace(fleet, node_connections={A: 66, B: 60, C: 0})) == {
        A: certain(66, 42),
        B: certain(60, 42),
        C: certain(0, 42),
    }


def test_immovable_sessions_bound_both_shares() -> None:
    fleet = ReportedSessions(
        {"x": {B: 30}, "y": {A: 6}}, stale_envoys=frozenset("y"), stock_envoy_sessions={"z": {A: 80}}
    )
    assert statuses(fleet) == {A: LoadStatus(80, 86, 80, 86), B: certain(30, 15), C: certain(0, 15)}


@pytest.mark.parametrize(
    ("active_for", "factors", "expected"),
    [(1000.0, {}, 200.0), (15.0, {}, 110.0), (0.0, {}, 20.0), (1000.0, FACTORS, 80.0), (15.0, FACTORS, 44.0)],
)
def test_effective_capacity_applies_slow_start_and_factors(
    active_for: float, factors: Mapping[str, Factor], expected: float
) -> None:
    planned = node_plan(A, NOW - active_for, weight=200, factors=factors)
    assert effective_capacity(planned, replace(POLICY, slow_start=30.0), NOW) == pytest.approx(expected)
    unhealthy = replace(planned, active_since=None)  # the panic threshold keeps it in service
    assert effective_capacity(unhealthy, replace(POLICY, slow_start=30.0), NOW) == pytest.approx(
        200.0 if not factors else 80.0
    )


def test_rounding_minimizes_migrations() -> None:
    assert integer_shares([1, 1, 1], [0, 0, 0], [0, 0, 10]) == [3, 3, 4]
    assert integer_shares([1, 1, 1], [0, 0, 0], [5, 6, 0]) == [4, 4, 3]
    assert integer_shares([3, 1, 0], [0, 0, 2], [0, 0, 7]) == [4, 1, 2]
    assert integer_shares([], [], []) == []


# --- properties --------------------------------------------------------------------------------------------

node_counts = st.tuples(
    st.floats(0.02, 1000) | st.integers(1, 10_000).map(float),
    st.integers(0, 100_000),  # immovable
    st.integers(0, 100_000),  # movable
)


@given(st.lists(node_counts, min_size=1, max_size=30), st.integers(0, 5))
def test_integer_shares_are_within_one_of_exact_shares(
    counts: list[tuple[float, int, int]], idle: int
) -> None:
    capacities = [width for width, _, _ in counts] + [0.0] * idle
    immovable = [count for _, count, _ in counts] + [3] * idle
    current = [count + movable for _, count, movable in counts] + [5] * idle
    shares = integer_shares(capacities, immovable, current)
    assert sum(shares) == sum(current)
    assert all(share >= minimum for share, minimum in zip(shares, immovable, strict=True))
    assert shares[len(counts) :] == [3] * idle
    # An exact share is a common level times the capacity, but at least the number of immovable sessions.
    level = expected_water_level(
        capacities[: len(counts)], immovable[: len(counts)], sum(current) - sum(immovable)
    )
    for share, capacity, minimum in zip(shares, capacities, immovable, strict=True):
        exact = max(float(minimum), level * capacity)
        assert abs(share - exact) < 1 + 1e-4


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=8), st.randoms())
def test_node_order_changes_shares_by_rounding_only(counts: list[tuple[int, int]], rng: Random) -> None:
    order = list(range(len(counts)))
    rng.shuffle(order)
    shares = integer_shares([float(w) for w, _ in counts], [0] * len(counts), [n for _, n in counts])
    shuffled = [counts[i] for i in order]
    again = integer_shares([float(w) for w, _ in shuffled], [0] * len(shuffled), [n for _, n in shuffled])
    for i, share in zip(order, again, strict=True):
        if share != shares[i]:  # another of several equal nodes got the remainder
            assert (abs(share - shares[i]), counts.count(counts[i]) > 1) == (1, True)


@given(
    st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 90)),
    st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 90)),
    st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 200)),
)
def test_no_node_has_both_surplus_and_deficit(
    reported: dict[str, int], stale: dict[str, int], connections: dict[str, int]
) -> None:
    fleet = ReportedSessions(
        {"x": reported, "y": stale}, stale_envoys=frozenset("y"), node_connections=connections
    )
    for status in statuses(fleet).values():
        assert status.min_sessions <= status.max_sessions
        assert status.surplus <= 0 or status.deficit <= 0
