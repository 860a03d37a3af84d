"""Clamp saved timestamps to the current clock after a restart. No I/O.

Times are steady within a process only: if the system clock was set back between two runs, saved times may
lie in the future, and grace periods and slow starts would last that much longer.
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
    """Return the plan with no time after `now`, and without a rebalancing round, which may be cancelled."""
    nodes = {address: _clamp_node_times(planned, now) for address, planned in plan.nodes.items()}
    saved = plan.rebalance
    round_ends_at = now if saved.outgoing else _clamp(saved.round_ends_at, now)
    # The other fields depend on migration counters, which restart at zero.
    rebalance = RebalanceState(_clamp(saved.since, now), saved.reason, saved.round, round_ends_at)
    return replace(plan, nodes=nodes, rebalance=rebalance)


def clamp_intent_times(intents: Intents, now: float) -> Intents:
    """Return the intents with no time after `now`."""
    drains = {
        address: replace(drain, since=_clamp(drain.since, now)) for address, drain in intents.drains.items()
    }
    removed: Mapping[str, float] = {address: _clamp(since, now) for address, since in intents.removed.items()}
    ended: Mapping[str, float] = {envoy: _clamp(at, now) for envoy, at in intents.ended_envoys.items()}
    return replace(intents, drains=drains, removed=removed, ended_envoys=ended)


def sort_steps(rollout: Rollout) -> Rollout:
    """Return a rollout with its steps in rollout order, which JSON with sorted keys does not keep."""
    positions = {address: position for position, address in enumerate(rollout.spec.nodes)}
    end = len(positions)
    steps = sorted(rollout.steps.items(), key=lambda item: positions.get(item[0], end))
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
