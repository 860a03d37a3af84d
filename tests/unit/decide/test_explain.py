"""Why a node has its share, in words: each factor, and the one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.decide.explain import FactorExplanation, NodeExplanation, explain
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import BalancePolicy, EdsHealth, Factor, NodePlan, Plan, Policy

NOW = 1000.0
A, B, C = "10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.3:4000"
POLICY = Policy(slow_start=0)


def serving(address: str, weight: int = 1600, **more: object) -> NodePlan:
    plan = NodePlan(
        Node(address, Source.STATIC),
        State.ACTIVE,
        "it passes its checks",
        0.0,
        EdsHealth.HEALTHY,
        weight=weight,
        endpoint=address,
    )
    return replace(plan, **more)  # type: ignore[arg-type]


def holding(**counts: int) -> Facts:
    live = {{"a": A, "b": B, "c": C}[name]: count for name, count in counts.items()}
    return Facts(loads={"one": EnvoyLoad("one", NOW, live)}, sessions_by_endpoint=live)


def told(
    *nodes: NodePlan, facts: Facts | None = None, policy: Policy = POLICY, plan: Plan | None = None
) -> list[NodeExplanation]:
    plan = replace(plan or Plan(), nodes={p.node.address: p for p in nodes})
    return list(explain(plan, facts or Facts(), policy, NOW).values())


def factor(explanation: NodeExplanation, name: str) -> FactorExplanation:
    return next(each for each in explanation.factors if each.name == name)


def test_a_node_that_has_its_share() -> None:
    first, second = told(serving(A, 1600), serving(B, 4800), facts=holding(a=2, b=2))
    assert (first.weight, first.share) == (1600, 0.25)
    assert first.sentence == "gets 25% of the new sessions: it has 2 sessions, which is its share"
    assert second.share == 0.75
    assert [each.name for each in first.factors] == [
        *("state", "labels", "health", "memory", "cpu", "location", "connections")
    ]
    assert factor(first, "state") == FactorExplanation("state", 0, "active: it passes its checks")
    assert factor(first, "labels") == FactorExplanation("labels", 0, "in no group")
    assert factor(first, "connections") == FactorExplanation(
        "connections", 2, "it has 2 sessions, which is its share"
    )


def test_more_and_fewer_than_the_share_are_told_as_numbers() -> None:
    plan = {A: serving(A), B: serving(B)}
    # Sessions of Envoys without a module cannot move, so what is there already is the least of a share.
    facts = Facts(sessions_by_address={A: 41, B: 35}, loads={"one": EnvoyLoad("one", NOW)})
    first, second = explain(Plan(plan), facts, POLICY, NOW).values()
    assert "it has 41 sessions, 3 more than its share of 38" in first.sentence
    assert "it has 35 sessions, 3 fewer than its share of 38" in second.sentence


def test_what_nobody_has_reported_is_not_known() -> None:
    (only,) = told(serving(A))
    assert only.sentence == "gets 100% of the new sessions: how many sessions it has is not known"
    assert factor(only, "connections").score is None


def test_factors_are_told_with_what_they_take_and_where_they_go() -> None:
    factors = {
        "health": Factor(0.5, 1.0),
        "memory": Factor(0.7, 1.0, 0, "not known"),
        "cpu": Factor(0.6, 0.31, 1, "its CPU is at 95%, where 50% is usual"),
    }
    signs = NodeMetrics(cpu=MetricValue(0.95, NOW), cpu_quota=4, pd_failures=MetricValue(0.0, NOW))
    facts = replace(holding(a=1), node_metrics={A: signs})
    (only,) = told(serving(A, factors=factors), facts=facts)
    assert only.sentence == (
        "gets 100% of the new sessions: it has 1 session, which is its share;"
        " its health is no reason any more to give it less, so its share goes up to 100% and is now at 50%;"
        " its memory is not known, so its share goes up to 100% and is now at 70%;"
        " its CPU is at 95%, where 50% is usual, so its share goes down to 31% and is now at 60%"
    )
    assert [(each.score, each.share) for each in only.factors[2:5]] == [(0, 0.5), (None, 0.7), (19, 0.6)]


def test_a_factor_that_has_come_to_rest_says_where() -> None:
    held = {"cpu": Factor(0.6, 0.6, 1, "its CPU is at 57% with less than its full share")}
    (only,) = told(serving(A, factors=held), facts=holding(a=1))
    assert only.sentence.endswith("less than its full share, so its share is at 60%")


def test_a_level_that_is_no_reason_takes_nothing() -> None:
    common = {"health": Factor(1.0, 1.0, 2, "60% of its requests to PD fail; most are no better")}
    signs = NodeMetrics(pd_failures=MetricValue(0.6, NOW))
    (only,) = told(serving(A, factors=common), facts=replace(holding(a=1), node_metrics={A: signs}))
    assert only.sentence == "gets 100% of the new sessions: it has 1 session, which is its share"
    assert factor(only, "health") == FactorExplanation("health", 2, common["health"].reason, 1.0)


def test_vitals_without_consequence_are_told_too() -> None:
    signs = NodeMetrics(
        cpu=MetricValue(0.42, NOW),
        cpu_quota=4,
        memory=MetricValue(0.3, NOW),
        pd_failures=MetricValue(0.0, NOW),
        tikv_failures=MetricValue(0.01, NOW),
    )
    (only,) = told(serving(A), facts=Facts(node_metrics={A: signs}))
    assert only.factors[2:5] == (
        FactorExplanation(
            "health",
            0,
            "0 failures for each 100 requests to PD and 1 failures for each 100 requests to TiKV",
            1.0,
        ),
        FactorExplanation("memory", 0, "30% of its memory is in use", 1.0),
        FactorExplanation("cpu", 8, "42% of 4 cores in use", 1.0),
    )


def test_vitals_that_are_not_known_are_told_as_such_and_why() -> None:
    (only,) = told(serving(A))
    assert factor(only, "cpu") == FactorExplanation("cpu", None, "not known")
    (only,) = told(serving(A), facts=Facts(node_metrics_outage="Prometheus does not answer"))
    assert factor(only, "memory") == FactorExplanation(
        "memory", None, "not known: Prometheus does not answer"
    )


def test_a_node_that_is_not_in_service_gets_nothing_and_says_why() -> None:
    drained = serving(
        A, 0, state=State.DRAINING, reason="drained by an operator", eds_health=EdsHealth.DRAINING
    )
    first, second = told(drained, serving(B), facts=holding(a=3))
    assert (first.share, first.weight) == (0.0, 0)
    assert first.sentence == "gets no new sessions: drained by an operator"
    assert factor(first, "state") == FactorExplanation("state", 1, "draining: drained by an operator")
    assert factor(first, "connections") == FactorExplanation("connections", 3, "it has 3 sessions")
    assert second.share == 1.0


def test_a_node_that_is_kept_against_its_checks_says_so() -> None:
    kept = serving(A, state=State.UNHEALTHY, reason="it refuses")
    (only,) = told(kept, facts=holding(a=1), plan=Plan(panic_threshold_reason="only 0 of 1 pass"))
    assert only.sentence == "gets 100% of the new sessions: it has 1 session; only 0 of 1 pass"
    assert factor(only, "state").reason == "unhealthy: it refuses; only 0 of 1 pass"


def test_groups_share_their_own_sessions() -> None:
    first, second = told(serving(A, group="olap"), serving(B), facts=holding(a=1, b=1))
    assert first.sentence.startswith('gets 100% of the new sessions of group "olap": ')
    assert factor(first, "labels") == FactorExplanation("labels", 0, 'in group "olap"')
    assert second.share == 1.0


def test_a_node_that_stands_in_gets_something_only_without_the_others() -> None:
    spare = serving(B, backup=True)
    first, second = told(serving(A), spare)
    assert (first.share, second.share, second.weight) == (1.0, 0.0, 1600)
    assert second.sentence == (
        "gets no new sessions: it stands in only when no other node of its group is in service"
    )
    assert factor(second, "labels").score == 1
    down = serving(A, 0, state=State.UNHEALTHY, eds_health=EdsHealth.UNHEALTHY)
    _, second = told(down, spare)
    assert second.share == 1.0
    assert factor(second, "labels") == FactorExplanation(
        "labels", 0, "in no group; it stands in, since no other node of its group is in service"
    )


def test_slow_start_is_told() -> None:
    joined = serving(A, active_since=NOW - 10)
    (only,) = told(joined, facts=holding(a=1), policy=Policy(slow_start=30))
    assert "; it is in its slow start, at 37% of its share" in only.sentence


def test_where_envoys_keep_to_their_zone_shares_are_those_of_the_zone() -> None:
    here = serving(A, zone="x", local_weight=100)
    beside = serving(B, zone="x", local_weight=300)
    there = serving(C, zone="y")
    facts = replace(holding(a=1, b=3, c=1), envoy_zones={"one": "x", "two": "x", "three": "z"})
    first, _, third = told(here, beside, there, facts=facts)
    assert first.share == 0.25
    assert first.sentence.startswith('gets 25% of the new sessions that come by Envoys of its zone "x": ')
    assert factor(first, "location") == FactorExplanation(
        "location", 0, 'in zone "x", as 2 of 3 Envoys that say where they are'
    )
    assert third.share == pytest.approx(1 / 3)
    assert factor(third, "location").score == 1

    first, _, _ = told(here, beside, there, facts=facts, plan=Plan(overloaded_zones=frozenset({("", "x")})))
    assert first.share == pytest.approx(1 / 3)
    assert factor(first, "location").reason.endswith(
        "; the zone is full, so its Envoys use nodes elsewhere, too"
    )


def test_a_zone_may_not_be_known() -> None:
    first, second = told(serving(A), serving(B, zone="x"))
    assert factor(first, "location") == FactorExplanation(
        "location", None, "not known: it has no label `zone`"
    )
    assert factor(second, "location") == FactorExplanation(
        "location", None, 'in zone "x"; no Envoy says where it is'
    )


def test_the_policy_orders_the_factors_and_switches_them_off() -> None:
    (only,) = told(serving(A), policy=Policy(balance_policy=BalancePolicy.LOCATION))
    assert [each.name for each in only.factors] == [
        *("state", "labels", "location", "health", "memory", "cpu", "connections")
    ]
    (only,) = told(serving(A, zone="x"), policy=Policy(balance_policy=BalancePolicy.CONNECTION))
    off = "does not count: `balance.policy` is `connection`"
    assert [each.reason for each in only.factors[2:6]] == [off] * 4


def test_only_those_that_are_asked_for_are_explained() -> None:
    plan = Plan({A: serving(A), B: serving(B)})
    assert explain(plan, Facts(), POLICY, NOW, [B]).keys() == {B}
    assert explain(Plan(), Facts(), POLICY, NOW) == {}
