"""Applications with a connection pool: workers that run short transactions, and count the errors they get.

Each worker takes a connection from the pool, begins a transaction, updates the counter of the worker, reads
it, commits, gives the connection back, and pauses. No application retries anything. The programs are part of
the client builds. They get their parameters from the environment, print `ready` when each worker has
committed once, work until the end of their standard input, and then print one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.support.build_tools import find_tool
from tests.support.clients.client_builds import GO, JAVA, PYTHON, ROOT, ClientBuild

PAUSE_MILLISECONDS = 5
_START_TIMEOUT_SECONDS = 60.0
_STOP_TIMEOUT_SECONDS = 60.0

PoolSettings = Literal["recommended", "default"]


class PoolFailed(Exception):
    """An application ended too early, or took too long. The text has its last errors."""


@dataclass(frozen=True, slots=True)
class PoolClient:
    """An application. `settings` are those that differ from the defaults of the pool, for people to read."""

    name: str
    build: ClientBuild
    command: Callable[[Path], list[str]]
    settings: Mapping[PoolSettings, str]


@dataclass(frozen=True, slots=True)
class PoolResult:
    """What an application counted: transactions by worker, and errors by their text."""

    committed: tuple[int, ...]
    errors: Mapping[str, int]

    @classmethod
    def parse(cls, line: str) -> PoolResult:
        values = json.loads(line)
        return cls(tuple(values["committed"]), values["errors"])

    @property
    def error_count(self) -> int:
        return sum(self.errors.values())


class RunningPool:
    """An application that works. Call `stop` to get its result."""

    def __init__(self, client: PoolClient, process: asyncio.subprocess.Process, log: Path) -> None:
        self._client, self._process, self._log = client, process, log

    async def wait_until_ready(self) -> None:
        """Wait until each worker has committed a transaction. Raises PoolFailed."""
        await self._read_line(_START_TIMEOUT_SECONDS)

    async def stop(self) -> PoolResult:
        """Let the workers finish their transactions, and return what they counted. Raises PoolFailed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return PoolResult.parse(await self._read_line(_STOP_TIMEOUT_SECONDS))

    async def _read_line(self, timeout: float) -> str:
        assert self._process.stdout is not None
        line = b""
        try:
            async with asyncio.timeout(timeout):
                line = await self._process.stdout.readline()
        except TimeoutError:
            pass
        if not line.endswith(b"\n"):
            reason = f"{self._client.name} wrote no line within {timeout:.0f} s, or ended"
            raise PoolFailed(f"{reason}:\n{self._log.read_text(errors='replace')[-3000:]}")
        return line.decode()


@asynccontextmanager
async def run_pool(
    client: PoolClient, directory: Path, *, address: str, database: str, workers: int, settings: PoolSettings
) -> AsyncIterator[RunningPool]:
    """Run an application, which its build must contain already, during the block. Yield it when it works.

    `database` has the table of `create_counters`. The file `pool.log` in `directory` gets its standard error.
    """
    environment = {
        "POOL_ADDRESS": address,
        "POOL_DATABASE": database,
        "POOL_WORKERS": str(workers),
        "POOL_PAUSE_MS": str(PAUSE_MILLISECONDS),
        "POOL_SETTINGS": settings,
    }
    log = directory / "pool.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *client.command(client.build.install()),
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    try:
        pool = RunningPool(client, process, log)
        await pool.wait_until_ready()
        yield pool
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def create_counters(workers: int) -> list[str]:
    """Return the statements that create the counters of the workers."""
    rows = ", ".join(f"({worker}, 0)" for worker in range(workers))
    return [
        "create table counters (worker int primary key, count int not null)",
        f"insert into counters values {rows}",
    ]


def _java_command(built: Path) -> list[str]:
    java = find_tool("java", "apt-get install default-jre-headless")
    return [java, "-XX:+UseSerialGC", "-Xmx256m", "-cp", f"{built}:{built}/lib/*", "PoolLoad"]


POOLS = (
    PoolClient(
        "HikariCP",
        JAVA,
        _java_command,
        {
            "recommended": "autoCommit=false, aliveBypassWindowMs=0, keepaliveTime=30 s, maxLifetime=10 min, "
            "connectionTimeout=10 s",
            "default": "none",
        },
    ),
    PoolClient(
        "database/sql",
        GO,
        lambda built: [str(built / "client"), "pool"],
        {"recommended": "MaxOpenConns, MaxIdleConns, ConnMaxLifetime=10 min", "default": "none"},
    ),
    PoolClient(
        "SQLAlchemy",
        PYTHON,
        lambda built: [str(built / "venv/bin/python"), "-m", "tests.support.clients.python.pool_load"],
        {"recommended": "pool_pre_ping=True, pool_recycle=600", "default": "none"},
    ),
)
