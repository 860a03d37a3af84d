"""Run the stopwatch program, and analyze the latencies of its statements."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from bench.migration.stopwatch import READY_LINE
from sandbox.child_process import ChildProcess, ProcessFailed, describe_exit

_START_STOP_TIMEOUT_SECONDS = 30.0  # until it is ready, and until it has stopped
_POLL_SECONDS = 0.02


class TimedStatement(NamedTuple):
    """One statement: when it was sent (time.monotonic), and its latency in seconds.

    `moved`: the session has migrated since the previous response.
    """

    sent_at: float
    seconds: float
    moved: bool


class TimeWindow(NamedTuple):
    """A time window of time.monotonic."""

    begin: float
    end: float

    def overlaps(self, statement: TimedStatement) -> bool:
        """Return whether a statement was in progress in the window."""
        return statement.sent_at < self.end and statement.sent_at + statement.seconds > self.begin


def statements_during(
    statements: Iterable[TimedStatement], windows: Sequence[TimeWindow]
) -> list[TimedStatement]:
    """Return the statements that were in progress in any of these windows."""
    return [statement for statement in statements if any(window.overlaps(statement) for window in windows)]


def statements_outside(
    statements: Iterable[TimedStatement], windows: Sequence[TimeWindow]
) -> list[TimedStatement]:
    """Return the statements that were in progress in none of these windows."""
    return [
        statement for statement in statements if not any(window.overlaps(statement) for window in windows)
    ]


def latencies_ms(statements: Iterable[TimedStatement]) -> list[float]:
    """Return the latencies in milliseconds, slowest first."""
    return sorted((statement.seconds * 1000 for statement in statements), reverse=True)


def slowest_ms(statements: Iterable[TimedStatement]) -> float:
    """Return the highest latency in milliseconds; 0 without statements."""
    return max(latencies_ms(statements), default=0.0)


class Stopwatch:
    """A running stopwatch; see `run_stopwatch`."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process

    async def stop(self) -> list[TimedStatement]:
        """Stop it and return all statements. Raises ProcessFailed on any error, even one wrong response."""
        code = await self._process.terminate(_START_STOP_TIMEOUT_SECONDS)
        if code != 0:
            raise ProcessFailed("the stopwatch", describe_exit(code), self._process.tail(3)[-2000:])
        lines = self._process.output().splitlines()
        return [TimedStatement(*timing) for timing in json.loads(lines[-1])["asked"]]


@asynccontextmanager
async def run_stopwatch(
    port: int, directory: Path, *, interval: float = 0.001, ca: Path | None = None, prepared: bool = True
) -> AsyncIterator[Stopwatch]:
    """Run a stopwatch against 127.0.0.1:`port` with one statement per `interval` seconds; `ca` enables TLS.

    Raises ProcessFailed if the login fails, and TimeoutError.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "bench.migration.stopwatch",
        f"--port={port}",
        f"--every={interval}",
    ]
    command += [f"--ca={ca}"] if ca is not None else []
    command += [] if prepared else ["--text-only"]
    process = ChildProcess.start("stopwatch", command, directory=directory)
    try:
        async with asyncio.timeout(_START_STOP_TIMEOUT_SECONDS):
            while READY_LINE not in process.output():
                if process.returncode is not None:
                    raise ProcessFailed("the stopwatch", describe_exit(process.returncode), process.tail())
                await asyncio.sleep(_POLL_SECONDS)
        yield Stopwatch(process)
    finally:
        await process.kill()  # no effect if it has exited
