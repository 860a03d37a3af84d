"""Sessions asked to move to nodes that have fewer than their share: how many, whence, where, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.decide.balance.rebalance import rebalance
from controlplane.model.nodes import NOTHING, State
from controlplane.model.plan import Factor, Plan, Rebalance
from tests.support.controlplane.balance_inputs import (
    FLEET,
    JOINED,
    LONG_AGO,
    NOW,
    POLICY,
    A,
    B,
    C,
    Fleet,
    X,
    Y,
    decided,
    given,
    node,
    nodes,
    wanted,
)

ALIKE = nodes(node(A), node(B), node(C))
ENDED = "all nodes have about their share, or what they have beyond it cannot move"


def one(a: int, b: int, c: int) -> Fleet:
    """A single Envoy with so many sessions on the three nodes."""
    return Fleet({"x": {A: a, B: b, C: c}})


def test_nodes_above_their_share_give_to_those_below_through_the_envoys_that_have_the_sessions() -> None:
    found = decided(FLEET.facts())
    assert found.moves == {A: {X: 10, Y: 5}, B: {X: 10, Y: 5}}
    assert found.wants == {C: {X: 20, Y: 10}}
    assert (found.since, found.round, found.until) == (NOW, int(NOW), NOW + 1.0)
    assert found.reason == f"{B} has 45 sessions and its share is 30, and 1 more node is off theirs"


def test_any_node_gives_and_any_gets_however_long_it_has_been_there() -> None:
    found = decided(one(60, 45, 0).facts(), ALIKE)
    assert (given(found), wanted(found)) == ({A: 25, B: 10}, {C: 35})
    found = decided(one(90, 6, 9).facts(), ALIKE)
    assert (given(found), wanted(found)) == ({A: 55}, {B: 29, C: 26})


def test_only_what_is_above_the_share_is_given() -> None:
    assert decided(one(100, 20, 0).facts()).moves == {A: {X: 60}}


def test_shares_go_by_weight_by_slow_start_and_by_vital_signs() -> None:
    heavy = nodes(node(A), node(B), node(C, NOW, weight=300))
    assert wanted(decided(FLEET.facts(), heavy)) == {C: 54}
    slow = replace(POLICY, slow_start=30.0)
    for active_for, share in ((0.0, 4), (15.0, 20), (29.9, 28), (30.0, 30)):
        joined = nodes(node(A), node(B), node(C, NOW - active_for))
        assert wanted(decided(FLEET.facts(), joined, policy=slow)) == {C: share}
    sick = nodes(node(A, factors={"cpu": Factor(0.5, 0.5, 1, "")}), node(B), node(C))
    found = decided(one(40, 40, 40).facts(), sick)
    assert (given(found), wanted(found)) == ({A: 16}, {B: 8, C: 8})


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
    assert given(decided(one(*counts).facts(), ALIKE)) == moved


def test_the_threshold_is_the_operators() -> None:
    exact = replace(POLICY, rebalance_threshold=0.0)
    assert given(decided(one(101, 100, 99).facts(), ALIKE, policy=exact)) == {A: 1}
    lax = replace(POLICY, rebalance_threshold=1.0)
    assert given(decided(one(200, 60, 40).facts(), ALIKE, policy=lax)) == {}
    assert given(decided(one(201, 60, 39).facts(), ALIKE, policy=lax)) == {A: 101}


def test_what_chance_explains_is_no_reason_either() -> None:
    """In 3 s 150 sessions open on three nodes, and as many end: a standard deviation of 10 on each."""
    exact = replace(POLICY, rebalance_threshold=0.0)

    def first(arrivals: float) -> int:
        """By how many sessions one node has to be above its share before any move."""
        found = (
            decided(one(1000 + n, 1000, 1000 - n).facts(arrivals=arrivals), ALIKE, policy=exact)
            for n in range(200)
        )
        return next(n for n, each in enumerate(found) if each.moves)

    assert first(0.0) == 1
    assert 10 < first(50.0) <= 30
    # Four times as many sessions vary twice as much.
    assert first(200.0) == pytest.approx(2 * first(50.0), abs=1)


def test_a_round_has_a_limit_for_the_whole_fleet_and_lasts_the_longer_the_more_it_asks_for() -> None:
    many = Fleet({"x": {A: 3000, B: 3000}, "y": {A: 1500, B: 1500}})
    found = decided(many.facts(), policy=replace(POLICY, rebalance_per_second=20.0))
    assert (sum(given(found).values()), wanted(found), found.until) == (100, {C: 100}, NOW + 5.0)
    for speed, seconds in ((1.0, 5.0), (10.0, 3.0), (9e9, 1.0)):
        limited = replace(POLICY, rebalance_per_second=speed)
        assert decided(FLEET.facts(), policy=limited).until == NOW + seconds
    assert given(decided(FLEET.facts(), policy=replace(POLICY, rebalance_per_second=0.01))) in (
        {A: 1},
        {B: 1},
    )


def test_the_limit_is_that_of_all_groups_together() -> None:
    apart = nodes(node(A, group="one"), node(B, group="one"), node(C, group="two"), node("d:1", group="two"))
    known = Fleet({"x": {A: 100, C: 100}}, covered=frozenset(apart)).facts()
    found = decided(known, apart, policy=replace(POLICY, rebalance_per_second=2.0))
    assert 0 < sum(given(found).values()) <= 10


def test_nodes_of_different_groups_have_nothing_to_give_each_other() -> None:
    apart = nodes(node(A, group="one"), node(B, group="two"), node(C, group="two"))
    found = decided(one(90, 20, 10).facts(), apart, policy=replace(POLICY, rebalance_threshold=0.0))
    assert (given(found), wanted(found)) == ({B: 5}, {C: 5})
    assert given(decided(one(90, 0, 0).facts(), apart)) == {}


def test_groups_go_together_and_zones_take_turns() -> None:
    """Within an Envoy a session of one zone might take the place that another zone's node has left."""
    four = nodes(*(node(f"{i}:1") for i in range(4)))
    known = Fleet({"x": {"0:1": 40, "2:1": 60}}, covered=frozenset(four)).facts(zones={"x": "a", "y": "b"})
    groups = {a: replace(p, group="ab"[i // 2]) for i, (a, p) in enumerate(four.items())}
    assert given(decided(known, groups)) == {"0:1": 20, "2:1": 30}
    zones = {a: replace(p, zone="ab"[i // 2]) for i, (a, p) in enumerate(four.items())}
    first = decided(known, zones)
    assert (given(first), wanted(first)) == ({"2:1": 30}, {"3:1": 30})
    later = Fleet(
        {"x": {"0:1": 40, "2:1": 30, "3:1": 30}}, at=NOW + 9, began=NOW + 7, covered=frozenset(four)
    )
    ended = replace(first, moves=NOTHING, wants=NOTHING)
    second = decided(later.facts(zones={"x": "a", "y": "b"}), zones, ended, now=NOW + 9)
    assert (given(second), wanted(second)) == ({"0:1": 20}, {"1:1": 20})


@pytest.mark.parametrize("apart", ["zone", "group"])
def test_sessions_that_do_not_move_keep_no_others_from_their_turn(apart: str) -> None:
    """Neither in a zone of the same group nor in another group, however slow all together have to be."""
    four = nodes(*(node(f"{i}:1", **{apart: "ab"[i // 2]}) for i in range(4)))  # type: ignore[arg-type]
    stuck = Fleet({"x": {"0:1": 40, "2:1": 60}}, covered=frozenset(four))
    slow = replace(POLICY, rebalance_per_second=2.0)
    found, asked = Rebalance(), set[str]()
    for second in range(200):
        now = NOW + second
        known = replace(stuck, at=now, began=now).facts(zones={"x": "a", "y": "b"})
        found = decided(known, four, found, slow, now)
        asked |= found.moves.keys()
    assert asked == {"0:1", "2:1"}


def test_nodes_that_stood_in_give_all_that_they_have_when_others_serve_again() -> None:
    spare = nodes(node(A), node(B), node(C, backup=True))
    found = decided(one(10, 10, 10).facts(), spare)
    assert (given(found), wanted(found)) == ({C: 10}, {A: 5, B: 5})
    # No session opens there any more, so chance explains none.
    assert given(decided(one(10, 10, 10).facts(arrivals=100.0), spare)) == {C: 10}
    alone = nodes(node(A, state=State.DRAINING), node(C, backup=True))
    assert given(decided(one(10, 0, 10).facts(), alone)) == {}


def test_connections_that_no_envoy_has_count_but_are_asked_of_nobody() -> None:
    beside = replace(FLEET, own={A: 75, B: 45, C: 0})  # 30 are of direct clients
    found = decided(beside.facts())
    assert (given(found), wanted(found)) == ({A: 35, B: 5}, {C: 40})
    full = replace(FLEET, own={A: 145, B: 45, C: 0})
    assert (given(decided(full.facts())), wanted(decided(full.facts()))) == ({A: 45}, {C: 45})
    old = replace(beside, counted_at=NOW - 3.1)
    assert decided(old.facts()) == decided(FLEET.facts())


def test_an_envoy_that_has_not_told_all_is_waited_for() -> None:
    assert decided(replace(FLEET, covered=frozenset((A, B))).facts()) == Rebalance()


def test_an_envoy_that_fell_silent_neither_gives_nor_makes_others_give_more() -> None:
    # 60 sessions are sure, and there may be 90: no node may come below a third of those.
    assert decided(replace(FLEET, silent=frozenset("y")).facts()) == Rebalance()
    surely = Fleet({"x": {A: 60, B: 60}, "y": {A: 3, B: 3}}, silent=frozenset("y"))
    assert decided(surely.facts()).moves == {A: {X: 18}, B: {X: 18}}
    nobody = replace(FLEET, silent=frozenset("xy"))
    assert decided(nobody.facts()) == Rebalance()
    # What the nodes count themselves leaves no doubt.
    counted = replace(FLEET, silent=frozenset("y"), own={A: 45, B: 45, C: 0})
    assert decided(counted.facts()).moves == {A: {X: 15}, B: {X: 15}}


def test_who_does_not_say_which_process_it_is_or_has_no_module_is_not_asked() -> None:
    older = replace(FLEET, instances={"x": X}).facts()
    assert decided(older).moves == {A: {X: 15}, B: {X: 15}}
    few = Fleet({"x": {A: 4, B: 2}, "y": {A: 41, B: 43}}, instances={"x": X}).facts()
    assert decided(few).moves == {A: {X: 4}, B: {X: 2}}
    mixed = Fleet({"x": {A: 4, B: 2}}, plain={"z": {A: 41, B: 43}}).facts()
    assert decided(mixed).moves == {A: {X: 4}, B: {X: 2}}
    known = FLEET.facts()
    unused = replace(known.censuses["x"], has_served=False)
    assert decided(replace(known, censuses={"x": unused})) == Rebalance()


def test_nothing_is_asked_for_while_the_fleet_comes_back() -> None:
    assert decided(FLEET.facts(began=NOW - 14.9)) == Rebalance()
    assert decided(FLEET.facts(began=NOW - 15.0)).moves


def test_a_round_is_withdrawn_when_what_it_rests_on_is_gone() -> None:
    first = decided(FLEET.facts())
    soon = NOW + 0.5
    off = decided(FLEET.facts(), before=first, policy=replace(POLICY, rebalance=False), now=soon)
    assert (off.since, off.moves, off.wants, off.until) == (None, {}, {}, soon)
    assert off.reason == "it was switched off"
    held = decided(FLEET.facts(), before=first, floor="only 1 of 9 passes", now=soon)
    assert (held.since, held.moves, held.reason) == (None, {}, "the checks of nodes are not trusted")
    less = replace(first, moves={}, wants={}, until=soon)
    for changed in (
        nodes(node(A), node(B, state=State.DRAINING), node(C, NOW)),
        nodes(node(A), node(B, weight=200), node(C, NOW)),
        nodes(node(A), node(B)),
        {**JOINED, **nodes(node("d:1", NOW))},
    ):
        past = Plan(JOINED, "", first)
        assert rebalance(changed, frozenset(), "", past, FLEET.facts(), POLICY, soon) == less
    again = nodes(node(A), node(B), node(C, NOW))
    past = Plan(JOINED, "", first)
    assert rebalance(again, frozenset(), "", past, FLEET.facts(), POLICY, soon) is first


def test_there_is_nobody_to_give_to_where_one_node_serves_alone() -> None:
    alone = nodes(node(A), node(B, state=State.UNHEALTHY), node(C, LONG_AGO, state=State.DRAINED))
    assert decided(FLEET.facts(), alone) == Rebalance()
    assert decided(FLEET.facts(), {}) == Rebalance()
