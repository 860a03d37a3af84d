"""Metrics of hand-written snapshots: values, missing values, and removal of the series of forgotten nodes."""

from __future__ import annotations

from dataclasses import replace

from controlplane.metrics.registry import Metrics, MetricsSnapshot
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.health import Health
from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.model.nodes import Node, Source, State, Topology, TopologyProblem
from controlplane.model.plan import EdsHealth, Factor, NodePlan, Plan
from controlplane.model.rules import RuleHits, RuleSource, StatementRule
from controlplane.model.views import EnvoyView, NodeView, RuleView

A, B = "10.0.0.1:4000", "10.0.0.2:4000"


def planned(
    address: str, state: State = State.ACTIVE, eds_health: EdsHealth | None = EdsHealth.HEALTHY
) -> NodePlan:
    return NodePlan(Node(address, Source.PD), state, "a reason", 0.0, eds_health, weight=16)


def node_view(planned: NodePlan, connections: int | None = None, sessions: int | None = None) -> NodeView:
    return NodeView(planned, Health(), 100, connections, sessions)


def envoy(name: str, *, connected: bool = True, acked: str = "1", sessions: int | None = 0) -> EnvoyView:
    status = EnvoyStatus(name, "1.2.3.4:5", "1.40.0", "none", 1.0 if connected else None, 1.0, acked, "1")
    return EnvoyView(status, sessions)


def metrics(
    *nodes: NodeView, envoys: list[EnvoyView] | None = None, topologies: list[Topology] | None = None
) -> Metrics:
    return Metrics(
        lambda: MetricsSnapshot(
            nodes, envoys or [], topologies or [], is_panic_threshold_active=True, is_published=False
        )
    )


def sample(exported: Metrics, name: str, **labels: str) -> float | None:
    return exported.registry.get_sample_value(name, labels)


def test_unknown_values_have_no_series() -> None:
    exported = metrics(node_view(planned(A), connections=3), node_view(planned(B), sessions=0))
    assert sample(exported, "tidevoy_node_connections", node=A) == 3
    assert sample(exported, "tidevoy_node_connections", node=B) is None
    assert sample(exported, "tidevoy_node_sessions", node=A) is None
    assert sample(exported, "tidevoy_node_sessions", node=B) == 0


def test_rebalancing_sessions_are_exported_even_if_zero() -> None:
    exported = metrics(replace(node_view(planned(A)), rebalancing_sessions=12), node_view(planned(B)))
    name = "tidevoy_node_rebalance_sessions"
    assert [sample(exported, name, node=address) for address in (A, B)] == [12, 0]


def test_hits_of_rules_are_exported_for_each_envoy() -> None:
    view = RuleView(StatementRule("r", "{}"), RuleSource.API, {"e1": RuleHits(3, 5), "e2": RuleHits()})
    exported = Metrics(
        lambda: MetricsSnapshot((), (), (), is_panic_threshold_active=False, is_published=True, rules=[view])
    )
    name = "tidevoy_rule_hits_total"
    values = [
        sample(exported, name, envoy=envoy, rule="r", dry_run=dry_run)
        for envoy in ("e1", "e2")
        for dry_run in ("false", "true")
    ]
    assert values == [3, 5, 0, 0]


def test_every_state_is_exported_even_if_zero() -> None:
    exported = metrics(node_view(planned(A)), node_view(planned(B, State.DRAINING, EdsHealth.DRAINING)))
    counts = {state: sample(exported, "tidevoy_nodes", state=state.value) for state in State}
    assert counts == {state: float(state in (State.ACTIVE, State.DRAINING)) for state in State}
    assert sample(exported, "tidevoy_node_in_service", node=A) == 1
    assert sample(exported, "tidevoy_node_in_service", node=B) == 0
    assert sample(exported, "tidevoy_panic_threshold_active") == 1
    assert sample(exported, "tidevoy_plan_published") == 0


def test_envoys_show_if_connected_and_up_to_date() -> None:
    exported = metrics(envoys=[envoy("one"), envoy("two", connected=False, acked="0", sessions=None)])
    assert [sample(exported, "tidevoy_envoy_connected", envoy=name) for name in ("one", "two")] == [
        1,
        0,
    ]
    assert [sample(exported, "tidevoy_envoy_up_to_date", envoy=name) for name in ("one", "two")] == [
        1,
        0,
    ]
    assert [sample(exported, "tidevoy_envoy_sessions", envoy=name) for name in ("one", "two")] == [
        0,
        None,
    ]


def test_source_is_up_if_complete_and_without_outage() -> None:
    problem = TopologyProblem(Source.PD, "key", "reason")
    exported = metrics(
        topologies=[
            Topology(
                Source.PD, other_keyspace={A: "1"}, problems=(problem,), is_complete=True, outage="away"
            ),
            Topology(Source.STATIC, is_complete=True),
        ]
    )
    assert sample(exported, "tidevoy_source_up", source="pd") == 0
    assert sample(exported, "tidevoy_source_problems", source="pd") == 1
    assert sample(exported, "tidevoy_source_other_keyspace_nodes", source="pd") == 1
    assert sample(exported, "tidevoy_source_up", source="static") == 1
    assert sample(exported, "tidevoy_source_up", source="api") is None


def test_state_changes_are_counted_until_node_is_forgotten() -> None:
    exported = metrics()
    name = "tidevoy_node_state_changes_total"
    active = Plan({A: planned(A), B: planned(B)})
    drained = Plan({A: planned(A), B: planned(B, State.DRAINED, EdsHealth.DRAINING)})
    exported.count_state_changes(Plan(), active)
    exported.count_state_changes(active, drained)
    exported.count_state_changes(drained, active)
    assert sample(exported, name, node=A, state="active") == 1
    assert sample(exported, name, node=B, state="active") == 2
    assert sample(exported, name, node=B, state="drained") == 1
    exported.count_state_changes(active, Plan({A: planned(A)}))
    assert sample(exported, name, node=A, state="active") == 1
    assert {sample(exported, name, node=B, state=state.value) for state in State} == {None}


def test_node_metrics_and_reducing_factors_have_series() -> None:
    factors = {"cpu": Factor(0.6, 0.3, 1, "busy")}
    node_metrics = NodeMetrics(cpu=MetricValue(0.95, 1.0), pd_failures=MetricValue(0.0, 1.0))
    exported = metrics(
        replace(node_view(replace(planned(A), factors=factors)), metrics=node_metrics),
        node_view(planned(B)),
    )
    ratios = ("cpu", "memory", "pd_failure", "tikv_failure")
    assert [sample(exported, f"tidevoy_node_{ratio}_ratio", node=A) for ratio in ratios] == [
        0.95,
        None,
        0.0,
        None,
    ]
    assert sample(exported, "tidevoy_node_cpu_ratio", node=B) is None
    assert sample(exported, "tidevoy_node_factor_share", node=A, factor="cpu") == 0.6
    assert sample(exported, "tidevoy_node_factor_share", node=A, factor="memory") is None
    assert sample(exported, "tidevoy_node_metrics_outage") == 0


def test_node_metrics_outage_is_exported() -> None:
    exported = Metrics(
        lambda: MetricsSnapshot(
            [], [], [], is_panic_threshold_active=False, is_published=True, has_node_metrics_outage=True
        )
    )
    assert sample(exported, "tidevoy_node_metrics_outage") == 1
