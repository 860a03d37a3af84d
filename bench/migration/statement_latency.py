"""A stopwatch as benchmarks and tests use it, and which of its statements were slow when."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from bench.migration.stopwatch import READY
from sandbox.child_process import Process, ProcessFailed, describe_exit

_PATIENCE = 30.0  # seconds until it is ready, and until it has ended
_POLL = 0.02


class Asked(NamedTuple):
    """One statement: when it was sent (time.monotonic), and how long its answer took; seconds.

    `moved`: the session was at another node when the one before was answered.
    """

    at: float
    seconds: float
    moved: bool


class Window(NamedTuple):
    """A while in which something was done, by time.monotonic."""

    begin: float
    end: float

    def has(self, asked: Asked) -> bool:
        """Whether a statement was under way in it."""
        return asked.at < self.end and asked.at + asked.seconds > self.begin


def during(asked: Iterable[Asked], windows: Sequence[Window]) -> list[Asked]:
    """Those that were under way in any of these."""
    return [one for one in asked if any(window.has(one) for window in windows)]


def outside(asked: Iterable[Asked], windows: Sequence[Window]) -> list[Asked]:
    """All others."""
    return [one for one in asked if not any(window.has(one) for window in windows)]


def milliseconds(asked: Iterable[Asked]) -> list[float]:
    """How long they took, the slowest first."""
    return sorted((one.seconds * 1000 for one in asked), reverse=True)


def slowest(asked: Iterable[Asked]) -> float:
    """How long the slowest took, in milliseconds; 0 when there is none."""
    return max(milliseconds(asked), default=0.0)


class Stopwatch:
    """One that runs. Made by `timing`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def stop(self) -> list[Asked]:
        """All that it has asked. ProcessFailed: something went wrong meanwhile, be it one answer."""
        code = await self._process.terminate(_PATIENCE)
        if code != 0:
            raise ProcessFailed("the stopwatch", describe_exit(code), self._process.tail(3)[-2000:])
        lines = self._process.output().splitlines()
        return [Asked(*one) for one in json.loads(lines[-1])["asked"]]


@asynccontextmanager
async def timing(
    port: int, directory: Path, *, every: float = 0.001, ca: Path | None = None, prepared: bool = True
) -> AsyncIterator[Stopwatch]:
    """A stopwatch that asks at 127.0.0.1:`port`, one statement in `every` seconds; over TLS with `ca`.

    ProcessFailed when it is not let in, TimeoutError.
    """
    command = [sys.executable, "-P", "-m", "bench.migration.stopwatch", f"--port={port}", f"--every={every}"]
    command += [f"--ca={ca}"] if ca is not None else []
    command += [] if prepared else ["--text-only"]
    process = Process.start("stopwatch", command, directory=directory)
    try:
        async with asyncio.timeout(_PATIENCE):
            while READY not in process.output():
                if process.returncode is not None:
                    raise ProcessFailed("the stopwatch", describe_exit(process.returncode), process.tail())
                await asyncio.sleep(_POLL)
        yield Stopwatch(process)
    finally:
        await process.kill()  # nothing, when it has ended
