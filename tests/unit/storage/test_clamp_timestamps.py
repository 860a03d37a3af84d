"""Saved times that lie in the future, because the clock was set back, count from now on."""

from __future__ import annotations

from dataclasses import fields, replace

from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan, RebalanceState
from controlplane.storage.clamp_timestamps import clamp_intent_times, clamp_plan_times

NOW = 1000.0
TIMES = [field.name for field in fields(NodePlan) if field.name.endswith("since")]


def saved(at: float | None) -> Plan:
    node = Node("10.0.0.1:4000", Source.PD)
    times = dict.fromkeys(TIMES, at) | {"since": at or 0.0}
    return Plan(nodes={node.address: NodePlan(node, State.GONE, "", **times)})


def test_no_time_of_a_plan_is_in_the_future() -> None:
    assert len(TIMES) == 5
    assert clamp_plan_times(saved(NOW + 500), NOW) == saved(NOW)
    assert clamp_plan_times(saved(NOW - 500), NOW) == saved(NOW - 500)
    assert clamp_plan_times(saved(None), NOW) == saved(None)


def test_a_round_that_was_going_on_is_over() -> None:
    """It may have been withdrawn since the plan was saved, and Envoys would take it for a new one."""
    five = {"00000000000000aa": 5}
    asked = RebalanceState(NOW - 9, "why", 7, NOW + 3, {"10.0.0.1:4000": five}, {"10.0.0.2:4000": five})
    past = replace(saved(NOW), rebalance=asked)
    assert clamp_plan_times(past, NOW).rebalance == RebalanceState(NOW - 9, "why", 7, NOW)
    idle = replace(saved(NOW), rebalance=RebalanceState(NOW + 9, "why", 7, NOW + 3))
    assert clamp_plan_times(idle, NOW).rebalance == RebalanceState(NOW, "why", 7, NOW)
    rested = replace(saved(NOW), rebalance=RebalanceState(None, "why", 7, NOW - 3))
    assert clamp_plan_times(rested, NOW).rebalance == rested.rebalance


def test_a_pause_between_rounds_ends_with_a_restart() -> None:
    """Or it might last as long as the clock was set back."""
    resting = RebalanceState(
        NOW - 9, "why", 7, NOW - 3, stalled_rounds=4, migrated_before=9, paused_until=NOW + 5000
    )
    assert clamp_plan_times(replace(saved(NOW), rebalance=resting), NOW).rebalance == RebalanceState(
        NOW - 9, "why", 7, NOW - 3
    )


def test_no_time_of_an_intent_is_in_the_future() -> None:
    future = Intents(
        removed={"a": NOW + 5, "b": NOW - 5},
        drains={"c": DrainIntent(NOW + 5, 60), "d": DrainIntent(NOW - 5, 60)},
    )
    past = clamp_intent_times(future, NOW)
    assert past.removed == {"a": NOW, "b": NOW - 5}
    assert past.drains == {"c": DrainIntent(NOW, 60), "d": DrainIntent(NOW - 5, 60)}
