"""Run coroutines that must finish even if their caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end; a cancellation during it is raised afterwards.

    `asyncio.shield` would let the caller continue at once, while the work still writes in the background.
    """
    task = asyncio.create_task(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as cancelled:
            cancellation = cancelled
    failure = None if task.cancelled() else task.exception()
    if cancellation is not None:
        raise cancellation
    if failure is not None:
        raise failure
    return task.result()
