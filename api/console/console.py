"""What the console remembers beside the engine: the last events, and what nodes carried."""

from __future__ import annotations

import asyncio

import structlog

from api.console.feed import RecentEvents
from api.console.history import History
from api.console.sampler import run_sampler
from controlplane.clock import Clock, monotonic_unix_clock
from controlplane.engine.engine import Engine

log = structlog.get_logger("tidevoy.console")


class ConsoleState:
    """Up to date as long as `run` runs."""

    def __init__(self, engine: Engine, clock: Clock | None = None) -> None:
        self.history = History()
        self.recent_events = RecentEvents()
        self._engine = engine
        self._clock = clock or monotonic_unix_clock()

    def now(self) -> float:
        """Unix seconds."""
        return self._clock()

    async def run(self) -> None:
        """Look and listen until cancelled. What goes wrong here is told, and stops nothing else."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_sampler(self._engine, self.history, self._clock))
                tasks.create_task(self.recent_events.collect(self._engine))
        except Exception:
            log.exception("the console shows nothing new any more; restart the control plane")
