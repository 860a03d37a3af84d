"""Suspend a process: it does nothing, but its connections stay open and the kernel acknowledges data."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.waiting import wait_until


@asynccontextmanager
async def suspended(pid: int) -> AsyncIterator[None]:
    """Suspend all threads of a process during the block."""
    threads = Path(f"/proc/{pid}/task")

    def is_stopped() -> bool:
        try:
            stats = [(thread / "stat").read_text() for thread in threads.iterdir()]
        except FileNotFoundError:
            return False  # a thread has just ended
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    os.kill(pid, signal.SIGSTOP)
    try:
        # When kill() returns, threads on other cores may still be running.
        await wait_until(is_stopped)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
