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
from controlplane.model.plan import NodePlan, Plan, Rebalance
from controlplane.model.rollout import Rollout

T = TypeVar("T", float, float | None)


def plan_until(plan: Plan, now: float) -> Plan:
    """The plan with no time after `now`, and without a round of moves, for that may have been withdrawn."""
    nodes = {address: _node_until(planned, now) for address, planned in plan.nodes.items()}
    past = plan.rebalance
    until = now if past.moves else _until(past.until, now)
    # What came of rounds is told by counts of moves, which begin anew.
    rebalance = Rebalance(_until(past.since, now), past.reason, past.round, until)
    return replace(plan, nodes=nodes, rebalance=rebalance)


def intents_until(intents: Intents, now: float) -> Intents:
    """The intents with no time after `now`."""
    drains = {a: replace(drain, since=_until(drain.since, now)) for a, drain in intents.drains.items()}
    removed: Mapping[str, float] = {a: _until(since, now) for a, since in intents.removed.items()}
    ended: Mapping[str, float] = {envoy: _until(at, now) for envoy, at in intents.ended.items()}
    return replace(intents, drains=drains, removed=removed, ended=ended)


def in_turn(rollout: Rollout) -> Rollout:
    """A rollout with its steps in the order of their turns, which JSON with sorted keys does not keep."""
    turns = {address: turn for turn, address in enumerate(rollout.order.nodes)}
    last = len(turns)
    steps = sorted(rollout.steps.items(), key=lambda item: turns.get(item[0], last))
    return replace(rollout, steps=MappingProxyType(dict(steps)))


def _node_until(planned: NodePlan, now: float) -> NodePlan:
    return replace(
        planned,
        since=_until(planned.since, now),
        active_since=_until(planned.active_since, now),
        unregistered_since=_until(planned.unregistered_since, now),
        closed_since=_until(planned.closed_since, now),
        leaving_since=_until(planned.leaving_since, now),
    )


def _until(at: T, now: float) -> T:
    return at if at is None else min(at, now)
