"""Migration batches: examples, and properties over arbitrary nodes, Envoys and sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.fair_share import LoadStatus
from controlplane.decide.balance.migration_batch import EnvoyTurn, MigrationBatch, plan_batch
from controlplane.model.facts import Facts
from controlplane.model.plan import NodePlan, Policy, RebalanceState
from controlplane.model.traffic import SessionCounts
from tests.support.controlplane.balance_inputs import (
    ADDRESSES,
    INSTANCE_X,
    INSTANCE_Y,
    NOW,
    POLICY,
    A,
    B,
    C,
    D,
    ReportedSessions,
    decide_rebalance,
    expected_water_level,
    node_plan,
    node_plans,
)

EXACT = replace(POLICY, rebalance_threshold=0.0)


def batch(
    sessions_and_shares: Mapping[str, tuple[int, int]],
    *sessions_by_envoy: Mapping[str, int],
    policy: Policy = EXACT,
    noise: float = 0.0,
    round_number: int = 0,
) -> MigrationBatch | None:
    """Plan a batch from each node's (sessions, share), and from the sessions per node of Envoys X and Y."""
    capable = [
        SessionCounts(NOW, NOW, sessions, instance=name)
        for name, sessions in zip((INSTANCE_X, INSTANCE_Y), sessions_by_envoy, strict=False)
    ]
    statuses = {a: LoadStatus(n, n, share, share) for a, (n, share) in sessions_and_shares.items()}
    return plan_batch("", statuses, dict.fromkeys(statuses, noise), capable, policy, EnvoyTurn(round_number))


def test_largest_deviations_come_first() -> None:
    result = batch({A: (30, 20), B: (90, 70), C: (3, 20), D: (57, 70)}, {A: 30, B: 90}, policy=_limit(12))
    assert result is not None
    assert result.outgoing == {A: {INSTANCE_X: 10}, B: {INSTANCE_X: 2}}
    assert result.incoming == {C: {INSTANCE_X: 12}}
    assert result.sessions == 12


def _limit(sessions: int) -> Policy:
    return replace(EXACT, rebalance_per_second=sessions / 5)


def test_envoys_share_a_batch_in_proportion() -> None:
    result = batch({A: (40, 20), B: (0, 15), C: (5, 10)}, {A: 30}, {A: 10, C: 5})
    assert result is not None
    assert result.outgoing == {A: {INSTANCE_X: 15, INSTANCE_Y: 5}}
    assert result.incoming == {B: {INSTANCE_X: 15}, C: {INSTANCE_Y: 5}}


def test_remainder_rotates_between_envoys() -> None:
    """The sessions of an Envoy may be immovable, so the next batch asks another Envoy."""
    batches = [batch({A: (6, 5), B: (4, 5)}, {A: 3}, {A: 3}, round_number=number) for number in range(4)]
    assert [b.outgoing for b in batches if b] == [{A: {INSTANCE_X: 1}}, {A: {INSTANCE_Y: 1}}] * 2
    assert [b.incoming for b in batches if b] == [{B: {INSTANCE_X: 1}}, {B: {INSTANCE_Y: 1}}] * 2


@pytest.mark.parametrize(
    ("sessions_and_shares", "sessions"),
    [
        ({A: (20, 20), B: (20, 20)}, {A: 20, B: 20}),  # all have their share
        ({A: (30, 20), B: (20, 20)}, {A: 30}),  # no node has a certain deficit
        ({A: (20, 20), B: (10, 20)}, {A: 20}),  # no node has a certain surplus
        ({A: (30, 20), B: (10, 20)}, {B: 10}),  # no capable Envoy has the surplus sessions
        ({}, {}),
    ],
)
def test_no_batch_without_possible_migrations(
    sessions_and_shares: Mapping[str, tuple[int, int]], sessions: Mapping[str, int]
) -> None:
    assert batch(sessions_and_shares, sessions) is None


def test_reason_names_the_node_with_largest_deviation() -> None:
    result = batch({A: (50, 20), B: (25, 20), C: (0, 35)}, {A: 50, B: 25})
    assert result is not None
    assert result.reason == f"{A} has 50 sessions and its share is 20, and 1 more node is off its share"
    result = batch({A: (22, 20), B: (22, 20), C: (16, 20)}, {A: 22, B: 22}, policy=POLICY, noise=1.9)
    assert result is not None
    assert result.reason == f"{B} has 22 sessions and its share is 20, and 1 more node is off its share"
    result = batch({A: (21, 20), B: (21, 20), C: (18, 20)}, {A: 21, B: 21}, policy=EXACT, noise=0.9)
    assert result is not None
    assert result.outgoing == {A: {INSTANCE_X: 1}, B: {INSTANCE_X: 1}}


# --- properties --------------------------------------------------------------------------------------------

KINDS = ("capable", "capable", "silent", "without_instance", "stock")
AGES = {0.0: 0.1, 10.0: 0.1 + 0.9 * 0.3, 40.0: 1.0, 500.0: 1.0}  # factor of slow start by seconds in service


@st.composite
def fleets(draw: st.DrawFn) -> tuple[dict[str, NodePlan], ReportedSessions, Policy]:
    """Draw nodes of any weight, age and location, Envoys of all kinds and sessions, and direct clients."""
    planned = node_plans(
        *(
            node_plan(
                address,
                NOW - draw(st.sampled_from(sorted(AGES))),
                draw(st.integers(1, 300)),
                group=draw(st.sampled_from(["", "", "g"])),
                zone=draw(st.sampled_from(["a", "b", ""])),
                backup=draw(st.integers(0, 3)) == 0,
            )
            for address in ADDRESSES[: draw(st.integers(1, 4))]
        )
    )
    sessions: dict[str, dict[str, int]] = {}
    stock: dict[str, dict[str, int]] = {}
    kinds = {f"e{i}": draw(st.sampled_from(KINDS)) for i in range(draw(st.integers(1, 4)))}
    for envoy, kind in kinds.items():
        drawn = {a: draw(st.integers(0, 200)) for a in planned}
        (stock if kind == "stock" else sessions)[envoy] = drawn
    total = {a: sum(counts[a] for counts in (*sessions.values(), *stock.values())) for a in planned}
    counted = draw(st.sampled_from([(), tuple(planned), tuple(planned)[:1]]))
    fleet = ReportedSessions(
        sessions,
        instances={e: f"{i:016x}" for i, e in enumerate(kinds) if kinds[e] != "without_instance"},
        stale_envoys=frozenset(e for e, kind in kinds.items() if kind == "silent"),
        stock_envoy_sessions=stock,
        node_connections={a: total[a] + draw(st.integers(0, 300)) for a in counted},
    )
    rate = draw(st.sampled_from([0.1, 1.0, 20.0, 9e9]))
    return planned, fleet, replace(POLICY, slow_start=30.0, rebalance_per_second=rate)


def total_for_envoy(counts: Mapping[str, Mapping[str, int]], instance: str) -> int:
    return sum(by_envoy.get(instance, 0) for by_envoy in counts.values())


@given(fleets())
def test_outgoing_equals_incoming_per_envoy(
    drawn: tuple[dict[str, NodePlan], ReportedSessions, Policy],
) -> None:
    planned, fleet, policy = drawn
    facts = fleet.facts(envoy_zones={"e0": "a"})
    result = decide_rebalance(facts, planned, policy=policy)
    capable = {
        c.instance: c for e, c in facts.session_counts.items() if c.instance and e not in fleet.stale_envoys
    }
    for counts in (result.outgoing, result.incoming):
        assert all(count >= 1 for by_envoy in counts.values() for count in by_envoy.values())
        assert all(by_envoy and by_envoy.keys() <= capable.keys() for by_envoy in counts.values())
    assert not result.outgoing.keys() & result.incoming.keys()
    for instance, counts_of_envoy in capable.items():
        assert total_for_envoy(result.outgoing, instance) == total_for_envoy(result.incoming, instance)
        for address, by_envoy in result.outgoing.items():
            assert by_envoy.get(instance, 0) <= counts_of_envoy.sessions.get(address, 0)
    assert result.round_ends_at - NOW <= 5.0
    assert (result.since is not None) == (sum(sum(n.values()) for n in result.outgoing.values()) >= 10)


@given(fleets())
def test_no_node_overshoots_its_share(
    drawn: tuple[dict[str, NodePlan], ReportedSessions, Policy],
) -> None:
    planned, fleet, policy = drawn
    facts = fleet.facts(envoy_zones={"idle": "a"})  # `idle` has no sessions to return
    result = decide_rebalance(facts, planned, policy=policy)
    for members in _expected_groups(planned, "a"):
        maxima = {a: _max_sessions(a, facts) for a in members}
        minima = {a: _min_sessions(a, facts, fleet) for a in members}
        max_shares, min_shares = (_shares(counts, planned, fleet) for counts in (maxima, minima))
        for address in members:
            given = sum(result.outgoing.get(address, {}).values())
            received = sum(result.incoming.get(address, {}).values())
            assert not given or minima[address] - given > max_shares[address] - 1
            assert not received or maxima[address] + received < min_shares[address] + 1
        giving_envoys = {i for a in members for i in result.outgoing.get(a, {})}
        receiving_envoys = {i for a in members for i in result.incoming.get(a, {})}
        assert giving_envoys == receiving_envoys  # sessions stay within their balancing group
        assert sum(sum(result.outgoing.get(a, {}).values()) for a in members) == sum(
            sum(result.incoming.get(a, {}).values()) for a in members
        )


def _expected_groups(planned: Mapping[str, NodePlan], home: str) -> list[list[str]]:
    """Return up to two lists per group: the nodes outside the zone `home`, then the nodes in it.

    If a group has primary nodes, its backup nodes are in its first list.
    """
    groups = []
    for group in {p.group for p in planned.values()}:
        members = {a: p for a, p in planned.items() if p.group == group}
        receiving = {a: p for a, p in members.items() if not p.backup} or members
        parts = [[a for a, p in receiving.items() if (p.zone == home) is inside] for inside in (False, True)]
        parts = [part for part in parts if part]
        parts[0] += members.keys() - receiving.keys()
        groups += parts
    return groups


def _max_sessions(address: str, facts: Facts) -> int:
    connections = facts.health[address].connections if address in facts.health else None
    return (
        connections
        if connections is not None
        else facts.sessions_by_address.get(address, 0) + facts.sessions_by_endpoint.get(address, 0)
    )


def _min_sessions(address: str, facts: Facts, fleet: ReportedSessions) -> int:
    """Return TiDB's count, or else the count without silent Envoys, because their sessions may have ended."""
    if address in facts.health:
        return _max_sessions(address, facts)
    return _max_sessions(address, facts) - sum(fleet.sessions[e].get(address, 0) for e in fleet.stale_envoys)


def _shares(
    counts: Mapping[str, int], planned: Mapping[str, NodePlan], fleet: ReportedSessions
) -> dict[str, float]:
    """Return the exact fair share of each node, not rounded to whole sessions."""
    capable = [
        sessions
        for e, sessions in fleet.sessions.items()
        if e in fleet.instances and e not in fleet.stale_envoys
    ]
    fixed = {a: max(0, n - sum(sessions.get(a, 0) for sessions in capable)) for a, n in counts.items()}
    has_primary = not all(planned[a].backup for a in counts)
    capacities = {
        a: planned[a].node.weight * AGES[NOW - (planned[a].active_since or 0.0)]
        for a in counts
        if not (planned[a].backup and has_primary)
    }
    level = expected_water_level(
        list(capacities.values()), [fixed[a] for a in capacities], sum(counts.values()) - sum(fixed.values())
    )
    return {a: max(float(fixed[a]), level * capacities.get(a, 0.0)) for a in counts}


@given(fleets(), st.floats(0, 3.99))
def test_no_batch_without_new_reports(
    drawn: tuple[dict[str, NodePlan], ReportedSessions, Policy], age: float
) -> None:
    """Modules and nodes have reported again, but their counts are older than the end of the round."""
    planned, fleet, policy = drawn
    before = RebalanceState(NOW - 100, "", 1, NOW + 0.01, surplus=9)  # the round's result is not reported yet
    facts = replace(fleet, oldest_count_at=NOW, counted_at=NOW).facts()
    assert not decide_rebalance(facts, planned, before, policy, NOW + 0.01 + age).outgoing


@given(fleets(), st.randoms())
def test_batch_is_independent_of_report_order(
    drawn: tuple[dict[str, NodePlan], ReportedSessions, Policy], rng: Random
) -> None:
    planned, fleet, policy = drawn
    facts = fleet.facts()
    mappings = {
        "session_counts": facts.session_counts,
        "loads": facts.loads,
        "sessions_by_address": facts.sessions_by_address,
        "health": facts.health,
    }
    shuffled = fleet.facts(**{name: _shuffled(mapping, rng) for name, mapping in mappings.items()})
    assert decide_rebalance(shuffled, planned, policy=policy) == decide_rebalance(
        facts, planned, policy=policy
    )


def _shuffled(mapping: Mapping[str, Any], rng: Random) -> dict[str, Any]:
    items = list(mapping.items())
    rng.shuffle(items)
    return dict(items)
