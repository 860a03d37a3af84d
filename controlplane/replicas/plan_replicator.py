"""When a leader writes its plan for the others: at once when it matters, else now and then."""

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

# Seconds between two plans in which only weights or counts differ: that of 5,000 nodes takes long to read.
_MIN_INTERVAL_SECONDS, _NODES_PER_SECOND = 0.2, 2000.0
_URGENT_NODES_PER_SECOND = 10_000.0  # where more than those differ, for PD keeps each plan for an hour
_MAX_INTERVAL_SECONDS = 60.0  # for the Envoys that were seen, and should a hand have deleted it
_RETRY_SECONDS = 1.0  # seconds after a write that failed


class PlanReplicator:
    """Writes what is current while we lead."""

    def __init__(self, store: Store, current_plan: Callable[[], SavedPlan | None], failures: Counter) -> None:
        """`current` is what to write; None: nothing."""
        self._store = store
        self._current_plan = current_plan
        self._failures = failures
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def notify_changed(self, before: Plan, after: Plan) -> None:
        """There is another plan."""
        self._changed.set()
        if not self._urgent.is_set() and is_urgent(before, after):
            self._urgent.set()

    async def run(self) -> None:
        """Write until cancelled."""
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
        """Write a plan; how long to wait then, unless another one is urgent."""
        try:
            await self._store.save_plan(saved)
        except NotLeader:
            pass  # whoever leads now writes his
        except (StateUnavailable, VersionConflict) as error:
            self._failures.inc()
            log.warning("the plan could not be shared", error=str(error))
            self._changed.set()
            await asyncio.sleep(_RETRY_SECONDS)
        nodes = len(saved.plan.nodes)
        await asyncio.sleep(nodes / _URGENT_NODES_PER_SECOND)
        return min_interval(nodes)


def min_interval(nodes: int) -> float:
    """Seconds between two plans of so many nodes that differ in weights or counts alone."""
    return max(_MIN_INTERVAL_SECONDS, nodes / _NODES_PER_SECOND)


def is_urgent(before: Plan, after: Plan) -> bool:
    """Whether Envoys of other control planes are not to wait for what differs.

    The same plan again is: it is the first of a leader.
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
