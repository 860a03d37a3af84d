"""Writes the leader's plan to etcd: urgent changes at once, others at a bounded rate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import Counter

from controlplane.errors import NotLeader
from controlplane.model.plan import NodePlan, Plan
from controlplane.storage.debounced_writer import DebouncedWriter
from controlplane.storage.store import SavedPlan, Store

# Minimum time between two plans that differ only in weights or counts, because replicas need long to read a
# plan of 5,000 nodes.
_MIN_INTERVAL_SECONDS, _NODES_PER_SECOND = 0.2, 2000.0
_URGENT_NODES_PER_SECOND = 10_000.0  # limits urgent writes, because PD keeps each plan for an hour
# An unchanged plan is written again after this time, because it contains when Envoys were last seen, and
# because an operator may have deleted it from PD.
_MAX_INTERVAL_SECONDS = 60.0
_MAX_RETRY_SECONDS = 1.0  # other replicas, and operators who drain nodes, wait for the plan


class PlanReplicator(DebouncedWriter):
    """Writes the current plan while this replica leads."""

    def __init__(self, store: Store, current_plan: Callable[[], SavedPlan | None], failures: Counter) -> None:
        """`current_plan` returns the plan to write, or None if there is none."""
        super().__init__(
            "the shared plan", failures, max_interval=_MAX_INTERVAL_SECONDS, max_retry=_MAX_RETRY_SECONDS
        )
        self._store = store
        self._current_plan = current_plan

    def notify_changed(self, before: Plan, after: Plan, *, is_urgent: bool = False) -> None:
        """Request a write: the plan has changed. With `is_urgent`, any change is urgent.

        For example, a new leader's first plan and a plan that applies other intents are urgent.
        """
        self.mark_changed(is_urgent=is_urgent or self._urgent.is_set() or has_urgent_change(before, after))

    async def _write(self) -> float:
        saved = self._current_plan()
        if saved is None:
            return 0.0
        try:
            await self._store.save_plan(saved)
        except NotLeader:
            return 0.0  # the new leader writes its own plan
        nodes = len(saved.plan.nodes)
        await asyncio.sleep(nodes / _URGENT_NODES_PER_SECOND)
        return min_interval(nodes)


def min_interval(nodes: int) -> float:
    """Return the seconds between two plans of this many nodes that differ only in weights or counts."""
    return max(_MIN_INTERVAL_SECONDS, nodes / _NODES_PER_SECOND)


def has_urgent_change(before: Plan, after: Plan) -> bool:
    """Return whether the Envoys of other replicas need the change at once."""
    if before.nodes.keys() != after.nodes.keys():
        return True
    if _plan_state(before) != _plan_state(after):
        return True
    return any(
        past is not (now := after.nodes[address]) and _node_state(past) != _node_state(now)
        for address, past in before.nodes.items()
    )


def _plan_state(plan: Plan) -> tuple[object, ...]:
    is_balanced = plan.rebalance.since is None
    rules = {name: limit.rule for name, limit in plan.limits.items()}
    reason, zones = plan.panic_threshold_reason, plan.overloaded_zones
    return plan.rebalance.round, is_balanced, reason, zones, rules, plan.rules, plan.capture


def _node_state(node: NodePlan) -> tuple[object, ...]:
    """Return everything about a node that Envoys need at once: all but its weight, counts and reasons."""
    address = (node.endpoint, node.group, node.backup, node.zone)
    return node.state, node.eds_health, node.weight == 0, address, node.closed_since, node.terminate_sessions
