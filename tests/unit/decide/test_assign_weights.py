"""Weights of a whole plan: computed once per report interval, per group and zone, from the best counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from controlplane.decide.balance.assign_weights import assign_weights
from controlplane.decide.inputs import Inputs
from controlplane.decide.plan import compute_plan
from controlplane.model.facts import Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import Intents
from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.model.nodes import GroupZone, Node, Source, State, Topology
from controlplane.model.plan import BalancePolicy, EdsHealth, Factor, NodePlan, Plan, Policy
from tests.support.controlplane.balance_inputs import (
    NOW,
    POLICY,
    A,
    B,
    C,
    D,
    ReportedSessions,
    node_plan,
    node_plans,
)

FLEET = ReportedSessions({"x": {A: 50, B: 10}})


def replan(
    planned: Mapping[str, NodePlan],
    facts: Facts,
    previous: Plan | None = None,
    policy: Policy = POLICY,
    now: float = NOW,
) -> Plan:
    """Return the plan that follows `previous`, without rebalancing."""
    nodes, overloaded, at = assign_weights(planned, Inputs(previous or Plan(), facts, policy, now))
    return Plan(nodes, weights_computed_at=at, overloaded_zones=overloaded)


def weights(plan: Plan) -> dict[str, int]:
    return {address: planned.weight for address, planned in plan.nodes.items()}


def local_weights(plan: Plan) -> dict[str, int]:
    return {address: planned.local_weight for address, planned in plan.nodes.items()}


def test_emptier_node_weighs_more_and_draining_node_nothing() -> None:
    draining = node_plan(C, state=State.DRAINING, eds_health=EdsHealth.DRAINING)
    result = weights(replan(node_plans(node_plan(A), node_plan(B), draining), FLEET.facts()))
    assert 0 < result[A] < result[B]
    assert result[C] == 0


def test_weights_are_recomputed_once_per_report_interval() -> None:
    planned = node_plans(node_plan(A), node_plan(B))
    first = replan(planned, FLEET.facts())
    swapped = ReportedSessions({"x": {A: 10, B: 50}})
    soon = replan(planned, swapped.facts(), first, now=NOW + 0.99)
    assert (weights(soon), soon.weights_computed_at) == (weights(first), NOW)
    later = replan(planned, swapped.facts(), soon, now=NOW + 1.0)
    assert (weights(later), later.weights_computed_at) == (
        {A: weights(first)[B], B: weights(first)[A]},
        NOW + 1.0,
    )
    slow = replace(POLICY, report_interval=60.0)
    assert weights(replan(planned, swapped.facts(), first, slow, NOW + 4.9)) == weights(first)
    assert weights(replan(planned, swapped.facts(), first, slow, NOW + 5.0)) != weights(first)
    # If the clock was set back, the old weights seem to be from the future. They are computed again at once.
    assert replan(planned, swapped.facts(), first, now=NOW - 5.0).weights_computed_at == NOW - 5.0


@pytest.mark.parametrize(
    "changed",
    [
        node_plans(node_plan(A), node_plan(B), node_plan(C)),
        node_plans(node_plan(A)),
        node_plans(node_plan(A), node_plan(B, state=State.UNHEALTHY, eds_health=EdsHealth.UNHEALTHY)),
        node_plans(node_plan(A), node_plan(C)),
        node_plans(node_plan(A, weight=200), node_plan(B)),
        node_plans(node_plan(A), node_plan(B, group="g")),
        node_plans(node_plan(A), node_plan(B, zone="a")),
        node_plans(node_plan(A), node_plan(B, backup=True)),
    ],
)
def test_weights_are_recomputed_at_once_if_nodes_change(changed: dict[str, NodePlan]) -> None:
    first = replan(node_plans(node_plan(A), node_plan(B)), FLEET.facts())
    result = replan(changed, FLEET.facts(), first, now=NOW + 0.1)
    assert result.weights_computed_at == NOW + 0.1
    assert all(
        (result.nodes[a].weight > 0) == (p.eds_health is EdsHealth.HEALTHY) for a, p in changed.items()
    )


def test_unchanged_node_plans_are_reused() -> None:
    """Most nodes of a large fleet do not change between plans. Identical objects are cheap to compare."""
    first = replan(node_plans(node_plan(A), node_plan(B)), FLEET.facts())
    for now in (NOW + 0.5, NOW + 5.0):
        result = replan(first.nodes, FLEET.facts(), first, now=now)
        assert all(result.nodes[a] is first.nodes[a] for a in (A, B))


def test_fresh_tidb_count_takes_precedence() -> None:
    planned = node_plans(node_plan(A), node_plan(B))
    with_tidb_counts = replace(FLEET, node_connections={A: 10, B: 50})
    swapped = weights(replan(planned, ReportedSessions({"x": {A: 10, B: 50}}).facts()))
    assert weights(replan(planned, with_tidb_counts.facts())) == swapped
    old = replace(with_tidb_counts, counted_at=NOW - 3.1)
    assert weights(replan(planned, old.facts())) == weights(replan(planned, FLEET.facts()))
    assert weights(replan(planned, replace(with_tidb_counts, counted_at=NOW - 3.0).facts())) == swapped
    slow = replace(POLICY, status_interval=10.0)
    assert (
        weights(replan(planned, replace(with_tidb_counts, counted_at=NOW - 30.0).facts(), policy=slow))
        == swapped
    )


def test_unknown_counts_leave_capacity_shares() -> None:
    planned = node_plans(node_plan(A), node_plan(B, weight=200))
    assert weights(replan(planned, Facts())) == {A: 1600, B: 3200}


def test_groups_are_weighted_separately() -> None:
    grouped = node_plans(node_plan(A, group="g"), node_plan(B), node_plan(C, group="g"), node_plan(D))
    sessions = ReportedSessions({"x": {A: 500, B: 7, C: 500, D: 7}})
    result = weights(replan(grouped, sessions.facts()))
    assert (result[A], result[B]) == (result[C], result[D])
    emptied = replace(sessions, sessions={"x": {A: 0, B: 7, C: 500, D: 7}})
    after = weights(replan(grouped, emptied.facts()))
    assert after[A] > after[C]
    assert (after[B], after[D]) == (result[B], result[D])


def test_expected_arrivals_default_to_capacity_share() -> None:
    one, other = (
        [node_plan(A), node_plan(B)],
        [node_plan(C, weight=300, group="g"), node_plan(D, weight=300, group="g")],
    )
    sessions = ReportedSessions({"x": {A: 60, B: 20, C: 900, D: 900}})
    together = weights(replan(node_plans(*one, *other), sessions.facts(new_sessions_per_second=80.0)))
    alone = weights(replan(node_plans(*one), sessions.facts(new_sessions_per_second=20.0)))
    assert (together[A], together[B]) == (alone[A], alone[B])
    assert alone[A] != weights(replan(node_plans(*one), sessions.facts(new_sessions_per_second=80.0)))[A]


def test_expected_arrivals_follow_recent_arrivals() -> None:
    """A group's fraction of new sessions may differ from its fraction of the capacity."""
    one, other = (
        [node_plan(A), node_plan(B)],
        [node_plan(C, weight=300, group="g"), node_plan(D, weight=300, group="g")],
    )
    sessions = ReportedSessions({"x": {A: 60, B: 20, C: 900, D: 900}})
    together = weights(
        replan(
            node_plans(*one, *other),
            sessions.facts(new_sessions_per_second=80.0, new_sessions={A: 5, B: 70, C: 15, D: 10}),
        )
    )
    alone = weights(replan(node_plans(*one), sessions.facts(new_sessions_per_second=60.0)))
    assert (together[A], together[B]) == (alone[A], alone[B])
    assert alone[A] != weights(replan(node_plans(*one), sessions.facts(new_sessions_per_second=20.0)))[A]


def test_backup_nodes_are_weighted_separately() -> None:
    with_backups = node_plans(
        node_plan(A), node_plan(B), node_plan(C, backup=True), node_plan(D, backup=True)
    )
    result = weights(replan(with_backups, ReportedSessions({"x": {A: 90, B: 90, D: 40}}).facts()))
    assert result[A] == result[B]
    assert result[C] > result[D] > 0
    emptier = weights(replan(with_backups, ReportedSessions({"x": {A: 9, B: 90, D: 40}}).facts()))
    assert emptier[A] > emptier[B]
    assert (emptier[C], emptier[D]) == (result[C], result[D])


def test_node_has_a_separate_weight_for_local_envoys() -> None:
    planned = node_plans(node_plan(A, zone="a"), node_plan(B, zone="a"), node_plan(C, zone="b"), node_plan(D))
    sessions = ReportedSessions({"x": {A: 50, B: 50, C: 10, D: 10}})
    result = replan(planned, sessions.facts(envoy_zones={"x": "a"}))
    assert weights(result)[A] < weights(result)[C]
    assert local_weights(result)[A] == local_weights(result)[B] > weights(result)[A]
    assert (local_weights(result)[C], local_weights(result)[D]) == (0, 0)  # b has no Envoy, D no zone
    assert set(local_weights(replan(planned, sessions.facts())).values()) == {0}
    alone = replace(POLICY, balance_policy=BalancePolicy.CONNECTION)
    without_zones = replan(planned, sessions.facts(envoy_zones={"x": "a"}), policy=alone)
    assert set(local_weights(without_zones).values()) == {0}
    with_backups = node_plans(node_plan(A, zone="a", backup=True), node_plan(B, zone="a"))
    assert local_weights(replan(with_backups, sessions.facts(envoy_zones={"x": "a"})))[A] == 0


def test_noise_changes_neither_weight() -> None:
    planned = node_plans(node_plan(A, zone="a"), node_plan(B, zone="a"), node_plan(C, zone="b"))
    sessions = ReportedSessions({"x": {A: 1000, B: 960, C: 400}})
    first = replan(planned, sessions.facts(envoy_zones={"x": "a"}, new_sessions_per_second=50.0))
    assert (weights(first)[A], weights(first)[B]) != (local_weights(first)[A], local_weights(first)[B])
    for more in range(-8, 9, 4):
        noisy = replace(sessions, sessions={"x": {A: 1000 + more, B: 960, C: 400}})
        result = replan(
            planned, noisy.facts(envoy_zones={"x": "a"}, new_sessions_per_second=50.0), first, now=NOW + 1.0
        )
        assert (weights(result), local_weights(result)) == (weights(first), local_weights(first))
        assert result.weights_computed_at == NOW + 1.0


def test_overloaded_zones_have_hysteresis() -> None:
    planned = node_plans(node_plan(A, zone="a"), node_plan(B, zone="b"), node_plan(C, zone="b"))
    zones = {"x": "a", "y": "b"}
    overloaded: frozenset[GroupZone] = frozenset({("", "a")})
    first = replan(planned, ReportedSessions({"x": {A: 70, B: 20, C: 20}}).facts(envoy_zones=zones))
    assert first.overloaded_zones == overloaded
    # The load of zone a is now 1.36 times the mean load of the group.
    fewer = ReportedSessions({"x": {A: 50, B: 30, C: 30}}).facts(envoy_zones=zones)
    assert replan(planned, fewer, first, now=NOW + 0.5).overloaded_zones == overloaded
    assert replan(planned, fewer, first, now=NOW + 5.0).overloaded_zones == overloaded
    assert replan(planned, fewer).overloaded_zones == frozenset()
    # Unknown counts do not overload a zone.
    assert replan(planned, Facts(envoy_zones=zones)).overloaded_zones == frozenset()


def test_weights_follow_slow_start_and_factors() -> None:
    slow = replace(POLICY, slow_start=30.0)
    sessions = ReportedSessions({"x": {A: 0, B: 0}}).facts(new_sessions_per_second=1000.0)
    young = weights(replan(node_plans(node_plan(A), node_plan(B, NOW - 15.0)), sessions, policy=slow))
    assert young[B] / young[A] == pytest.approx(0.55, rel=0.2)
    previous = Plan(
        node_plans(node_plan(A), node_plan(B, factors={"cpu": Factor(0.25, 0.25, 1, "")})),
        weights_computed_at=NOW,
    )
    with_metrics = replace(
        sessions,
        node_metrics={B: NodeMetrics(cpu=MetricValue(1.0, NOW)), A: NodeMetrics(cpu=MetricValue(0.5, NOW))},
    )
    result = replan(node_plans(node_plan(A), node_plan(B)), with_metrics, previous, now=NOW + 1.0)
    assert weights(result)[B] / weights(result)[A] == pytest.approx(
        result.nodes[B].factors["cpu"].share, rel=0.2
    )


@pytest.mark.parametrize("registered", [True, False])
def test_factors_persist_between_weight_computations(registered: bool) -> None:
    """The factors of an unregistered node persist too, although its plan changes between computations."""
    passed = Health(sql=CheckResult(CheckStatus.PASS, "it accepts logins", 9, NOW))
    nodes = {a: Node(a, Source.PD, registered=registered or a != B) for a in (A, B, C)}
    in_service = node_plans(node_plan(A), node_plan(B, unregistered_since=None), node_plan(C))
    result = Plan({a: replace(p, node=nodes[a]) for a, p in in_service.items()})
    shares = []
    for step in range(40):
        now = NOW + 0.3 * step
        normal, busy = NodeMetrics(cpu=MetricValue(0.3, now)), NodeMetrics(cpu=MetricValue(1.0, now))
        facts = Facts(
            topologies={Source.PD: Topology(Source.PD, nodes, is_complete=True)},
            health=dict.fromkeys(nodes, passed),
            node_metrics={A: normal, B: busy, C: normal},
        )
        result = compute_plan(result, facts, Intents(), POLICY, now)
        cpu = result.nodes[B].factors.get("cpu")
        shares.append(1.0 if cpu is None else cpu.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.9
