"""Saved times in the future, after the clock was set back, become the current time."""

from __future__ import annotations

from dataclasses import fields, replace

from controlplane.model.capture import Capture
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.limits import LimitPlan, LimitRule
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan, RebalanceState
from controlplane.storage.file_formats import INTENTS_CODEC, PLAN_CODEC
from controlplane.storage.restored_state import clamp_intent_times, clamp_plan_times
from controlplane.storage.store import SavedPlan

NOW = 1000.0
TIMES = [field.name for field in fields(NodePlan) if field.name.endswith("since")]


def saved(at: float | None) -> Plan:
    node = Node("10.0.0.1:4000", Source.PD)
    times = dict.fromkeys(TIMES, at) | {"since": at or 0.0}
    return Plan(nodes={node.address: NodePlan(node, State.GONE, "", **times)})


def test_clamps_plan_times() -> None:
    assert len(TIMES) == 5
    assert clamp_plan_times(saved(NOW + 500), NOW) == saved(NOW)
    assert clamp_plan_times(saved(NOW - 500), NOW) == saved(NOW - 500)
    assert clamp_plan_times(saved(None), NOW) == saved(None)


def test_saved_limits_stay_and_their_time_is_clamped() -> None:
    rule = LimitRule("reporting", "report", "10.0.0.0/8", 20, 2.5)
    limit = LimitPlan(rule, {"a": 12, "b": 8}, 3, 2, {"b": 9}, {"a": "envoy-1"}, NOW + 500)
    plan = replace(saved(NOW), limits={rule.name: limit})
    decoded = PLAN_CODEC.decode(PLAN_CODEC.encode(SavedPlan(plan, {}, 1, 1, 1))).plan
    assert decoded.limits == {rule.name: limit}
    assert decoded.limits[rule.name].changed_at == NOW + 500
    assert clamp_plan_times(decoded, NOW).limits[rule.name].changed_at == NOW


def test_ends_running_round() -> None:
    """If the round was cancelled after it had been saved, Envoys would apply it as a new round."""
    sessions = {"00000000000000aa": 5}
    running = RebalanceState(
        NOW - 9, "why", 7, NOW + 3, {"10.0.0.1:4000": sessions}, {"10.0.0.2:4000": sessions}
    )
    with_round = replace(saved(NOW), rebalance=running)
    assert clamp_plan_times(with_round, NOW).rebalance == RebalanceState(NOW - 9, "why", 7, NOW)
    idle = replace(saved(NOW), rebalance=RebalanceState(NOW + 9, "why", 7, NOW + 3))
    assert clamp_plan_times(idle, NOW).rebalance == RebalanceState(NOW, "why", 7, NOW)
    ended = replace(saved(NOW), rebalance=RebalanceState(None, "why", 7, NOW - 3))
    assert clamp_plan_times(ended, NOW).rebalance == ended.rebalance


def test_ends_pause_between_rounds() -> None:
    """A clock that was set back would make the pause longer."""
    paused = RebalanceState(
        NOW - 9, "why", 7, NOW - 3, stalled_rounds=4, migrated_before=9, paused_until=NOW + 5000
    )
    assert clamp_plan_times(replace(saved(NOW), rebalance=paused), NOW).rebalance == RebalanceState(
        NOW - 9, "why", 7, NOW - 3
    )


def test_clamps_intent_times() -> None:
    future = Intents(
        removed={"a": NOW + 5, "b": NOW - 5},
        drains={"c": DrainIntent(NOW + 5, 60), "d": DrainIntent(NOW - 5, 60)},
    )
    clamped = clamp_intent_times(future, NOW)
    assert clamped.removed == {"a": NOW, "b": NOW - 5}
    assert clamped.drains == {"c": DrainIntent(NOW, 60), "d": DrainIntent(NOW - 5, 60)}


def test_saved_capture_stays_unless_it_would_never_end() -> None:
    capture = Capture("one", NOW + 5, NOW + 3605, ("e1",), ("app",), ("g",))
    intents = Intents(capture=capture)
    decoded = INTENTS_CODEC.decode(INTENTS_CODEC.encode(intents))
    assert decoded == intents
    assert clamp_intent_times(decoded, NOW) == intents  # `until` identifies it
    later = Intents(capture=replace(capture, started_at=NOW + 1e6, until=NOW + 1e6 + 60))
    clamped = clamp_intent_times(later, NOW).capture
    assert clamped is not None
    assert (clamped.started_at, clamped.until) == (NOW, NOW + 87_000)
