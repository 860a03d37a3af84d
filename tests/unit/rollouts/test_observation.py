"""What a rollout sees: since when a node is steady, who is out of service, and whose drains there are."""

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
    HealthStreak,
    RolloutNodeView,
    RolloutView,
    observe,
    with_other_rollouts,
)
from tests.support.controlplane.rollout_simulator import ROLLOUT_ID, rollout_spec, rollout_with_steps

A, B, C, D = (f"10.0.0.{number}:4000" for number in range(1, 5))
RECORD = rollout_with_steps(rollout_spec(A), Step(A, Stage.RETURNING, drain_requested_at=1.0))


def health(streak: int = 5, outcome: CheckStatus = CheckStatus.PASS) -> Health:
    return Health(
        status=CheckResult(outcome, "it says so", streak, 90.0),
        sql=CheckResult(outcome, "it says so", streak, 91.0),
    )


def planned(address: str = A, state: State = State.DRAINED, **more: Any) -> NodePlan:
    node = Node(address, Source.PD, "10.0.0.1:10080", started_at=more.pop("started_at", 100.0))
    node = replace(node, registered=more.pop("registered", True))
    return NodePlan(node, state, "a reason", 0.0, **more)


def looked(
    *plans: NodePlan, past: dict[str, HealthStreak] | None = None, now: float = 500.0, **more: Any
) -> tuple[RolloutView, dict[str, HealthStreak]]:
    said: dict[str, Any] = {
        "facts": Facts(health={A: health()}),
        "intents": Intents(),
        "policy": Policy(),
        **more,
    }
    outlook = ClusterState(Plan({each.node.address: each for each in plans}), **said)
    sight, footings = observe(outlook, RECORD, past or {}, now)
    return sight, dict(footings)


def of(*plans: NodePlan, **more: Any) -> RolloutNodeView:
    return looked(*plans, **more)[0].nodes[A]


def test_a_node_is_steady_from_when_it_was_seen_so_first() -> None:
    sight, footings = looked(planned())
    assert sight.nodes[A].healthy_since == 500.0
    assert sight.nodes[A].greeted_at == 91.0
    later, _ = looked(planned(), past=footings, now=510.0)
    assert later.nodes[A].healthy_since == 500.0


def test_it_begins_anew_with_another_start_or_a_failure_in_between() -> None:
    _, footings = looked(planned())
    assert of(planned(started_at=101.0), past=footings, now=510.0).healthy_since == 510.0
    failed_meanwhile = Facts(health={A: health(streak=2)})
    assert of(planned(), past=footings, now=510.0, facts=failed_meanwhile).healthy_since == 510.0
    grown = Facts(health={A: health(streak=9)})
    assert of(planned(), past=footings, now=510.0, facts=grown).healthy_since == 500.0


def test_what_ails_a_node_is_told() -> None:
    failing = Facts(health={A: health(1, CheckStatus.FAIL)})
    assert of(planned(), facts=failing).healthy_since is None
    assert of(planned(), facts=failing).failure == "does not pass its checks: it says so"
    assert of(planned(), facts=failing).greeted_at is None
    assert of(planned(), facts=Facts()).failure == "does not pass its checks: it has not been checked yet"
    assert of(planned(registered=False)).failure == "is registered, but its `ttl` is missing"
    assert of(planned(state=State.GONE, removal_since=7.0)).failure == "is not registered"


def test_a_node_that_waits_for_its_turn_is_not_looked_at_closely() -> None:
    outlook = ClusterState(Plan({A: planned()}), Facts(health={A: health()}), Intents(), Policy())
    sight, footings = observe(outlook, rollout_with_steps(rollout_spec(A)), {}, 500.0)
    assert (sight.nodes[A].healthy_since, sight.nodes[A].started_at, footings) == (None, 100.0, {})


def test_a_node_is_empty_when_it_is_surely_so() -> None:
    assert of(planned()).is_empty
    assert not of(planned(state=State.DRAINING)).is_empty
    assert of(planned(state=State.GONE, removal_since=7.0)).is_empty


def test_it_is_warm_after_its_slow_start() -> None:
    policy = Policy(slow_start=10.0)
    assert not of(planned(state=State.ACTIVE, active_since=491.0), policy=policy).is_warmed_up
    assert of(planned(state=State.ACTIVE, active_since=490.0), policy=policy).is_warmed_up
    assert not of(planned(state=State.UNHEALTHY), policy=policy).is_warmed_up


def test_who_is_missed() -> None:
    plans = [
        planned(A, State.UNHEALTHY),
        planned(B, State.DRAINED),
        planned(C, State.JOINING),
        planned(D, State.ACTIVE, group="olap"),
    ]
    sight, _ = looked(*plans, intents=Intents(drains={B: DrainIntent(0.0, 60.0)}))
    assert sight.unavailable == {A: f"{A} is unhealthy: a reason"}
    assert sight.active == {D: "olap"}
    ours, _ = looked(
        *plans, intents=Intents(drains={B: DrainIntent(0.0, 60.0, owner=ROLLOUT_ID)}, removed={A: 1.0})
    )
    assert (dict(ours.unavailable), ours.drained_by_us) == ({}, frozenset({B}))
    others, _ = looked(*plans, intents=Intents(drains={B: DrainIntent(0.0, 60.0, owner="r0")}))
    assert (set(others.unavailable), others.drained_by_us) == ({A, B}, frozenset())


def test_silence_of_a_source_is_no_news() -> None:
    assert not looked(planned())[0].is_complete
    told = {source: Topology(source, is_complete=True) for source in Source}
    assert looked(planned(), facts=Facts(topologies=told))[0].is_complete


def test_what_another_rollout_has_taken_is_out_whatever_is_seen_of_it() -> None:
    both = rollout_spec(A, B)
    other = replace(rollout_with_steps(both, Step(A, Stage.DRAINING), Step(B, Stage.DONE)), id="r2")
    older = replace(
        rollout_with_steps(rollout_spec(C, D), Step(C, Stage.FAILED), Step(D, Stage.SKIPPED)), id="r0"
    )
    younger = replace(older, id="r3")
    record = rollout_with_steps(rollout_spec(D))
    seen = RolloutView(active={A: "", B: "", C: "", D: ""}, unavailable={B: "it is down"})
    sight = with_other_rollouts(seen, record, [older, record, other])
    assert sight.in_other_rollouts == {A: "r2", C: "r0"}
    assert sight.unavailable == {A: f"the rollout r2 has {A} in hand", B: "it is down"}
    assert sight.active.keys() == {B, C, D}
    assert with_other_rollouts(seen, record, [record, younger]) == seen
