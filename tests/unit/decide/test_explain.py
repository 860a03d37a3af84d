"""Explanations of node shares: each factor, and the summary."""

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


def serving_node(address: str, weight: int = 1600, **more: object) -> NodePlan:
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


def facts_with_sessions(**counts: int) -> Facts:
    sessions = {{"a": A, "b": B, "c": C}[name]: count for name, count in counts.items()}
    return Facts(loads={"one": EnvoyLoad("one", NOW, sessions)}, sessions_by_endpoint=sessions)


def explanations(
    *nodes: NodePlan, facts: Facts | None = None, policy: Policy = POLICY, plan: Plan | None = None
) -> list[NodeExplanation]:
    plan = replace(plan or Plan(), nodes={p.node.address: p for p in nodes})
    return list(explain(plan, facts or Facts(), policy, NOW).values())


def factor(explanation: NodeExplanation, name: str) -> FactorExplanation:
    return next(f for f in explanation.factors if f.name == name)


def test_explains_node_with_its_share() -> None:
    first, second = explanations(
        serving_node(A, 1600), serving_node(B, 4800), facts=facts_with_sessions(a=2, b=2)
    )
    assert (first.weight, first.share) == (1600, 0.25)
    assert first.sentence == "gets 25% of the new sessions: it has 2 sessions, which is its share"
    assert second.share == 0.75
    assert [f.name for f in first.factors] == [
        *("state", "labels", "health", "memory", "cpu", "location", "connections")
    ]
    assert factor(first, "state") == FactorExplanation("state", 0, "active: it passes its checks")
    assert factor(first, "labels") == FactorExplanation("labels", 0, "in no group")
    assert factor(first, "connections") == FactorExplanation(
        "connections", 2, "it has 2 sessions, which is its share"
    )


def test_sentence_has_deviation_from_share() -> None:
    plan = {A: serving_node(A), B: serving_node(B)}
    # Sessions of Envoys without a module cannot migrate, so they are the lower limit of a share.
    facts = Facts(sessions_by_address={A: 41, B: 35}, loads={"one": EnvoyLoad("one", NOW)})
    first, second = explain(Plan(plan), facts, POLICY, NOW).values()
    assert "it has 41 sessions, 3 more than its share of 38" in first.sentence
    assert "it has 35 sessions, 3 fewer than its share of 38" in second.sentence


def test_session_count_may_be_unknown() -> None:
    (only,) = explanations(serving_node(A))
    assert only.sentence == "gets 100% of the new sessions: its session count is not known"
    assert factor(only, "connections").score is None


def test_sentence_has_current_and_target_share_of_factors() -> None:
    factors = {
        "health": Factor(0.5, 1.0),
        "memory": Factor(0.7, 1.0, 0, "not known"),
        "cpu": Factor(0.6, 0.31, 1, "its CPU is at 95%, where 50% is normal in its group"),
    }
    metrics = NodeMetrics(cpu=MetricValue(0.95, NOW), cpu_quota=4, pd_failures=MetricValue(0.0, NOW))
    facts = replace(facts_with_sessions(a=1), node_metrics={A: metrics})
    (only,) = explanations(serving_node(A, factors=factors), facts=facts)
    assert only.sentence == (
        "gets 100% of the new sessions: it has 1 session, which is its share;"
        " its health no longer reduces its share, so its share goes up to 100% and is now at 50%;"
        " its memory is not known, so its share goes up to 100% and is now at 70%;"
        " its CPU is at 95%, where 50% is normal in its group,"
        " so its share goes down to 31% and is now at 60%"
    )
    assert [(f.score, f.share) for f in only.factors[2:5]] == [(0, 0.5), (None, 0.7), (19, 0.6)]


def test_settled_factor_has_only_its_share() -> None:
    factors = {"cpu": Factor(0.6, 0.6, 1, "its CPU is at 57% with a reduced share")}
    (only,) = explanations(serving_node(A, factors=factors), facts=facts_with_sessions(a=1))
    assert only.sentence.endswith("a reduced share, so its share is at 60%")


def test_common_level_does_not_reduce_the_share() -> None:
    common = {"health": Factor(1.0, 1.0, 2, "60% of its requests to PD fail; most have the same problem")}
    metrics = NodeMetrics(pd_failures=MetricValue(0.6, NOW))
    (only,) = explanations(
        serving_node(A, factors=common), facts=replace(facts_with_sessions(a=1), node_metrics={A: metrics})
    )
    assert only.sentence == "gets 100% of the new sessions: it has 1 session, which is its share"
    assert factor(only, "health") == FactorExplanation("health", 2, common["health"].reason, 1.0)


def test_normal_metrics_are_explained() -> None:
    metrics = NodeMetrics(
        cpu=MetricValue(0.42, NOW),
        cpu_quota=4,
        memory=MetricValue(0.3, NOW),
        pd_failures=MetricValue(0.0, NOW),
        tikv_failures=MetricValue(0.01, NOW),
    )
    (only,) = explanations(serving_node(A), facts=Facts(node_metrics={A: metrics}))
    assert only.factors[2:5] == (
        FactorExplanation(
            "health",
            0,
            "0 failures per 100 requests to PD and 1 failures per 100 requests to TiKV",
            1.0,
        ),
        FactorExplanation("memory", 0, "30% of its memory is in use", 1.0),
        FactorExplanation("cpu", 8, "42% of 4 cores in use", 1.0),
    )


def test_unknown_metrics_have_a_reason() -> None:
    (only,) = explanations(serving_node(A))
    assert factor(only, "cpu") == FactorExplanation("cpu", None, "not known")
    (only,) = explanations(serving_node(A), facts=Facts(node_metrics_outage="Prometheus does not answer"))
    assert factor(only, "memory") == FactorExplanation(
        "memory", None, "not known: Prometheus does not answer"
    )


def test_node_out_of_service_has_no_share() -> None:
    drained = serving_node(
        A, 0, state=State.DRAINING, reason="drained by an operator", eds_health=EdsHealth.DRAINING
    )
    first, second = explanations(drained, serving_node(B), facts=facts_with_sessions(a=3))
    assert (first.share, first.weight) == (0.0, 0)
    assert first.sentence == "gets no new sessions: drained by an operator"
    assert factor(first, "state") == FactorExplanation("state", 1, "draining: drained by an operator")
    assert factor(first, "connections") == FactorExplanation("connections", 3, "it has 3 sessions")
    assert second.share == 1.0


def test_panic_threshold_is_explained() -> None:
    unhealthy = serving_node(A, state=State.UNHEALTHY, reason="it refuses")
    (only,) = explanations(
        unhealthy, facts=facts_with_sessions(a=1), plan=Plan(panic_threshold_reason="only 0 of 1 pass")
    )
    assert only.sentence == "gets 100% of the new sessions: it has 1 session; only 0 of 1 pass"
    assert factor(only, "state").reason == "unhealthy: it refuses; only 0 of 1 pass"


def test_share_is_within_the_group() -> None:
    first, second = explanations(
        serving_node(A, group="olap"), serving_node(B), facts=facts_with_sessions(a=1, b=1)
    )
    assert first.sentence.startswith('gets 100% of the new sessions of group "olap": ')
    assert factor(first, "labels") == FactorExplanation("labels", 0, 'in group "olap"')
    assert second.share == 1.0


def test_backup_has_a_share_only_without_primaries() -> None:
    backup = serving_node(B, backup=True)
    first, second = explanations(serving_node(A), backup)
    assert (first.share, second.share, second.weight) == (1.0, 0.0, 1600)
    assert second.sentence == (
        "gets no new sessions: it is a backup, used only when no other node of its group is in service"
    )
    assert factor(second, "labels").score == 1
    down = serving_node(A, 0, state=State.UNHEALTHY, eds_health=EdsHealth.UNHEALTHY)
    _, second = explanations(down, backup)
    assert second.share == 1.0
    assert factor(second, "labels") == FactorExplanation(
        "labels", 0, "in no group; it is a backup, in use because no other node of its group is in service"
    )


def test_slow_start_is_explained() -> None:
    joining = serving_node(A, active_since=NOW - 10)
    (only,) = explanations(joining, facts=facts_with_sessions(a=1), policy=Policy(slow_start=30))
    assert "; it is in its slow start, at 37% of its share" in only.sentence


def test_share_is_within_the_zone_of_local_envoys() -> None:
    first_local = serving_node(A, zone="x", local_weight=100)
    second_local = serving_node(B, zone="x", local_weight=300)
    remote = serving_node(C, zone="y")
    facts = replace(facts_with_sessions(a=1, b=3, c=1), envoy_zones={"one": "x", "two": "x", "three": "z"})
    first, _, third = explanations(first_local, second_local, remote, facts=facts)
    assert first.share == 0.25
    assert first.sentence.startswith('gets 25% of the new sessions through Envoys of its zone "x": ')
    assert factor(first, "location") == FactorExplanation(
        "location", 0, 'in zone "x", like 2 of 3 Envoys that report a zone'
    )
    assert third.share == pytest.approx(1 / 3)
    assert factor(third, "location").score == 1

    first, _, _ = explanations(
        first_local, second_local, remote, facts=facts, plan=Plan(overloaded_zones=frozenset({("", "x")}))
    )
    assert first.share == pytest.approx(1 / 3)
    assert factor(first, "location").reason.endswith(
        "; the zone is overloaded, so its Envoys also use nodes in other zones"
    )


def test_zone_may_be_unknown() -> None:
    first, second = explanations(serving_node(A), serving_node(B, zone="x"))
    assert factor(first, "location") == FactorExplanation(
        "location", None, "not known: it has no label `zone`"
    )
    assert factor(second, "location") == FactorExplanation(
        "location", None, 'in zone "x"; no Envoy reports its zone'
    )


def test_policy_orders_and_disables_factors() -> None:
    (only,) = explanations(serving_node(A), policy=Policy(balance_policy=BalancePolicy.LOCATION))
    assert [f.name for f in only.factors] == [
        *("state", "labels", "location", "health", "memory", "cpu", "connections")
    ]
    (only,) = explanations(serving_node(A, zone="x"), policy=Policy(balance_policy=BalancePolicy.CONNECTION))
    not_used = "not used: `balance.policy` is `connection`"
    assert [f.reason for f in only.factors[2:6]] == [not_used] * 4


def test_explains_requested_nodes_only() -> None:
    plan = Plan({A: serving_node(A), B: serving_node(B)})
    assert explain(plan, Facts(), POLICY, NOW, [B]).keys() == {B}
    assert explain(Plan(), Facts(), POLICY, NOW) == {}
