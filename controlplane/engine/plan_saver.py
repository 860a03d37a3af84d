"""Saves the plan to disk soon after each change, at a limited rate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import Counter

from controlplane.storage.debounced_writer import DebouncedWriter
from controlplane.storage.store import SavedPlan, Store

# The time between two saves grows with the number of nodes: large plans change often and take long to save.
_MIN_INTERVAL_SECONDS = 1.0
_NODES_PER_SECOND = 500
_MAX_INTERVAL_SECONDS = 60.0  # an unchanged plan is also saved, to record when Envoys were last seen


class PlanSaver(DebouncedWriter):
    """Saves the current plan. After failed saves, a restart uses the last plan that was saved."""

    def __init__(
        self,
        store: Store,
        current: Callable[[], SavedPlan | None],
        failures: Counter,
        *,
        before_save: Callable[[], Awaitable[None]],
    ) -> None:
        """`current` returns the plan to save, or None to skip the save. `run` awaits `before_save` first."""
        super().__init__("the plan", failures, max_interval=_MAX_INTERVAL_SECONDS)
        self._store = store
        self._current = current
        self._before_save = before_save

    async def _before_write(self) -> None:
        await self._before_save()

    async def _write(self) -> float:
        current = self._current()
        if current is None:
            return _MIN_INTERVAL_SECONDS
        await self._store.save_plan(current)
        return max(_MIN_INTERVAL_SECONDS, len(current.plan.nodes) / _NODES_PER_SECOND)
