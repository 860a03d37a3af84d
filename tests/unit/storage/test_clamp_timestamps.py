"""Saved times that lie in the future, because the clock was set back, count from now on."""

from __future__ import annotations

from dataclasses import fields, replace

from controlplane.model.intents import Drain, Intents
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan, Rebalance
from controlplane.storage.clamp_timestamps import intents_until, plan_until

NOW = 1000.0
TIMES = [field.name for field in fields(NodePlan) if field.name.endswith("since")]


def saved(at: float | None) -> Plan:
    node = Node("10.0.0.1:4000", Source.PD)
    times = dict.fromkeys(TIMES, at) | {"since": at or 0.0}
    return Plan(nodes={node.address: NodePlan(node, State.GONE, "", **times)})


def test_no_time_of_a_plan_is_in_the_future() -> None:
    assert len(TIMES) == 5
    assert plan_until(saved(NOW + 500), NOW) == saved(NOW)
    assert plan_until(saved(NOW - 500), NOW) == saved(NOW - 500)
    assert plan_until(saved(None), NOW) == saved(None)


def test_a_round_that_was_going_on_is_over() -> None:
    """It may have been withdrawn since the plan was saved, and Envoys would take it for a new one."""
    five = {"00000000000000aa": 5}
    asked = Rebalance(NOW - 9, "why", 7, NOW + 3, {"10.0.0.1:4000": five}, {"10.0.0.2:4000": five})
    past = replace(saved(NOW), rebalance=asked)
    assert plan_until(past, NOW).rebalance == Rebalance(NOW - 9, "why", 7, NOW)
    idle = replace(saved(NOW), rebalance=Rebalance(NOW + 9, "why", 7, NOW + 3))
    assert plan_until(idle, NOW).rebalance == Rebalance(NOW, "why", 7, NOW)
    rested = replace(saved(NOW), rebalance=Rebalance(None, "why", 7, NOW - 3))
    assert plan_until(rested, NOW).rebalance == rested.rebalance


def test_a_pause_between_rounds_ends_with_a_restart() -> None:
    """Or it might last as long as the clock was set back."""
    resting = Rebalance(NOW - 9, "why", 7, NOW - 3, futile=4, moved=9, rests_until=NOW + 5000)
    assert plan_until(replace(saved(NOW), rebalance=resting), NOW).rebalance == Rebalance(
        NOW - 9, "why", 7, NOW - 3
    )


def test_no_time_of_an_intent_is_in_the_future() -> None:
    future = Intents(
        removed={"a": NOW + 5, "b": NOW - 5}, drains={"c": Drain(NOW + 5, 60), "d": Drain(NOW - 5, 60)}
    )
    past = intents_until(future, NOW)
    assert past.removed == {"a": NOW, "b": NOW - 5}
    assert past.drains == {"c": Drain(NOW, 60), "d": Drain(NOW - 5, 60)}
