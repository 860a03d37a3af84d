"""A rollout's view: since when nodes are healthy, which are out of service, and who drained them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from controlplane.model.facts import Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import Node, Source, State, Topology
from controlplane.model.plan import NodePlan, Plan, Policy
from controlplane.model.rollout import Stage, Step
from controlplane.rollouts.observation import (
    ClusterState,
    RolloutNodeView,
    RolloutView,
    observe,
)
from tests.support.controlplane.rollout_simulator import ROLLOUT_ID, rollout_spec, rollout_with_steps

A, B, C, D = (f"10.0.0.{number}:4000" for number in range(1, 5))
RECORD = rollout_with_steps(rollout_spec(A), Step(A, Stage.RETURNING, drain_requested_at=1.0))


def health(consecutive: int = 5, outcome: CheckStatus = CheckStatus.PASS) -> Health:
    return Health(
        status=CheckResult(outcome, "it says so", consecutive, 90.0),
        sql=CheckResult(outcome, "it says so", consecutive, 91.0),
    )


def planned(address: str = A, state: State = State.DRAINED, **overrides: Any) -> NodePlan:
    node = Node(address, Source.PD, "10.0.0.1:10080", started_at=overrides.pop("started_at", 100.0))
    node = replace(node, registered=overrides.pop("registered", True))
    return NodePlan(node, state, "a reason", 0.0, **overrides)


def observed(
    *plans: NodePlan, previous: RolloutView | None = None, now: float = 500.0, **overrides: Any
) -> RolloutView:
    inputs: dict[str, Any] = {
        "facts": Facts(health={A: health()}),
        "intents": Intents(),
        "policy": Policy(),
        **overrides,
    }
    rollout, others = inputs.pop("rollout", RECORD), inputs.pop("active_rollouts", ())
    cluster = ClusterState(Plan({plan.node.address: plan for plan in plans}), **inputs)
    return observe(cluster, rollout, others, None, previous or RolloutView(observing_since=3.0), now)


def node_view(*plans: NodePlan, **overrides: Any) -> RolloutNodeView:
    return observed(*plans, **overrides).nodes[A]


def test_health_streak_starts_at_the_first_healthy_observation() -> None:
    view = observed(planned())
    assert view.nodes[A].healthy_since == 500.0
    assert view.nodes[A].greeted_at == 91.0
    later = observed(planned(), previous=view, now=510.0)
    assert later.observing_since == 3.0
    assert later.nodes[A].healthy_since == 500.0


def test_health_streak_restarts_after_a_restart_or_failure() -> None:
    view = observed(planned())
    assert node_view(planned(started_at=101.0), previous=view, now=510.0).healthy_since == 510.0
    after_failure = Facts(health={A: health(consecutive=2)})
    assert node_view(planned(), previous=view, now=510.0, facts=after_failure).healthy_since == 510.0
    more_passes = Facts(health={A: health(consecutive=9)})
    assert node_view(planned(), previous=view, now=510.0, facts=more_passes).healthy_since == 500.0


def test_view_says_why_a_node_is_not_healthy() -> None:
    failing = Facts(health={A: health(1, CheckStatus.FAIL)})
    assert node_view(planned(), facts=failing).healthy_since is None
    assert node_view(planned(), facts=failing).failure == "does not pass its checks: it says so"
    assert node_view(planned(), facts=failing).greeted_at is None
    assert (
        node_view(planned(), facts=Facts()).failure == "does not pass its checks: it has not been checked yet"
    )
    assert node_view(planned(registered=False)).failure == "is registered, but its `ttl` is missing"
    assert node_view(planned(state=State.GONE, removal_since=7.0)).failure == "is not registered"


def test_health_of_pending_nodes_is_not_tracked() -> None:
    view = observed(planned(), rollout=rollout_with_steps(rollout_spec(A)))
    assert (view.nodes[A].healthy_since, view.nodes[A].started_at) == (None, 100.0)
    assert observed(planned(), previous=view, now=510.0).nodes[A].healthy_since == 510.0


def test_node_is_empty_only_when_its_sessions_are_confirmed_to_be_zero() -> None:
    assert node_view(planned()).is_empty
    assert not node_view(planned(state=State.DRAINING)).is_empty
    assert node_view(planned(state=State.GONE, removal_since=7.0)).is_empty


def test_node_is_warmed_up_after_its_slow_start() -> None:
    policy = Policy(slow_start=10.0)
    assert not node_view(planned(state=State.ACTIVE, active_since=491.0), policy=policy).is_warmed_up
    assert node_view(planned(state=State.ACTIVE, active_since=490.0), policy=policy).is_warmed_up
    assert not node_view(planned(state=State.UNHEALTHY), policy=policy).is_warmed_up


def test_unavailable_and_active_nodes() -> None:
    plans = [
        planned(A, State.UNHEALTHY),
        planned(B, State.DRAINED),
        planned(C, State.JOINING),
        planned(D, State.ACTIVE, group="olap"),
    ]
    view = observed(*plans, intents=Intents(drains={B: DrainIntent(0.0, 60.0)}))
    assert view.unavailable == {A: f"{A} is unhealthy: a reason"}
    assert view.active == {D: "olap"}
    ours = observed(
        *plans, intents=Intents(drains={B: DrainIntent(0.0, 60.0, owner=ROLLOUT_ID)}, removed={A: 1.0})
    )
    assert (dict(ours.unavailable), ours.owned_drains) == ({}, frozenset({B}))
    others = observed(*plans, intents=Intents(drains={B: DrainIntent(0.0, 60.0, owner="r0")}))
    assert (set(others.unavailable), others.owned_drains) == ({A, B}, frozenset())


def test_view_is_complete_only_with_complete_sources() -> None:
    assert not observed(planned()).is_complete
    topologies = {source: Topology(source, is_complete=True) for source in Source}
    assert observed(planned(), facts=Facts(topologies=topologies)).is_complete


def test_nodes_of_another_rollout_count_as_unavailable() -> None:
    both = rollout_spec(A, B)
    other = replace(rollout_with_steps(both, Step(A, Stage.DRAINING), Step(B, Stage.DONE)), id="r2")
    older = replace(
        rollout_with_steps(rollout_spec(C, D), Step(C, Stage.FAILED), Step(D, Stage.SKIPPED)), id="r0"
    )
    younger = replace(older, id="r3")
    rollout = rollout_with_steps(rollout_spec(D))
    plans = [planned(A, State.ACTIVE), planned(B, State.UNHEALTHY)]
    plans += [planned(address, State.ACTIVE) for address in (C, D)]
    view = observed(*plans, rollout=rollout, active_rollouts=[older, rollout, other])
    assert view.in_other_rollouts == {A: "r2", C: "r0"}
    assert view.unavailable == {A: f"the rollout r2 is working on {A}", B: f"{B} is unhealthy: a reason"}
    assert view.active.keys() == {C, D}
    alone = observed(*plans, rollout=rollout)
    assert observed(*plans, rollout=rollout, active_rollouts=[rollout, younger]) == alone
