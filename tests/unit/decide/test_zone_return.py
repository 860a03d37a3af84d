"""Sessions in other zones return to the zone of their Envoys when that zone has capacity again."""

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
NODES = node_plans(
    node_plan(A, zone="here"),
    node_plan(B, zone="here"),
    node_plan(C, zone="there"),
    node_plan(D, zone="there"),
)
LOCATION_POLICY = replace(POLICY, balance_policy=BalancePolicy.LOCATION)


def decide(
    fleet: ReportedSessions,
    planned: dict[str, NodePlan] = NODES,
    policy: Policy = POLICY,
    overloaded: frozenset[GroupZone] = frozenset(),
) -> RebalanceState:
    return decide_rebalance(
        fleet.facts(envoy_zones=ZONES), planned, policy=policy, overloaded_zones=overloaded
    )


def test_sessions_return_to_the_zone_of_their_envoys() -> None:
    result = decide(ReportedSessions({"x": {C: 12, D: 8}, "y": {C: 20, D: 20}}))
    assert outgoing_by_node(result) == {C: 12, D: 8}
    assert incoming_by_node(result) == {A: 10, B: 10}
    assert {i for counts in (*result.outgoing.values(), *result.incoming.values()) for i in counts} == {
        INSTANCE_X
    }
    assert result.reason == "zone here has capacity again for its Envoys' sessions in other zones"


def test_return_is_limited_by_zone_capacity() -> None:
    """Without the limit, the zone could become overloaded at once and send sessions elsewhere again."""
    result = decide(ReportedSessions({"x": {A: 20, B: 20, C: 10, D: 10}, "y": {C: 5, D: 5}}))
    assert (sum(outgoing_by_node(result).values()), incoming_by_node(result)) == (0, {})
    result = decide(ReportedSessions({"x": {A: 20, B: 20, C: 10, D: 10}, "y": {C: 15, D: 15}}))
    assert (sum(outgoing_by_node(result).values()), incoming_by_node(result)) == (5, {A: 3, B: 2})


def test_location_policy_returns_all_sessions() -> None:
    result = decide(ReportedSessions({"x": {A: 20, B: 20, C: 10, D: 10}}), policy=LOCATION_POLICY)
    assert (sum(outgoing_by_node(result).values()), incoming_by_node(result)) == (20, {A: 10, B: 10})


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
    ids=["no node of the zone serves", "its nodes are in another group"],
)
def test_no_return_to_a_zone_without_usable_nodes(planned: dict[str, NodePlan]) -> None:
    result = decide(ReportedSessions({"x": {C: 10, D: 10}}), planned)
    assert (outgoing_by_node(result), incoming_by_node(result)) == ({}, {})


def test_no_return_if_overloaded_or_zones_unused() -> None:
    remote = ReportedSessions({"x": {C: 10, D: 10}})
    assert outgoing_by_node(
        decide(remote, policy=replace(POLICY, balance_policy=BalancePolicy.CONNECTION))
    ) == {
        C: 5,
        D: 5,
    }
    assert "capacity again" not in decide(remote, overloaded=frozenset({("", "here"), ("", "there")})).reason


def test_return_respects_rate_limit_and_silent_envoys() -> None:
    remote = ReportedSessions({"x": {C: 400, D: 400}, "y": {C: 20, D: 20}})
    slow = replace(LOCATION_POLICY, rebalance_per_second=10.0)
    result = decide(remote, policy=slow)
    assert (
        sum(outgoing_by_node(result).values()),
        sum(incoming_by_node(result).values()),
        result.round_ends_at,
    ) == (50, 50, NOW + 5.0)
    assert (
        outgoing_by_node(decide(replace(remote, stale_envoys=frozenset({"x"})), policy=LOCATION_POLICY)) == {}
    )
    assert INSTANCE_Y not in {i for counts in result.outgoing.values() for i in counts}
