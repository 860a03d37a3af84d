"""Tasks that run in the background of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def run_in_background(*endless: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines until the end of the block. The error of one ends the block, and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(coroutine) for coroutine in endless]
            yield
            for task in started:
                task.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
