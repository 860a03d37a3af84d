"""Metrics from hand-made sights: values, missing ones, and series that must not outlive their node."""

from __future__ import annotations

from dataclasses import replace

from controlplane.metrics.registry import Metrics, MetricsSnapshot
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.health import Health
from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.model.nodes import Node, Source, State, Topology, TopologyProblem
from controlplane.model.plan import EdsHealth, Factor, NodePlan, Plan
from controlplane.model.views import EnvoyView, NodeView

A, B = "10.0.0.1:4000", "10.0.0.2:4000"


def planned(
    address: str, state: State = State.ACTIVE, advice: EdsHealth | None = EdsHealth.HEALTHY
) -> NodePlan:
    return NodePlan(Node(address, Source.PD), state, "a reason", 0.0, advice, weight=16)


def seen(planned: NodePlan, connections: int | None = None, sessions: int | None = None) -> NodeView:
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


def value(of: Metrics, name: str, **labels: str) -> float | None:
    return of.registry.get_sample_value(name, labels)


def test_what_is_not_known_has_no_series() -> None:
    shown = metrics(seen(planned(A), connections=3), seen(planned(B), sessions=0))
    assert value(shown, "tidevoy_node_connections", node=A) == 3
    assert value(shown, "tidevoy_node_connections", node=B) is None
    assert value(shown, "tidevoy_node_sessions", node=A) is None
    assert value(shown, "tidevoy_node_sessions", node=B) == 0


def test_sessions_that_are_asked_to_move_show_also_at_zero() -> None:
    shown = metrics(replace(seen(planned(A)), rebalancing_sessions=12), seen(planned(B)))
    name = "tidevoy_node_rebalance_sessions"
    assert [value(shown, name, node=address) for address in (A, B)] == [12, 0]


def test_every_state_is_counted_also_at_zero() -> None:
    shown = metrics(seen(planned(A)), seen(planned(B, State.DRAINING, EdsHealth.DRAINING)))
    counts = {state: value(shown, "tidevoy_nodes", state=state.value) for state in State}
    assert counts == {state: float(state in (State.ACTIVE, State.DRAINING)) for state in State}
    assert value(shown, "tidevoy_node_in_service", node=A) == 1
    assert value(shown, "tidevoy_node_in_service", node=B) == 0
    assert value(shown, "tidevoy_floor_active") == 1
    assert value(shown, "tidevoy_published") == 0


def test_envoys_show_whether_they_are_there_and_up_to_date() -> None:
    shown = metrics(envoys=[envoy("one"), envoy("two", connected=False, acked="0", sessions=None)])
    assert [value(shown, "tidevoy_envoy_connected", envoy=name) for name in ("one", "two")] == [1, 0]
    assert [value(shown, "tidevoy_envoy_up_to_date", envoy=name) for name in ("one", "two")] == [1, 0]
    assert [value(shown, "tidevoy_envoy_sessions", envoy=name) for name in ("one", "two")] == [0, None]


def test_a_source_is_up_when_it_is_complete_and_not_away() -> None:
    problem = TopologyProblem(Source.PD, "key", "reason")
    shown = metrics(
        topologies=[
            Topology(
                Source.PD, other_keyspace={A: "1"}, problems=(problem,), is_complete=True, outage="away"
            ),
            Topology(Source.STATIC, is_complete=True),
        ]
    )
    assert value(shown, "tidevoy_source_up", source="pd") == 0
    assert value(shown, "tidevoy_source_problems", source="pd") == 1
    assert value(shown, "tidevoy_source_foreign_nodes", source="pd") == 1
    assert value(shown, "tidevoy_source_up", source="static") == 1
    assert value(shown, "tidevoy_source_up", source="api") is None


def test_changes_of_state_are_counted_until_the_node_is_forgotten() -> None:
    shown = metrics()
    name = "tidevoy_node_state_changes_total"
    active = Plan({A: planned(A), B: planned(B)})
    drained = Plan({A: planned(A), B: planned(B, State.DRAINED, EdsHealth.DRAINING)})
    shown.count_state_changes(Plan(), active)
    shown.count_state_changes(active, drained)
    shown.count_state_changes(drained, active)
    assert value(shown, name, node=A, state="active") == 1
    assert value(shown, name, node=B, state="active") == 2
    assert value(shown, name, node=B, state="drained") == 1
    shown.count_state_changes(active, Plan({A: planned(A)}))
    assert value(shown, name, node=A, state="active") == 1
    assert {value(shown, name, node=B, state=state.value) for state in State} == {None}


def test_vitals_that_are_known_have_series_and_so_have_factors_that_take_something() -> None:
    factors = {"cpu": Factor(0.6, 0.3, 1, "busy")}
    vitals = NodeMetrics(cpu=MetricValue(0.95, 1.0), pd_failures=MetricValue(0.0, 1.0))
    shown = metrics(
        replace(seen(replace(planned(A), factors=factors)), metrics=vitals),
        seen(planned(B)),
    )
    ratios = ("cpu", "memory", "pd_failure", "tikv_failure")
    assert [value(shown, f"tidevoy_node_{each}_ratio", node=A) for each in ratios] == [0.95, None, 0.0, None]
    assert value(shown, "tidevoy_node_cpu_ratio", node=B) is None
    assert value(shown, "tidevoy_node_factor_share", node=A, factor="cpu") == 0.6
    assert value(shown, "tidevoy_node_factor_share", node=A, factor="memory") is None
    assert value(shown, "tidevoy_vitals_outage") == 0


def test_an_outage_of_vitals_shows() -> None:
    away = Metrics(
        lambda: MetricsSnapshot(
            [], [], [], is_panic_threshold_active=False, is_published=True, has_node_metrics_outage=True
        )
    )
    assert value(away, "tidevoy_vitals_outage") == 1
