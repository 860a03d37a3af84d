"""Saved times that lie in the future, because the clock was set back, count from now on."""

from __future__ import annotations

from dataclasses import fields

from controlplane.model import Drain, Intents, Node, NodePlan, Plan, Source, State
from controlplane.restore import intents_until, plan_until

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


def test_no_time_of_an_intent_is_in_the_future() -> None:
    future = Intents(
        removed={"a": NOW + 5, "b": NOW - 5}, drains={"c": Drain(NOW + 5, 60), "d": Drain(NOW - 5, 60)}
    )
    past = intents_until(future, NOW)
    assert past.removed == {"a": NOW, "b": NOW - 5}
    assert past.drains == {"c": Drain(NOW, 60), "d": Drain(NOW - 5, 60)}
