"""What the console remembers beside the engine: the last events, and what nodes carried."""

from __future__ import annotations

import asyncio

import structlog

from api.console.feed import Feed
from api.console.history import History
from api.console.sampler import sample
from controlplane.clock import Clock, steady_clock
from controlplane.engine.engine import Engine

log = structlog.get_logger("tidevoy.console")


class Console:
    """Up to date as long as `run` runs."""

    def __init__(self, engine: Engine, clock: Clock | None = None) -> None:
        self.history = History()
        self.feed = Feed()
        self._engine = engine
        self._clock = clock or steady_clock()

    def now(self) -> float:
        """Unix seconds."""
        return self._clock()

    async def run(self) -> None:
        """Look and listen until cancelled. What goes wrong here is told, and stops nothing else."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(sample(self._engine, self.history, self._clock))
                tasks.create_task(self.feed.follow(self._engine))
        except Exception:
            log.exception("the console shows nothing new any more; restart the control plane")
