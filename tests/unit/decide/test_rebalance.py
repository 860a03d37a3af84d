"""Sessions asked to move to nodes that have fewer than their share: how many, whence, where, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.decide.balance.rebalance import rebalance
from controlplane.model.nodes import EMPTY_MAP, State
from controlplane.model.plan import Factor, Plan, RebalanceState
from tests.support.controlplane.balance_inputs import (
    DEFAULT_SESSIONS,
    INSTANCE_X,
    INSTANCE_Y,
    LONG_AGO,
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

ALIKE = node_plans(node_plan(A), node_plan(B), node_plan(C))
ENDED = "all nodes have about their share, or what they have beyond it cannot move"


def one(a: int, b: int, c: int) -> ReportedSessions:
    """A single Envoy with so many sessions on the three nodes."""
    return ReportedSessions({"x": {A: a, B: b, C: c}})


def test_nodes_above_their_share_give_to_those_below_through_the_envoys_that_have_the_sessions() -> None:
    found = decide_rebalance(DEFAULT_SESSIONS.facts())
    assert found.outgoing == {A: {INSTANCE_X: 10, INSTANCE_Y: 5}, B: {INSTANCE_X: 10, INSTANCE_Y: 5}}
    assert found.incoming == {C: {INSTANCE_X: 20, INSTANCE_Y: 10}}
    assert (found.since, found.round, found.round_ends_at) == (NOW, int(NOW), NOW + 1.0)
    assert found.reason == f"{B} has 45 sessions and its share is 30, and 1 more node is off theirs"


def test_any_node_gives_and_any_gets_however_long_it_has_been_there() -> None:
    found = decide_rebalance(one(60, 45, 0).facts(), ALIKE)
    assert (outgoing_by_node(found), incoming_by_node(found)) == ({A: 25, B: 10}, {C: 35})
    found = decide_rebalance(one(90, 6, 9).facts(), ALIKE)
    assert (outgoing_by_node(found), incoming_by_node(found)) == ({A: 55}, {B: 29, C: 26})


def test_only_what_is_above_the_share_is_given() -> None:
    assert decide_rebalance(one(100, 20, 0).facts()).outgoing == {A: {INSTANCE_X: 60}}


def test_shares_go_by_weight_by_slow_start_and_by_vital_signs() -> None:
    heavy = node_plans(node_plan(A), node_plan(B), node_plan(C, NOW, weight=300))
    assert incoming_by_node(decide_rebalance(DEFAULT_SESSIONS.facts(), heavy)) == {C: 54}
    slow = replace(POLICY, slow_start=30.0)
    for active_for, share in ((0.0, 4), (15.0, 20), (29.9, 28), (30.0, 30)):
        joined = node_plans(node_plan(A), node_plan(B), node_plan(C, NOW - active_for))
        assert incoming_by_node(decide_rebalance(DEFAULT_SESSIONS.facts(), joined, policy=slow)) == {C: share}
    sick = node_plans(node_plan(A, factors={"cpu": Factor(0.5, 0.5, 1, "")}), node_plan(B), node_plan(C))
    found = decide_rebalance(one(40, 40, 40).facts(), sick)
    assert (outgoing_by_node(found), incoming_by_node(found)) == ({A: 16}, {B: 8, C: 8})


@pytest.mark.parametrize(
    ("counts", "moved"),
    [
        ((105, 103, 92), {}),  # 5 of 100 too many, and 8 too few
        ((105, 105, 90), {}),  # a node may lack 10 of 100
        ((106, 97, 97), {A: 6}),
        ((106, 105, 89), {A: 6, B: 5}),  # those that have less than that too many give as well
    ],
)
def test_a_few_more_or_less_than_the_share_are_no_reason(
    counts: tuple[int, int, int], moved: dict[str, int]
) -> None:
    assert outgoing_by_node(decide_rebalance(one(*counts).facts(), ALIKE)) == moved


def test_the_threshold_is_the_operators() -> None:
    exact = replace(POLICY, rebalance_threshold=0.0)
    assert outgoing_by_node(decide_rebalance(one(101, 100, 99).facts(), ALIKE, policy=exact)) == {A: 1}
    lax = replace(POLICY, rebalance_threshold=1.0)
    assert outgoing_by_node(decide_rebalance(one(200, 60, 40).facts(), ALIKE, policy=lax)) == {}
    assert outgoing_by_node(decide_rebalance(one(201, 60, 39).facts(), ALIKE, policy=lax)) == {A: 101}


def test_what_chance_explains_is_no_reason_either() -> None:
    """In 3 s 150 sessions open on three nodes, and as many end: a standard deviation of 10 on each."""
    exact = replace(POLICY, rebalance_threshold=0.0)

    def first(arrivals: float) -> int:
        """By how many sessions one node has to be above its share before any move."""
        found = (
            decide_rebalance(
                one(1000 + n, 1000, 1000 - n).facts(new_sessions_per_second=arrivals), ALIKE, policy=exact
            )
            for n in range(200)
        )
        return next(n for n, each in enumerate(found) if each.outgoing)

    assert first(0.0) == 1
    assert 10 < first(50.0) <= 30
    # Four times as many sessions vary twice as much.
    assert first(200.0) == pytest.approx(2 * first(50.0), abs=1)


def test_a_round_has_a_limit_for_the_whole_fleet_and_lasts_the_longer_the_more_it_asks_for() -> None:
    many = ReportedSessions({"x": {A: 3000, B: 3000}, "y": {A: 1500, B: 1500}})
    found = decide_rebalance(many.facts(), policy=replace(POLICY, rebalance_per_second=20.0))
    assert (sum(outgoing_by_node(found).values()), incoming_by_node(found), found.round_ends_at) == (
        100,
        {C: 100},
        NOW + 5.0,
    )
    for speed, seconds in ((1.0, 5.0), (10.0, 3.0), (9e9, 1.0)):
        limited = replace(POLICY, rebalance_per_second=speed)
        assert decide_rebalance(DEFAULT_SESSIONS.facts(), policy=limited).round_ends_at == NOW + seconds
    assert outgoing_by_node(
        decide_rebalance(DEFAULT_SESSIONS.facts(), policy=replace(POLICY, rebalance_per_second=0.01))
    ) in (
        {A: 1},
        {B: 1},
    )


def test_the_limit_is_that_of_all_groups_together() -> None:
    apart = node_plans(
        node_plan(A, group="one"),
        node_plan(B, group="one"),
        node_plan(C, group="two"),
        node_plan("d:1", group="two"),
    )
    known = ReportedSessions({"x": {A: 100, C: 100}}, complete_nodes=frozenset(apart)).facts()
    found = decide_rebalance(known, apart, policy=replace(POLICY, rebalance_per_second=2.0))
    assert 0 < sum(outgoing_by_node(found).values()) <= 10


def test_nodes_of_different_groups_have_nothing_to_give_each_other() -> None:
    apart = node_plans(node_plan(A, group="one"), node_plan(B, group="two"), node_plan(C, group="two"))
    found = decide_rebalance(one(90, 20, 10).facts(), apart, policy=replace(POLICY, rebalance_threshold=0.0))
    assert (outgoing_by_node(found), incoming_by_node(found)) == ({B: 5}, {C: 5})
    assert outgoing_by_node(decide_rebalance(one(90, 0, 0).facts(), apart)) == {}


def test_groups_go_together_and_zones_take_turns() -> None:
    """Within an Envoy a session of one zone might take the place that another zone's node has left."""
    four = node_plans(*(node_plan(f"{i}:1") for i in range(4)))
    known = ReportedSessions({"x": {"0:1": 40, "2:1": 60}}, complete_nodes=frozenset(four)).facts(
        envoy_zones={"x": "a", "y": "b"}
    )
    groups = {a: replace(p, group="ab"[i // 2]) for i, (a, p) in enumerate(four.items())}
    assert outgoing_by_node(decide_rebalance(known, groups)) == {"0:1": 20, "2:1": 30}
    zones = {a: replace(p, zone="ab"[i // 2]) for i, (a, p) in enumerate(four.items())}
    first = decide_rebalance(known, zones)
    assert (outgoing_by_node(first), incoming_by_node(first)) == ({"2:1": 30}, {"3:1": 30})
    later = ReportedSessions(
        {"x": {"0:1": 40, "2:1": 30, "3:1": 30}},
        reported_at=NOW + 9,
        counting_since=NOW + 7,
        complete_nodes=frozenset(four),
    )
    ended = replace(first, outgoing=EMPTY_MAP, incoming=EMPTY_MAP)
    second = decide_rebalance(later.facts(envoy_zones={"x": "a", "y": "b"}), zones, ended, now=NOW + 9)
    assert (outgoing_by_node(second), incoming_by_node(second)) == ({"0:1": 20}, {"1:1": 20})


@pytest.mark.parametrize("apart", ["zone", "group"])
def test_sessions_that_do_not_move_keep_no_others_from_their_turn(apart: str) -> None:
    """Neither in a zone of the same group nor in another group, however slow all together have to be."""
    four = node_plans(*(node_plan(f"{i}:1", **{apart: "ab"[i // 2]}) for i in range(4)))  # type: ignore[arg-type]
    stuck = ReportedSessions({"x": {"0:1": 40, "2:1": 60}}, complete_nodes=frozenset(four))
    slow = replace(POLICY, rebalance_per_second=2.0)
    found, asked = RebalanceState(), set[str]()
    for second in range(200):
        now = NOW + second
        known = replace(stuck, reported_at=now, counting_since=now).facts(envoy_zones={"x": "a", "y": "b"})
        found = decide_rebalance(known, four, found, slow, now)
        asked |= found.outgoing.keys()
    assert asked == {"0:1", "2:1"}


def test_nodes_that_stood_in_give_all_that_they_have_when_others_serve_again() -> None:
    spare = node_plans(node_plan(A), node_plan(B), node_plan(C, backup=True))
    found = decide_rebalance(one(10, 10, 10).facts(), spare)
    assert (outgoing_by_node(found), incoming_by_node(found)) == ({C: 10}, {A: 5, B: 5})
    # No session opens there any more, so chance explains none.
    assert outgoing_by_node(
        decide_rebalance(one(10, 10, 10).facts(new_sessions_per_second=100.0), spare)
    ) == {C: 10}
    alone = node_plans(node_plan(A, state=State.DRAINING), node_plan(C, backup=True))
    assert outgoing_by_node(decide_rebalance(one(10, 0, 10).facts(), alone)) == {}


def test_connections_that_no_envoy_has_count_but_are_asked_of_nobody() -> None:
    beside = replace(DEFAULT_SESSIONS, node_connections={A: 75, B: 45, C: 0})  # 30 are of direct clients
    found = decide_rebalance(beside.facts())
    assert (outgoing_by_node(found), incoming_by_node(found)) == ({A: 35, B: 5}, {C: 40})
    full = replace(DEFAULT_SESSIONS, node_connections={A: 145, B: 45, C: 0})
    assert (
        outgoing_by_node(decide_rebalance(full.facts())),
        incoming_by_node(decide_rebalance(full.facts())),
    ) == ({A: 45}, {C: 45})
    old = replace(beside, counted_at=NOW - 3.1)
    assert decide_rebalance(old.facts()) == decide_rebalance(DEFAULT_SESSIONS.facts())


def test_an_envoy_that_has_not_told_all_is_waited_for() -> None:
    assert (
        decide_rebalance(replace(DEFAULT_SESSIONS, complete_nodes=frozenset((A, B))).facts())
        == RebalanceState()
    )


def test_an_envoy_that_fell_silent_neither_gives_nor_makes_others_give_more() -> None:
    # 60 sessions are sure, and there may be 90: no node may come below a third of those.
    assert (
        decide_rebalance(replace(DEFAULT_SESSIONS, stale_envoys=frozenset("y")).facts()) == RebalanceState()
    )
    surely = ReportedSessions({"x": {A: 60, B: 60}, "y": {A: 3, B: 3}}, stale_envoys=frozenset("y"))
    assert decide_rebalance(surely.facts()).outgoing == {A: {INSTANCE_X: 18}, B: {INSTANCE_X: 18}}
    nobody = replace(DEFAULT_SESSIONS, stale_envoys=frozenset("xy"))
    assert decide_rebalance(nobody.facts()) == RebalanceState()
    # What the nodes count themselves leaves no doubt.
    counted = replace(DEFAULT_SESSIONS, stale_envoys=frozenset("y"), node_connections={A: 45, B: 45, C: 0})
    assert decide_rebalance(counted.facts()).outgoing == {A: {INSTANCE_X: 15}, B: {INSTANCE_X: 15}}


def test_who_does_not_say_which_process_it_is_or_has_no_module_is_not_asked() -> None:
    older = replace(DEFAULT_SESSIONS, instances={"x": INSTANCE_X}).facts()
    assert decide_rebalance(older).outgoing == {A: {INSTANCE_X: 15}, B: {INSTANCE_X: 15}}
    few = ReportedSessions({"x": {A: 4, B: 2}, "y": {A: 41, B: 43}}, instances={"x": INSTANCE_X}).facts()
    assert decide_rebalance(few).outgoing == {A: {INSTANCE_X: 4}, B: {INSTANCE_X: 2}}
    mixed = ReportedSessions({"x": {A: 4, B: 2}}, stock_envoy_sessions={"z": {A: 41, B: 43}}).facts()
    assert decide_rebalance(mixed).outgoing == {A: {INSTANCE_X: 4}, B: {INSTANCE_X: 2}}
    known = DEFAULT_SESSIONS.facts()
    unused = replace(known.session_counts["x"], has_served=False)
    assert decide_rebalance(replace(known, session_counts={"x": unused})) == RebalanceState()


def test_nothing_is_asked_for_while_the_fleet_comes_back() -> None:
    assert decide_rebalance(DEFAULT_SESSIONS.facts(observing_since=NOW - 14.9)) == RebalanceState()
    assert decide_rebalance(DEFAULT_SESSIONS.facts(observing_since=NOW - 15.0)).outgoing


def test_a_round_is_withdrawn_when_what_it_rests_on_is_gone() -> None:
    first = decide_rebalance(DEFAULT_SESSIONS.facts())
    soon = NOW + 0.5
    off = decide_rebalance(
        DEFAULT_SESSIONS.facts(), before=first, policy=replace(POLICY, rebalance_enabled=False), now=soon
    )
    assert (off.since, off.outgoing, off.incoming, off.round_ends_at) == (None, {}, {}, soon)
    assert off.reason == "it was switched off"
    held = decide_rebalance(
        DEFAULT_SESSIONS.facts(), before=first, panic_threshold_reason="only 1 of 9 passes", now=soon
    )
    assert (held.since, held.outgoing, held.reason) == (None, {}, "the checks of nodes are not trusted")
    less = replace(first, outgoing={}, incoming={}, round_ends_at=soon)
    for changed in (
        node_plans(node_plan(A), node_plan(B, state=State.DRAINING), node_plan(C, NOW)),
        node_plans(node_plan(A), node_plan(B, weight=200), node_plan(C, NOW)),
        node_plans(node_plan(A), node_plan(B)),
        {**NODES_WITH_NEW_NODE, **node_plans(node_plan("d:1", NOW))},
    ):
        past = Plan(NODES_WITH_NEW_NODE, "", first)
        assert rebalance(changed, frozenset(), "", past, DEFAULT_SESSIONS.facts(), POLICY, soon) == less
    again = node_plans(node_plan(A), node_plan(B), node_plan(C, NOW))
    past = Plan(NODES_WITH_NEW_NODE, "", first)
    assert rebalance(again, frozenset(), "", past, DEFAULT_SESSIONS.facts(), POLICY, soon) is first


def test_there_is_nobody_to_give_to_where_one_node_serves_alone() -> None:
    alone = node_plans(
        node_plan(A), node_plan(B, state=State.UNHEALTHY), node_plan(C, LONG_AGO, state=State.DRAINED)
    )
    assert decide_rebalance(DEFAULT_SESSIONS.facts(), alone) == RebalanceState()
    assert decide_rebalance(DEFAULT_SESSIONS.facts(), {}) == RebalanceState()
