"""Sessions that were sent to other zones go back when theirs has room: how many, to whom, and when none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.model.nodes import GroupZone, State
from controlplane.model.plan import BalancePolicy, NodePlan, Policy, RebalanceState
from tests.support.controlplane.balance_inputs import (
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
    incoming_by_node,
    node_plan,
    node_plans,
    outgoing_by_node,
)

ZONES = {"x": "here", "y": "there"}
FOUR = node_plans(
    node_plan(A, zone="here"),
    node_plan(B, zone="here"),
    node_plan(C, zone="there"),
    node_plan(D, zone="there"),
)
BY_PLACE = replace(POLICY, balance_policy=BalancePolicy.LOCATION)


def back(
    fleet: ReportedSessions,
    planned: dict[str, NodePlan] = FOUR,
    policy: Policy = POLICY,
    full: frozenset[GroupZone] = frozenset(),
) -> RebalanceState:
    return decide_rebalance(fleet.facts(envoy_zones=ZONES), planned, policy=policy, overloaded_zones=full)


def test_sessions_go_back_to_the_zone_of_their_envoys() -> None:
    found = back(ReportedSessions({"x": {C: 12, D: 8}, "y": {C: 20, D: 20}}))
    assert outgoing_by_node(found) == {C: 12, D: 8}
    assert incoming_by_node(found) == {A: 10, B: 10}
    assert {i for counts in (*found.outgoing.values(), *found.incoming.values()) for i in counts} == {
        INSTANCE_X
    }
    assert found.reason == "Envoys of zone here have sessions elsewhere, and it has room for them"


def test_none_goes_back_beyond_what_the_zone_has_room_for() -> None:
    """Or the zone might be full at once, and send them elsewhere again."""
    found = back(ReportedSessions({"x": {A: 20, B: 20, C: 10, D: 10}, "y": {C: 5, D: 5}}))
    assert (sum(outgoing_by_node(found).values()), incoming_by_node(found)) == (0, {})
    found = back(ReportedSessions({"x": {A: 20, B: 20, C: 10, D: 10}, "y": {C: 15, D: 15}}))
    assert (sum(outgoing_by_node(found).values()), incoming_by_node(found)) == (5, {A: 3, B: 2})


def test_by_place_alone_all_go_back() -> None:
    found = back(ReportedSessions({"x": {A: 20, B: 20, C: 10, D: 10}}), policy=BY_PLACE)
    assert (sum(outgoing_by_node(found).values()), incoming_by_node(found)) == (20, {A: 10, B: 10})


@pytest.mark.parametrize(
    "planned",
    [
        node_plans(
            node_plan(A, zone="here", state=State.UNHEALTHY),
            node_plan(C, zone="there"),
            node_plan(D, zone="there"),
        ),
        node_plans(
            node_plan(A, zone="here", group="g"), node_plan(C, zone="there"), node_plan(D, zone="there")
        ),
    ],
    ids=["no node of it serves", "its nodes are another group's"],
)
def test_none_goes_where_its_envoy_has_no_nodes(planned: dict[str, NodePlan]) -> None:
    found = back(ReportedSessions({"x": {C: 10, D: 10}}), planned)
    assert (outgoing_by_node(found), incoming_by_node(found)) == ({}, {})


def test_a_full_zone_and_one_whose_place_nobody_asks_for_get_none_back() -> None:
    away = ReportedSessions({"x": {C: 10, D: 10}})
    assert outgoing_by_node(back(away, policy=replace(POLICY, balance_policy=BalancePolicy.CONNECTION))) == {
        C: 5,
        D: 5,
    }
    assert "elsewhere" not in back(away, full=frozenset({("", "here"), ("", "there")})).reason


def test_silent_envoys_and_the_speed_are_heeded() -> None:
    away = ReportedSessions({"x": {C: 400, D: 400}, "y": {C: 20, D: 20}})
    slow = replace(BY_PLACE, rebalance_per_second=10.0)
    found = back(away, policy=slow)
    assert (
        sum(outgoing_by_node(found).values()),
        sum(incoming_by_node(found).values()),
        found.round_ends_at,
    ) == (50, 50, NOW + 5.0)
    assert outgoing_by_node(back(replace(away, stale_envoys=frozenset({"x"})), policy=BY_PLACE)) == {}
    assert INSTANCE_Y not in {i for counts in found.outgoing.values() for i in counts}
