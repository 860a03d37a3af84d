"""Sessions that were sent to other zones go back when theirs has room: how many, to whom, and when none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.model.nodes import Quarter, State
from controlplane.model.plan import NodePlan, Policy, Rebalance, Strategy
from tests.support.controlplane.balance_inputs import (
    NOW,
    POLICY,
    A,
    B,
    C,
    D,
    Fleet,
    X,
    Y,
    decided,
    given,
    node,
    nodes,
    wanted,
)

ZONES = {"x": "here", "y": "there"}
FOUR = nodes(node(A, zone="here"), node(B, zone="here"), node(C, zone="there"), node(D, zone="there"))
BY_PLACE = replace(POLICY, strategy=Strategy.LOCATION)


def back(
    fleet: Fleet,
    planned: dict[str, NodePlan] = FOUR,
    policy: Policy = POLICY,
    full: frozenset[Quarter] = frozenset(),
) -> Rebalance:
    return decided(fleet.facts(zones=ZONES), planned, policy=policy, full=full)


def test_sessions_go_back_to_the_zone_of_their_envoys() -> None:
    found = back(Fleet({"x": {C: 12, D: 8}, "y": {C: 20, D: 20}}))
    assert given(found) == {C: 12, D: 8}
    assert wanted(found) == {A: 10, B: 10}
    assert {i for counts in (*found.moves.values(), *found.wants.values()) for i in counts} == {X}
    assert found.reason == "Envoys of zone here have sessions elsewhere, and it has room for them"


def test_none_goes_back_beyond_what_the_zone_has_room_for() -> None:
    """Or the zone might be full at once, and send them elsewhere again."""
    found = back(Fleet({"x": {A: 20, B: 20, C: 10, D: 10}, "y": {C: 5, D: 5}}))
    assert (sum(given(found).values()), wanted(found)) == (0, {})
    found = back(Fleet({"x": {A: 20, B: 20, C: 10, D: 10}, "y": {C: 15, D: 15}}))
    assert (sum(given(found).values()), wanted(found)) == (5, {A: 3, B: 2})


def test_by_place_alone_all_go_back() -> None:
    found = back(Fleet({"x": {A: 20, B: 20, C: 10, D: 10}}), policy=BY_PLACE)
    assert (sum(given(found).values()), wanted(found)) == (20, {A: 10, B: 10})


@pytest.mark.parametrize(
    "planned",
    [
        nodes(node(A, zone="here", state=State.UNHEALTHY), node(C, zone="there"), node(D, zone="there")),
        nodes(node(A, zone="here", group="g"), node(C, zone="there"), node(D, zone="there")),
    ],
    ids=["no node of it serves", "its nodes are another group's"],
)
def test_none_goes_where_its_envoy_has_no_nodes(planned: dict[str, NodePlan]) -> None:
    found = back(Fleet({"x": {C: 10, D: 10}}), planned)
    assert (given(found), wanted(found)) == ({}, {})


def test_a_full_zone_and_one_whose_place_nobody_asks_for_get_none_back() -> None:
    away = Fleet({"x": {C: 10, D: 10}})
    assert given(back(away, policy=replace(POLICY, strategy=Strategy.CONNECTION))) == {C: 5, D: 5}
    assert "elsewhere" not in back(away, full=frozenset({("", "here"), ("", "there")})).reason


def test_silent_envoys_and_the_speed_are_heeded() -> None:
    away = Fleet({"x": {C: 400, D: 400}, "y": {C: 20, D: 20}})
    slow = replace(BY_PLACE, rebalance_per_second=10.0)
    found = back(away, policy=slow)
    assert (sum(given(found).values()), sum(wanted(found).values()), found.until) == (50, 50, NOW + 5.0)
    assert given(back(replace(away, silent=frozenset({"x"})), policy=BY_PLACE)) == {}
    assert Y not in {i for counts in found.moves.values() for i in counts}
