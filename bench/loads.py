"""Loads beyond sysbench's: idle connections beside it, new ones beside it, and clients that speak TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.load_client import NAME, Access, Found, LoadClient, Select
from bench.sysbench import Outcome, SysbenchLoad
from sandbox.process import ProcessFailed


@dataclass(frozen=True, slots=True)
class Idle:
    """So many connections that do nothing (`bench.workloads.Beside`). `program`: the built load client."""

    program: Path
    connections: int

    @asynccontextmanager
    async def held(self, port: int) -> AsyncIterator[None]:
        """They are there inside the block, and each still answers behind it; else ProcessFailed."""
        async with LoadClient(self.program).idle(port, connections=self.connections) as found:
            yield
        _all_well(found[0])


@dataclass(frozen=True, slots=True)
class WithNewConnections:
    """sysbench's clients, and beside them so many new connections per second, each with one statement."""

    program: Path
    rate: float
    sysbench: SysbenchLoad

    async def run(self, port: int, seconds: float) -> Outcome:
        """What sysbench's clients did. ProcessFailed, also when one connection fails; TimeoutError."""
        async with asyncio.TaskGroup() as group:
            new = group.create_task(LoadClient(self.program).churn(port, seconds, rate=self.rate))
            steady = group.create_task(self.sysbench.run(port, seconds))
        _all_well(new.result())
        return steady.result()


def over_tls(program: Path, *, first: bool, connections: int, statement: str) -> Select:
    """Clients who ask the same again and again, in TLS from the first byte on, or as MySQL begins it."""
    client = LoadClient(program, Access(tls="first" if first else "mysql"))
    return Select(client, connections=connections, statement=statement)


def _all_well(found: Found) -> None:
    if found.errors:
        raise ProcessFailed(NAME, f"met {found.errors} errors", found.told)
