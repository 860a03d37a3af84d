"""A stopwatch as benchmarks and tests use it, and which of its statements were slow when."""

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

_START_STOP_TIMEOUT_SECONDS = 30.0  # seconds until it is ready, and until it has ended
_POLL_SECONDS = 0.02


class TimedStatement(NamedTuple):
    """One statement: when it was sent (time.monotonic), and how long its answer took; seconds.

    `moved`: the session was at another node when the one before was answered.
    """

    sent_at: float
    seconds: float
    moved: bool


class TimeWindow(NamedTuple):
    """A while in which something was done, by time.monotonic."""

    begin: float
    end: float

    def overlaps(self, statement: TimedStatement) -> bool:
        """Whether a statement was under way in it."""
        return statement.sent_at < self.end and statement.sent_at + statement.seconds > self.begin


def statements_during(
    statements: Iterable[TimedStatement], windows: Sequence[TimeWindow]
) -> list[TimedStatement]:
    """Those that were under way in any of these."""
    return [statement for statement in statements if any(window.overlaps(statement) for window in windows)]


def statements_outside(
    statements: Iterable[TimedStatement], windows: Sequence[TimeWindow]
) -> list[TimedStatement]:
    """All others."""
    return [
        statement for statement in statements if not any(window.overlaps(statement) for window in windows)
    ]


def latencies_ms(statements: Iterable[TimedStatement]) -> list[float]:
    """How long they took, the slowest first."""
    return sorted((statement.seconds * 1000 for statement in statements), reverse=True)


def slowest_ms(statements: Iterable[TimedStatement]) -> float:
    """How long the slowest took, in milliseconds; 0 when there is none."""
    return max(latencies_ms(statements), default=0.0)


class Stopwatch:
    """One that runs. Made by `timing`."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process

    async def stop(self) -> list[TimedStatement]:
        """All that it has asked. ProcessFailed: something went wrong meanwhile, be it one answer."""
        code = await self._process.terminate(_START_STOP_TIMEOUT_SECONDS)
        if code != 0:
            raise ProcessFailed("the stopwatch", describe_exit(code), self._process.tail(3)[-2000:])
        lines = self._process.output().splitlines()
        return [TimedStatement(*one) for one in json.loads(lines[-1])["asked"]]


@asynccontextmanager
async def run_stopwatch(
    port: int, directory: Path, *, interval: float = 0.001, ca: Path | None = None, prepared: bool = True
) -> AsyncIterator[Stopwatch]:
    """A stopwatch that asks at 127.0.0.1:`port`, one statement in `every` seconds; over TLS with `ca`.

    ProcessFailed when it is not let in, TimeoutError.
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
        await process.kill()  # nothing, when it has ended
