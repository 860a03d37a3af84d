"""Prepares saved state for use after a restart: no time is in the future, steps are in order. No I/O.

If the system clock was set back between two runs, saved times may lie in the future, and grace periods and
slow starts would last longer by the difference.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from controlplane.model.capture import MAX_DURATION_SECONDS, Capture
from controlplane.model.intents import Intents
from controlplane.model.plan import NodePlan, Plan, RebalanceState
from controlplane.model.rollout import Rollout

_MAX_CLOCK_DIFFERENCE_SECONDS = 600.0  # between two replicas

T = TypeVar("T", float, float | None)

_NODE_TIMES = ("since", "active_since", "unregistered_since", "closed_since", "removal_since")


def clamp_plan_times(plan: Plan, now: float) -> Plan:
    """Return the plan with no time after `now`, and without its rebalancing round."""
    nodes = {address: _clamp_node_times(planned, now) for address, planned in plan.nodes.items()}
    saved = plan.rebalance
    round_ends_at = now if saved.outgoing else _clamp(saved.round_ends_at, now)
    # The other fields depend on migration counters, which restart at zero.
    rebalance = RebalanceState(_clamp(saved.since, now), saved.reason, saved.round, round_ends_at)
    limits = {
        name: replace(limit, changed_at=_clamp(limit.changed_at, now)) for name, limit in plan.limits.items()
    }
    return replace(plan, nodes=nodes, rebalance=rebalance, limits=limits)


def clamp_intent_times(intents: Intents, now: float) -> Intents:
    """Return the intents with no time after `now`."""
    drains = {a: replace(drain, since=min(drain.since, now)) for a, drain in intents.drains.items()}
    removed = {address: min(since, now) for address, since in intents.removed.items()}
    ended = {envoy: min(at, now) for envoy, at in intents.ended_envoys.items()}
    capture = intents.capture and _clamp_capture(intents.capture, now)
    return replace(intents, drains=drains, removed=removed, ended_envoys=ended, capture=capture)


def _clamp_capture(capture: Capture, now: float) -> Capture:
    """Return the capture with an end that is possible.

    Its times are not clamped to `now`, since `until` identifies it for all replicas, and the clocks of two
    machines differ.
    """
    latest = now + MAX_DURATION_SECONDS + _MAX_CLOCK_DIFFERENCE_SECONDS
    return capture if capture.until <= latest else replace(capture, started_at=now, until=round(latest, 3))


def sort_steps(rollout: Rollout) -> Rollout:
    """Return a rollout with its steps in rollout order, which JSON with sorted keys does not keep."""
    positions = {address: position for position, address in enumerate(rollout.spec.nodes)}
    end = len(positions)
    steps = sorted(rollout.steps.items(), key=lambda item: positions.get(item[0], end))
    return replace(rollout, steps=MappingProxyType(dict(steps)))


def _clamp_node_times(planned: NodePlan, now: float) -> NodePlan:
    return replace(planned, **{name: _clamp(getattr(planned, name), now) for name in _NODE_TIMES})


def _clamp(at: T, now: float) -> T:
    return at if at is None else min(at, now)
