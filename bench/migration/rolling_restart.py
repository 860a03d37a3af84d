"""Rolling restarts of all nodes under sysbench's oltp_read_write, and a stopwatch beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.migration.statement_latency import Asked, Window, during, outside, slowest, timing
from bench.sysbench_load.clients import ReadWrite, Tally, Working
from bench.sysbench_load.table import make_table
from sandbox.local_cluster import Stack
from sandbox.tidb import Tidb

NODES = 3
THREADS = 32
ROWS = 10_000
UNHURRIED = 100
"""Transactions a second, 2,000 statements, which leave the machine room: else each statement waits in a queue
at the stand-ins, and how long it took says nothing of moves."""
_EVERY = 0.002
"""Seconds between two statements of the stopwatch: sysbench needs the machine, too."""
_PATIENCE = 60.0
_REPORTED = 1.5
"""Seconds after which all that was counted has been told."""
_MOVES = "envoy_tidevoy_migrations"
MOVED = ("moved", "ok")


@dataclass(frozen=True, slots=True)
class Combination:
    """How clients and nodes speak. `tls`: on both sides of the Envoy."""

    prepared: bool
    tls: bool
    workers: int

    @property
    def name(self) -> str:
        """`prepared, TLS, 2 workers`."""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{'prepared' if self.prepared else 'text'}, {'TLS' if self.tls else 'plain'}, {workers}"


ALL = tuple(
    Combination(prepared, tls, workers)
    for prepared, tls, workers in product((True, False), (True, False), (2, 1))
)


@dataclass(frozen=True, slots=True)
class Rolled:
    """What came of it.

    `moves`: how many, by node and by result and reason. `asked`: what the stopwatch has asked; `left`: when
    sessions left nodes.
    """

    combination: Combination
    tally: Tally
    moves: Mapping[str, Mapping[tuple[str, str], int]]
    asked: Sequence[Asked]
    left: Sequence[Window]

    @property
    def moved(self) -> dict[str, int]:
        """Sessions that have moved away, by node."""
        return {node: ended.get(MOVED, 0) for node, ended in self.moves.items()}

    @property
    def stayed(self) -> dict[str, int]:
        """Attempts that came to nothing, by reason."""
        reasons: dict[str, int] = {}
        for ended in self.moves.values():
            for (result, reason), count in ended.items():
                if (result, reason) != MOVED and count:
                    name = reason or result
                    reasons[name] = reasons.get(name, 0) + count
        return reasons

    @property
    def slowest(self) -> float:
        """The slowest statement of the stopwatch while sessions left a node, in milliseconds."""
        return slowest(during(self.asked, self.left))

    @property
    def slowest_of_its_own(self) -> float:
        """The slowest of those during which, or just before which, the stopwatch's own session moved."""
        return slowest(one for one in self.asked if one.moved)

    @property
    def slowest_otherwise(self) -> float:
        """The slowest while no node was drained, which the machine makes of the load alone."""
        return slowest(one for one in outside(self.asked, self.left) if not one.moved)


async def rolled(
    stack: Stack,
    combination: Combination,
    directory: Path,
    *,
    rounds: int,
    rate: int = 0,
    ca: Path | None = None,
) -> Rolled:
    """Restart all nodes of `stack` so often, one after the other, under load. `ca`: of the Envoy, with TLS.

    `rate`: transactions a second; 0: as many as there can be.

    ProcessFailed: sysbench or the stopwatch has met what it does not pass over; NotInTime, TimeoutError.
    """
    await make_table(stack.mariadb.port, directory, rows=ROWS)
    load = ReadWrite(ROWS, THREADS, combination.prepared, combination.tls, rate)
    left: list[Window] = []
    async with (
        timing(stack.sql_port, directory, every=_EVERY, ca=ca) as stopwatch,
        load.working(stack.sql_port, directory, ca) as working,
    ):
        for _ in range(rounds):
            for node in stack.tidb:
                left.append(await restarted(stack, node, working))
        tally = await working.stop()
        asked = await stopwatch.stop()
    return Rolled(combination, tally, await _moves(stack), asked, left)


async def restarted(stack: Stack, node: Tidb, working: Working) -> Window:
    """Drain it, stop it, start it, and put it into service again; when its sessions left."""

    async def is_in(state: str) -> bool:
        working.check()
        return (await stack.states()).get(node.address) == state

    begin = time.monotonic()
    (await stack.api.post(f"/v1/nodes/{node.address}/drain")).raise_for_status()
    await stack.wait_until(lambda: is_in("drained"), f"{node.address} to be empty", _PATIENCE)
    window = Window(begin, time.monotonic())
    await node.terminate()
    await node.launch()
    (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()
    await stack.wait_until(lambda: is_in("active"), f"{node.address} in service", _PATIENCE)
    return window


async def _moves(stack: Stack) -> dict[str, dict[tuple[str, str], int]]:
    """As the module has told Envoy, all of them: it does once a second."""
    await asyncio.sleep(_REPORTED)
    page = (await stack.envoy.get("/stats/prometheus?filter=^tidevoy")).text
    found: dict[str, dict[tuple[str, str], int]] = {node.address: {} for node in stack.tidb}
    for node, result, reason, count in moves_told(page):
        found.setdefault(node, {})[result, reason] = count
    return found


def moves_told(page: str) -> Iterator[tuple[str, str, str, int]]:
    """Node, result, reason and count of each series of moves on Envoy's page for Prometheus."""
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            if one.name in (_MOVES, f"{_MOVES}_total"):
                labels = one.labels
                yield labels["node"], labels["result"], labels["reason"], int(one.value)
