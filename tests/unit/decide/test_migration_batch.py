"""Who gives how many sessions to whom: as properties, over any nodes with any sessions of any Envoys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.fair_share import LoadStatus
from controlplane.decide.balance.migration_batch import MigrationBatch, plan_batch
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


def asked(
    standing: Mapping[str, tuple[int, int]],
    *there: Mapping[str, int],
    policy: Policy = EXACT,
    chance: float = 0.0,
    turn: int = 0,
) -> MigrationBatch | None:
    """`standing`: what each node has, and its share; `there`: what the Envoys X and Y have on each."""
    censuses = [
        SessionCounts(NOW, NOW, each, instance=name)
        for name, each in zip((INSTANCE_X, INSTANCE_Y), there, strict=False)
    ]
    numbers = {a: LoadStatus(has, has, share, share) for a, (has, share) in standing.items()}
    return plan_batch("", numbers, dict.fromkeys(numbers, chance), censuses, policy, turn)


def test_those_that_are_furthest_off_their_share_come_first() -> None:
    found = asked({A: (30, 20), B: (90, 70), C: (3, 20), D: (57, 70)}, {A: 30, B: 90}, policy=_limit(12))
    assert found is not None
    assert found.outgoing == {A: {INSTANCE_X: 10}, B: {INSTANCE_X: 2}}
    assert found.incoming == {C: {INSTANCE_X: 12}}
    assert found.sessions == 12


def _limit(sessions: int) -> Policy:
    return replace(EXACT, rebalance_per_second=sessions / 5)


def test_each_envoy_gives_in_proportion_to_what_it_has_and_gets_as_many_as_it_gives() -> None:
    found = asked({A: (40, 20), B: (0, 15), C: (5, 10)}, {A: 30}, {A: 10, C: 5})
    assert found is not None
    assert found.outgoing == {A: {INSTANCE_X: 15, INSTANCE_Y: 5}}
    assert found.incoming == {B: {INSTANCE_X: 15}, C: {INSTANCE_Y: 5}}


def test_who_is_asked_for_the_last_session_changes_with_each_turn() -> None:
    """It may be one that cannot move, in an Envoy that has no other there."""
    found = [asked({A: (6, 5), B: (4, 5)}, {A: 3}, {A: 3}, turn=turn) for turn in range(4)]
    assert [each.outgoing for each in found if each] == [{A: {INSTANCE_X: 1}}, {A: {INSTANCE_Y: 1}}] * 2
    assert [each.incoming for each in found if each] == [{B: {INSTANCE_X: 1}}, {B: {INSTANCE_Y: 1}}] * 2


@pytest.mark.parametrize(
    ("standing", "there"),
    [
        ({A: (20, 20), B: (20, 20)}, {A: 20, B: 20}),  # all have their share
        ({A: (30, 20), B: (20, 20)}, {A: 30}),  # nobody surely lacks any
        ({A: (20, 20), B: (10, 20)}, {A: 20}),  # nobody surely has too many
        ({A: (30, 20), B: (10, 20)}, {B: 10}),  # what is too much is not with those who can be asked
        ({}, {}),
    ],
)
def test_nothing_is_asked_for_where_nothing_can_come_of_it(
    standing: Mapping[str, tuple[int, int]], there: Mapping[str, int]
) -> None:
    assert asked(standing, there) is None


def test_the_reason_names_the_node_that_is_furthest_off() -> None:
    found = asked({A: (50, 20), B: (25, 20), C: (0, 35)}, {A: 50, B: 25})
    assert found is not None
    assert found.reason == f"{A} has 50 sessions and its share is 20, and 1 more node is off theirs"
    found = asked({A: (22, 20), B: (22, 20), C: (16, 20)}, {A: 22, B: 22}, policy=POLICY, chance=1.9)
    assert found is not None
    assert found.reason == f"{B} has 22 sessions and its share is 20, and 1 more node is off theirs"
    found = asked({A: (21, 20), B: (21, 20), C: (18, 20)}, {A: 21, B: 21}, policy=EXACT, chance=0.9)
    assert found is not None
    assert found.outgoing == {A: {INSTANCE_X: 1}, B: {INSTANCE_X: 1}}


# --- whatever there is -------------------------------------------------------------------------------------

KINDS = ("good", "good", "silent", "older", "plain")
AGES = {0.0: 0.1, 10.0: 0.1 + 0.9 * 0.3, 40.0: 1.0, 500.0: 1.0}  # and what slow start leaves


@st.composite
def fleets(draw: st.DrawFn) -> tuple[dict[str, NodePlan], ReportedSessions, Policy]:
    """Nodes of any weight, age and place, Envoys of all kinds with any sessions, and direct clients."""
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
    plain: dict[str, dict[str, int]] = {}
    kinds = {f"e{i}": draw(st.sampled_from(KINDS)) for i in range(draw(st.integers(1, 4)))}
    for envoy, kind in kinds.items():
        there = {a: draw(st.integers(0, 200)) for a in planned}
        (plain if kind == "plain" else sessions)[envoy] = there
    held = {a: sum(each[a] for each in (*sessions.values(), *plain.values())) for a in planned}
    counted = draw(st.sampled_from([(), tuple(planned), tuple(planned)[:1]]))
    fleet = ReportedSessions(
        sessions,
        instances={e: f"{i:016x}" for i, e in enumerate(kinds) if kinds[e] != "older"},
        stale_envoys=frozenset(e for e, kind in kinds.items() if kind == "silent"),
        stock_envoy_sessions=plain,
        node_connections={a: held[a] + draw(st.integers(0, 300)) for a in counted},
    )
    speed = draw(st.sampled_from([0.1, 1.0, 20.0, 9e9]))
    return planned, fleet, replace(POLICY, slow_start=30.0, rebalance_per_second=speed)


def of_all(counts: Mapping[str, Mapping[str, int]], instance: str) -> int:
    """What is asked of one Envoy, or wanted through it."""
    return sum(each.get(instance, 0) for each in counts.values())


@given(fleets())
def test_each_envoy_gets_as_many_as_it_gives_and_nobody_gives_what_it_has_not(
    drawn: tuple[dict[str, NodePlan], ReportedSessions, Policy],
) -> None:
    planned, fleet, policy = drawn
    facts = fleet.facts(envoy_zones={"e0": "a"})
    found = decide_rebalance(facts, planned, policy=policy)
    able = {
        c.instance: c for e, c in facts.session_counts.items() if c.instance and e not in fleet.stale_envoys
    }
    for counts in (found.outgoing, found.incoming):
        assert all(count >= 1 for each in counts.values() for count in each.values())
        assert all(each and each.keys() <= able.keys() for each in counts.values())
    assert not found.outgoing.keys() & found.incoming.keys()
    for instance, census in able.items():
        assert of_all(found.outgoing, instance) == of_all(found.incoming, instance)
        for address, asks in found.outgoing.items():
            assert asks.get(instance, 0) <= census.sessions.get(address, 0)
    assert found.round_ends_at - NOW <= 5.0
    assert (found.since is not None) == (sum(sum(each.values()) for each in found.outgoing.values()) >= 10)


@given(fleets())
def test_no_node_comes_below_its_share_by_what_it_gives_nor_above_it_by_what_it_gets(
    drawn: tuple[dict[str, NodePlan], ReportedSessions, Policy],
) -> None:
    planned, fleet, policy = drawn
    facts = fleet.facts(envoy_zones={"idle": "a"})  # it has no sessions that it would want back
    found = decide_rebalance(facts, planned, policy=policy)
    for members in _quarters(planned, "a"):
        most = {a: _most(a, facts) for a in members}
        least = {a: _least(a, facts, fleet) for a in members}
        most_shares, least_shares = (_shares(has, planned, fleet) for has in (most, least))
        for address in members:
            moved = sum(found.outgoing.get(address, {}).values())
            got = sum(found.incoming.get(address, {}).values())
            assert not moved or least[address] - moved > most_shares[address] - 1
            assert not got or most[address] + got < least_shares[address] + 1
        gives = {i for a in members for i in found.outgoing.get(a, {})}
        gets = {i for a in members for i in found.incoming.get(a, {})}
        assert gives == gets  # what leaves a quarter's nodes goes to its nodes
        assert sum(sum(found.outgoing.get(a, {}).values()) for a in members) == sum(
            sum(found.incoming.get(a, {}).values()) for a in members
        )


def _quarters(planned: Mapping[str, NodePlan], home: str) -> list[list[str]]:
    """Nodes that share their sessions: those in the zone that has an Envoy, and all others, of each group.

    Nodes that stand in belong to the first of their group while it has others.
    """
    found = []
    for group in {p.group for p in planned.values()}:
        members = {a: p for a, p in planned.items() if p.group == group}
        taking = {a: p for a, p in members.items() if not p.backup} or members
        parts = [[a for a, p in taking.items() if (p.zone == home) is inside] for inside in (False, True)]
        parts = [part for part in parts if part]
        parts[0] += members.keys() - taking.keys()
        found += parts
    return found


def _most(address: str, facts: Facts) -> int:
    own = facts.health[address].connections if address in facts.health else None
    return (
        own
        if own is not None
        else facts.sessions_by_address.get(address, 0) + facts.sessions_by_endpoint.get(address, 0)
    )


def _least(address: str, facts: Facts, fleet: ReportedSessions) -> int:
    """Without those of Envoys that fell silent, which may be over."""
    if address in facts.health:
        return _most(address, facts)
    return _most(address, facts) - sum(fleet.sessions[e].get(address, 0) for e in fleet.stale_envoys)


def _shares(
    has: Mapping[str, int], planned: Mapping[str, NodePlan], fleet: ReportedSessions
) -> dict[str, float]:
    """Of what these nodes have, what each would have if sessions could be divided."""
    able = [
        there for e, there in fleet.sessions.items() if e in fleet.instances and e not in fleet.stale_envoys
    ]
    fixed = {a: max(0, count - sum(there.get(a, 0) for there in able)) for a, count in has.items()}
    is_idle = not all(planned[a].backup for a in has)
    widths = {
        a: planned[a].node.weight * AGES[NOW - (planned[a].active_since or 0.0)]
        for a in has
        if not (planned[a].backup and is_idle)
    }
    height = expected_water_level(
        list(widths.values()), [fixed[a] for a in widths], sum(has.values()) - sum(fixed.values())
    )
    return {a: max(float(fixed[a]), height * widths.get(a, 0.0)) for a in has}


@given(fleets(), st.floats(0, 3.99))
def test_without_new_reports_nothing_is_asked_for(
    drawn: tuple[dict[str, NodePlan], ReportedSessions, Policy], age: float
) -> None:
    """Modules tell again, but of sessions as they were; and so do nodes."""
    planned, fleet, policy = drawn
    before = RebalanceState(NOW - 100, "", 1, NOW + 0.01, surplus=9)  # a round of which nobody has told yet
    told = replace(fleet, counting_since=NOW, counted_at=NOW).facts()
    assert not decide_rebalance(told, planned, before, policy, NOW + 0.01 + age).outgoing


@given(fleets(), st.randoms())
def test_the_order_in_which_anything_is_told_does_not_matter(
    drawn: tuple[dict[str, NodePlan], ReportedSessions, Policy], chance: Random
) -> None:
    planned, fleet, policy = drawn
    facts = fleet.facts()
    told = {
        "session_counts": facts.session_counts,
        "loads": facts.loads,
        "sessions_by_address": facts.sessions_by_address,
        "health": facts.health,
    }
    turned = fleet.facts(**{name: _turned(each, chance) for name, each in told.items()})
    assert decide_rebalance(turned, planned, policy=policy) == decide_rebalance(facts, planned, policy=policy)


def _turned(mapping: Mapping[str, Any], chance: Random) -> dict[str, Any]:
    items = list(mapping.items())
    chance.shuffle(items)
    return dict(items)
