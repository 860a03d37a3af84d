"""The weights of a whole plan: once a report interval, within each group and zone, by the best counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from controlplane.decide.balance.assign_weights import assign_weights
from controlplane.decide.plan import plan
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


def weighed(
    planned: Mapping[str, NodePlan],
    facts: Facts,
    previous: Plan | None = None,
    policy: Policy = POLICY,
    now: float = NOW,
) -> Plan:
    """The plan that follows `previous`, without moves."""
    found, full, at = assign_weights(planned, previous or Plan(), facts, policy, now)
    return Plan(found, weights_computed_at=at, overloaded_zones=full)


def of(found: Plan) -> dict[str, int]:
    return {address: planned.weight for address, planned in found.nodes.items()}


def nearby(found: Plan) -> dict[str, int]:
    return {address: planned.local_weight for address, planned in found.nodes.items()}


def test_the_emptier_gets_more_and_who_does_not_serve_gets_nothing() -> None:
    out = node_plan(C, state=State.DRAINING, eds_health=EdsHealth.DRAINING)
    found = of(weighed(node_plans(node_plan(A), node_plan(B), out), FLEET.facts()))
    assert 0 < found[A] < found[B]
    assert found[C] == 0


def test_counts_are_looked_at_once_in_a_report_interval() -> None:
    planned = node_plans(node_plan(A), node_plan(B))
    first = weighed(planned, FLEET.facts())
    turned = ReportedSessions({"x": {A: 10, B: 50}})
    soon = weighed(planned, turned.facts(), first, now=NOW + 0.99)
    assert (of(soon), soon.weights_computed_at) == (of(first), NOW)
    later = weighed(planned, turned.facts(), soon, now=NOW + 1.0)
    assert (of(later), later.weights_computed_at) == ({A: of(first)[B], B: of(first)[A]}, NOW + 1.0)
    slow = replace(POLICY, report_interval=60.0)
    assert of(weighed(planned, turned.facts(), first, slow, NOW + 4.9)) == of(first)
    assert of(weighed(planned, turned.facts(), first, slow, NOW + 5.0)) != of(first)
    # The clock was set back: a plan of the future is not waited for.
    assert weighed(planned, turned.facts(), first, now=NOW - 5.0).weights_computed_at == NOW - 5.0


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
def test_weights_are_anew_at_once_when_nodes_come_or_go_or_change(changed: dict[str, NodePlan]) -> None:
    first = weighed(node_plans(node_plan(A), node_plan(B)), FLEET.facts())
    found = weighed(changed, FLEET.facts(), first, now=NOW + 0.1)
    assert found.weights_computed_at == NOW + 0.1
    assert all((found.nodes[a].weight > 0) == (p.eds_health is EdsHealth.HEALTHY) for a, p in changed.items())


def test_what_nothing_was_changed_of_is_the_same_object() -> None:
    """Most nodes are the same from one plan to the next, and thousands of them are compared."""
    first = weighed(node_plans(node_plan(A), node_plan(B)), FLEET.facts())
    for now in (NOW + 0.5, NOW + 5.0):
        found = weighed(first.nodes, FLEET.facts(), first, now=now)
        assert all(found.nodes[a] is first.nodes[a] for a in (A, B))


def test_a_nodes_own_count_goes_before_that_of_envoys_while_it_is_fresh() -> None:
    planned = node_plans(node_plan(A), node_plan(B))
    own = replace(FLEET, node_connections={A: 10, B: 50})
    turned = of(weighed(planned, ReportedSessions({"x": {A: 10, B: 50}}).facts()))
    assert of(weighed(planned, own.facts())) == turned
    old = replace(own, counted_at=NOW - 3.1)
    assert of(weighed(planned, old.facts())) == of(weighed(planned, FLEET.facts()))
    assert of(weighed(planned, replace(own, counted_at=NOW - 3.0).facts())) == turned
    slow = replace(POLICY, status_interval=10.0)
    assert of(weighed(planned, replace(own, counted_at=NOW - 30.0).facts(), policy=slow)) == turned


def test_what_is_not_known_of_anybody_leaves_the_plain_shares() -> None:
    planned = node_plans(node_plan(A), node_plan(B, weight=200))
    assert of(weighed(planned, Facts())) == {A: 1600, B: 3200}


def test_nodes_of_a_group_are_weighed_among_themselves_alone() -> None:
    apart = node_plans(node_plan(A, group="g"), node_plan(B), node_plan(C, group="g"), node_plan(D))
    known = ReportedSessions({"x": {A: 500, B: 7, C: 500, D: 7}})
    found = of(weighed(apart, known.facts()))
    assert (found[A], found[B]) == (found[C], found[D])
    emptied = replace(known, sessions={"x": {A: 0, B: 7, C: 500, D: 7}})
    again = of(weighed(apart, emptied.facts()))
    assert again[A] > again[C]
    assert (again[B], again[D]) == (found[B], found[D])


def test_what_arrives_is_expected_at_each_group_by_its_part_of_the_capacity() -> None:
    one, other = (
        [node_plan(A), node_plan(B)],
        [node_plan(C, weight=300, group="g"), node_plan(D, weight=300, group="g")],
    )
    known = ReportedSessions({"x": {A: 60, B: 20, C: 900, D: 900}})
    together = of(weighed(node_plans(*one, *other), known.facts(new_sessions_per_second=80.0)))
    alone = of(weighed(node_plans(*one), known.facts(new_sessions_per_second=20.0)))
    assert (together[A], together[B]) == (alone[A], alone[B])
    assert alone[A] != of(weighed(node_plans(*one), known.facts(new_sessions_per_second=80.0)))[A]


def test_what_arrives_is_expected_where_the_latest_arrivals_were() -> None:
    """Clients of a small group may be nearly all that there are."""
    one, other = (
        [node_plan(A), node_plan(B)],
        [node_plan(C, weight=300, group="g"), node_plan(D, weight=300, group="g")],
    )
    known = ReportedSessions({"x": {A: 60, B: 20, C: 900, D: 900}})
    together = of(
        weighed(
            node_plans(*one, *other),
            known.facts(new_sessions_per_second=80.0, new_sessions={A: 5, B: 70, C: 15, D: 10}),
        )
    )
    alone = of(weighed(node_plans(*one), known.facts(new_sessions_per_second=60.0)))
    assert (together[A], together[B]) == (alone[A], alone[B])
    assert alone[A] != of(weighed(node_plans(*one), known.facts(new_sessions_per_second=20.0)))[A]


def test_nodes_that_stand_in_are_weighed_among_themselves() -> None:
    spare = node_plans(node_plan(A), node_plan(B), node_plan(C, backup=True), node_plan(D, backup=True))
    found = of(weighed(spare, ReportedSessions({"x": {A: 90, B: 90, D: 40}}).facts()))
    assert found[A] == found[B]
    assert found[C] > found[D] > 0
    emptier = of(weighed(spare, ReportedSessions({"x": {A: 9, B: 90, D: 40}}).facts()))
    assert emptier[A] > emptier[B]
    assert (emptier[C], emptier[D]) == (found[C], found[D])


def test_a_node_has_one_weight_for_envoys_of_its_zone_and_one_for_others() -> None:
    planned = node_plans(node_plan(A, zone="a"), node_plan(B, zone="a"), node_plan(C, zone="b"), node_plan(D))
    known = ReportedSessions({"x": {A: 50, B: 50, C: 10, D: 10}})
    found = weighed(planned, known.facts(envoy_zones={"x": "a"}))
    assert of(found)[A] < of(found)[C]
    assert nearby(found)[A] == nearby(found)[B] > of(found)[A]
    assert (nearby(found)[C], nearby(found)[D]) == (0, 0)  # no Envoy is there
    assert set(nearby(weighed(planned, known.facts())).values()) == {0}
    alone = replace(POLICY, balance_policy=BalancePolicy.CONNECTION)
    assert set(nearby(weighed(planned, known.facts(envoy_zones={"x": "a"}), policy=alone)).values()) == {0}
    spare = node_plans(node_plan(A, zone="a", backup=True), node_plan(B, zone="a"))
    assert nearby(weighed(spare, known.facts(envoy_zones={"x": "a"})))[A] == 0


def test_noise_moves_neither_of_the_two_weights() -> None:
    planned = node_plans(node_plan(A, zone="a"), node_plan(B, zone="a"), node_plan(C, zone="b"))
    known = ReportedSessions({"x": {A: 1000, B: 960, C: 400}})
    first = weighed(planned, known.facts(envoy_zones={"x": "a"}, new_sessions_per_second=50.0))
    assert (of(first)[A], of(first)[B]) != (nearby(first)[A], nearby(first)[B])
    for more in range(-8, 9, 4):
        noisy = replace(known, sessions={"x": {A: 1000 + more, B: 960, C: 400}})
        found = weighed(
            planned, noisy.facts(envoy_zones={"x": "a"}, new_sessions_per_second=50.0), first, now=NOW + 1.0
        )
        assert (of(found), nearby(found)) == (of(first), nearby(first))
        assert found.weights_computed_at == NOW + 1.0


def test_a_zone_that_has_too_many_is_full_and_what_it_was_counts() -> None:
    planned = node_plans(node_plan(A, zone="a"), node_plan(B, zone="b"), node_plan(C, zone="b"))
    zones = {"x": "a", "y": "b"}
    full: frozenset[GroupZone] = frozenset({("", "a")})
    first = weighed(planned, ReportedSessions({"x": {A: 70, B: 20, C: 20}}).facts(envoy_zones=zones))
    assert first.overloaded_zones == full
    fewer = ReportedSessions({"x": {A: 50, B: 30, C: 30}}).facts(
        envoy_zones=zones
    )  # 1.36 times as many as all
    assert weighed(planned, fewer, first, now=NOW + 0.5).overloaded_zones == full
    assert weighed(planned, fewer, first, now=NOW + 5.0).overloaded_zones == full
    assert weighed(planned, fewer).overloaded_zones == frozenset()
    assert weighed(planned, Facts(envoy_zones=zones)).overloaded_zones == frozenset()  # not known is not full


def test_slow_start_and_vital_signs_take_from_a_weight_what_they_take_from_a_share() -> None:
    slow = replace(POLICY, slow_start=30.0)
    known = ReportedSessions({"x": {A: 0, B: 0}}).facts(new_sessions_per_second=1000.0)
    young = of(weighed(node_plans(node_plan(A), node_plan(B, NOW - 15.0)), known, policy=slow))
    assert young[B] / young[A] == pytest.approx(0.55, rel=0.2)
    was = Plan(
        node_plans(node_plan(A), node_plan(B, factors={"cpu": Factor(0.25, 0.25, 1, "")})),
        weights_computed_at=NOW,
    )
    ill = replace(
        known,
        node_metrics={B: NodeMetrics(cpu=MetricValue(1.0, NOW)), A: NodeMetrics(cpu=MetricValue(0.5, NOW))},
    )
    found = weighed(node_plans(node_plan(A), node_plan(B)), ill, was, now=NOW + 1.0)
    assert of(found)[B] / of(found)[A] == pytest.approx(found.nodes[B].factors["cpu"].share, rel=0.2)


@pytest.mark.parametrize("registered", [True, False])
def test_what_vital_signs_have_taken_stays_taken_between_two_looks_at_them(registered: bool) -> None:
    """Also of a node that is decided on anew meanwhile, as one is whose registration has lapsed."""
    passed = Health(sql=CheckResult(CheckStatus.PASS, "it greets", 9, NOW))
    there = {a: Node(a, Source.PD, registered=registered or a != B) for a in (A, B, C)}
    in_service = node_plans(node_plan(A), node_plan(B, unregistered_since=None), node_plan(C))
    found = Plan({a: replace(p, node=there[a]) for a, p in in_service.items()})
    shares = []
    for step in range(40):
        now = NOW + 0.3 * step
        calm, pinned = NodeMetrics(cpu=MetricValue(0.3, now)), NodeMetrics(cpu=MetricValue(1.0, now))
        known = Facts(
            topologies={Source.PD: Topology(Source.PD, there, is_complete=True)},
            health=dict.fromkeys(there, passed),
            node_metrics={A: calm, B: pinned, C: calm},
        )
        found = plan(found, known, Intents(), POLICY, now)
        cpu = found.nodes[B].factors.get("cpu")
        shares.append(1.0 if cpu is None else cpu.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.9
