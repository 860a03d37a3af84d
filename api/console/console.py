"""The state that the console keeps in addition to the engine: recent events and traffic history."""

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
    """The recent events and traffic history, kept up to date while `run` runs."""

    def __init__(self, engine: Engine, clock: Clock | None = None) -> None:
        self.history = History()
        self.recent_events = RecentEvents()
        self._engine = engine
        self._clock = clock or monotonic_unix_clock()

    def now(self) -> float:
        """Return the time in Unix seconds."""
        return self._clock()

    async def run(self) -> None:
        """Collect events and samples until cancelled. Errors are logged and stop nothing else."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_sampler(self._engine, self.history, self._clock))
                tasks.create_task(self.recent_events.collect(self._engine))
        except Exception:
            log.exception("the console no longer receives updates; restart the control plane")
