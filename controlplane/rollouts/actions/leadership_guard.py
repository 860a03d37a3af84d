"""Runs work of the leader only as long as this control plane leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# How often it is checked that this replica still leads.
_TERM_CHECK_SECONDS = 0.2


async def run_during_term(
    work: Coroutine[Any, Any, T], current_term: Callable[[], int | None], term: int
) -> T | None:
    """Return the result of `work`; None if the term ended before, which cancels it."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        while not task.done() and current_term() == term:
            await asyncio.wait({task}, timeout=_TERM_CHECK_SECONDS)
        task.cancel()
    return None if task.cancelled() else task.result()
