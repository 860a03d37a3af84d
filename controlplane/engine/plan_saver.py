"""Saves the plan to disk soon after each change, at a bounded rate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from prometheus_client import Counter

from controlplane.errors import StateUnavailable
from controlplane.storage.store import SavedPlan, Store

log = structlog.get_logger("tidevoy.engine")

# Time between two saves. With many nodes nearly every plan has new weights, and a write takes long.
_MIN_INTERVAL_SECONDS = 1.0
_NODES_PER_SECOND = 500
_MAX_INTERVAL_SECONDS = 60.0


class PlanSaver:
    """Saves the current plan. If a save fails, a restart loses the changes since the last good save."""

    def __init__(
        self,
        store: Store,
        current: Callable[[], SavedPlan | None],
        failures: Counter,
        *,
        before_save: Callable[[], Awaitable[None]],
    ) -> None:
        """`current` returns the plan to save, or None for no save; `before_save` runs before each save."""
        self._store = store
        self._current = current
        self._failures = failures
        self._before_save = before_save
        self._unsaved = asyncio.Event()

    def mark_changed(self) -> None:
        """Request a save."""
        self._unsaved.set()

    async def run(self) -> None:
        """Save soon after each change, and at least every 60 s to record when Envoys were last seen."""
        while True:
            try:
                async with asyncio.timeout(_MAX_INTERVAL_SECONDS):
                    await self._unsaved.wait()
            except TimeoutError:
                pass
            await self._before_save()
            nodes = await self.save()
            await asyncio.sleep(max(_MIN_INTERVAL_SECONDS, nodes / _NODES_PER_SECOND))

    async def save(self) -> int:
        """Save now and return the number of nodes. A failed write is logged and counted."""
        self._unsaved.clear()
        current = self._current()
        if current is None:
            return 0
        try:
            await self._store.save_plan(current)
        except StateUnavailable as error:
            self._failures.inc()
            log.warning("could not save the plan", error=str(error))
        return len(current.plan.nodes)
