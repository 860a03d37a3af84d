"""When the plan is saved: soon after it changed, and not all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from prometheus_client import Counter

from controlplane.errors import StateUnavailable
from controlplane.storage.store import SavedPlan, Store

log = structlog.get_logger("tidevoy.engine")

# Seconds between two saves. Of many nodes nearly every plan has other weights, and writing it takes long.
_MIN_INTERVAL_SECONDS = 1.0
_NODES_PER_SECOND = 500
_MAX_INTERVAL_SECONDS = 60.0


class PlanSaver:
    """Saves what is current. After one that fails a restart misses what has changed since the last."""

    def __init__(
        self,
        store: Store,
        current: Callable[[], SavedPlan | None],
        failures: Counter,
        *,
        before_save: Callable[[], Awaitable[None]],
    ) -> None:
        """`current` is what to save, or None when that is not to be; `first` is done before each save."""
        self._store = store
        self._current = current
        self._failures = failures
        self._before_save = before_save
        self._unsaved = asyncio.Event()

    def mark_changed(self) -> None:
        """There is another plan."""
        self._unsaved.set()

    async def run(self) -> None:
        """Save soon after each change, and now and then for the Envoys that were seen."""
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
        """Save now; of how many nodes. What cannot be written is logged, and counted."""
        self._unsaved.clear()
        current = self._current()
        if current is None:
            return 0
        try:
            await self._store.save_plan(current)
        except StateUnavailable as error:
            self._failures.inc()
            log.warning("the plan could not be saved", error=str(error))
        return len(current.plan.nodes)
