"""What was saved before a restart, made fit for the clock of now. Pure.

Times are steady within a process only: when the system clock was set back between two runs, saved times may
lie in the future, and graces and slow starts would last that much longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from controlplane.model.intents import Intents
from controlplane.model.plan import NodePlan, Plan, RebalanceState
from controlplane.model.rollout import Rollout

T = TypeVar("T", float, float | None)


def clamp_plan_times(plan: Plan, now: float) -> Plan:
    """The plan with no time after `now`, and without a round of moves, for that may have been withdrawn."""
    nodes = {address: _clamp_node_times(planned, now) for address, planned in plan.nodes.items()}
    past = plan.rebalance
    until = now if past.outgoing else _clamp(past.round_ends_at, now)
    # What came of rounds is told by counts of moves, which begin anew.
    rebalance = RebalanceState(_clamp(past.since, now), past.reason, past.round, until)
    return replace(plan, nodes=nodes, rebalance=rebalance)


def clamp_intent_times(intents: Intents, now: float) -> Intents:
    """The intents with no time after `now`."""
    drains = {a: replace(drain, since=_clamp(drain.since, now)) for a, drain in intents.drains.items()}
    removed: Mapping[str, float] = {a: _clamp(since, now) for a, since in intents.removed.items()}
    ended: Mapping[str, float] = {envoy: _clamp(at, now) for envoy, at in intents.ended_envoys.items()}
    return replace(intents, drains=drains, removed=removed, ended_envoys=ended)


def sort_steps(rollout: Rollout) -> Rollout:
    """A rollout with its steps in the order of their turns, which JSON with sorted keys does not keep."""
    positions = {address: turn for turn, address in enumerate(rollout.spec.nodes)}
    last = len(positions)
    steps = sorted(rollout.steps.items(), key=lambda item: positions.get(item[0], last))
    return replace(rollout, steps=MappingProxyType(dict(steps)))


def _clamp_node_times(planned: NodePlan, now: float) -> NodePlan:
    return replace(
        planned,
        since=_clamp(planned.since, now),
        active_since=_clamp(planned.active_since, now),
        unregistered_since=_clamp(planned.unregistered_since, now),
        closed_since=_clamp(planned.closed_since, now),
        removal_since=_clamp(planned.removal_since, now),
    )


def _clamp(at: T, now: float) -> T:
    return at if at is None else min(at, now)
