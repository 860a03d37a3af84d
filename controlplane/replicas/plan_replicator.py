"""Writes the leader's plan to etcd: urgent changes at once, others at a bounded rate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog
from prometheus_client import Counter

from controlplane.errors import NotLeader, StateUnavailable, VersionConflict
from controlplane.model.plan import NodePlan, Plan
from controlplane.storage.store import SavedPlan, Store

log = structlog.get_logger("tidevoy.replicas")

# Time between two plans that differ only in weights or counts: a plan of 5,000 nodes takes long to read.
_MIN_INTERVAL_SECONDS, _NODES_PER_SECOND = 0.2, 2000.0
_URGENT_NODES_PER_SECOND = 10_000.0  # limits urgent writes too: PD keeps each plan for an hour
_MAX_INTERVAL_SECONDS = 60.0  # refreshes when Envoys were last seen, and restores a deleted plan
_RETRY_SECONDS = 1.0


class PlanReplicator:
    """Writes the current plan while this replica leads."""

    def __init__(self, store: Store, current_plan: Callable[[], SavedPlan | None], failures: Counter) -> None:
        """`current_plan` returns the plan to write, or None for no write."""
        self._store = store
        self._current_plan = current_plan
        self._failures = failures
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def notify_changed(self, before: Plan, after: Plan) -> None:
        """Request a write: the plan has changed."""
        self._changed.set()
        if not self._urgent.is_set() and is_urgent(before, after):
            self._urgent.set()

    async def run(self) -> None:
        """Write changed plans until cancelled."""
        pause = 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._urgent.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(_MAX_INTERVAL_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            self._urgent.clear()
            if (saved := self._current_plan()) is not None:
                pause = await self._write(saved)

    async def _write(self, saved: SavedPlan) -> float:
        """Write a plan; return how long to wait before the next plan that is not urgent."""
        try:
            await self._store.save_plan(saved)
        except NotLeader:
            pass  # the new leader writes its own plan
        except (StateUnavailable, VersionConflict) as error:
            self._failures.inc()
            log.warning("could not write the shared plan", error=str(error))
            self._changed.set()
            await asyncio.sleep(_RETRY_SECONDS)
        nodes = len(saved.plan.nodes)
        await asyncio.sleep(nodes / _URGENT_NODES_PER_SECOND)
        return min_interval(nodes)


def min_interval(nodes: int) -> float:
    """Return the seconds between two plans of this many nodes that differ only in weights or counts."""
    return max(_MIN_INTERVAL_SECONDS, nodes / _NODES_PER_SECOND)


def is_urgent(before: Plan, after: Plan) -> bool:
    """Return whether the Envoys of other replicas need the change at once.

    The same plan twice is urgent: it is a new leader's first plan.
    """
    if before is after or before.nodes.keys() != after.nodes.keys():
        return True
    if (before.rebalance.round, before.rebalance.since is None) != (
        after.rebalance.round,
        after.rebalance.since is None,
    ):
        return True
    if (before.panic_threshold_reason, before.overloaded_zones) != (
        after.panic_threshold_reason,
        after.overloaded_zones,
    ):
        return True
    return any(
        past is not (now := after.nodes[address]) and _is_significant(past, now)
        for address, past in before.nodes.items()
    )


def _is_significant(before: NodePlan, after: NodePlan) -> bool:
    return (
        before.state is not after.state
        or before.eds_health is not after.eds_health
        or (before.weight == 0) is not (after.weight == 0)
        or (before.endpoint, before.group, before.backup, before.zone)
        != (after.endpoint, after.group, after.backup, after.zone)
        or (before.closed_since, before.terminate_sessions) != (after.closed_since, after.terminate_sessions)
    )
