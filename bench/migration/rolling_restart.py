"""Rolling restarts of all nodes under sysbench's oltp_read_write, and a stopwatch beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.migration.statement_latency import (
    TimedStatement,
    TimeWindow,
    run_stopwatch,
    slowest_ms,
    statements_during,
    statements_outside,
)
from bench.sysbench_load.clients import RunningSysbench, SysbenchCounts, SysbenchLoad
from bench.sysbench_load.table import make_table
from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb

NODE_COUNT = 3
THREADS = 32
ROWS = 10_000
MODERATE_TRANSACTIONS_PER_SECOND = 100
"""Transactions a second, 2,000 statements, which leave the machine room: else each statement waits in a queue
at the stand-ins, and how long it took says nothing of moves."""
_STOPWATCH_INTERVAL_SECONDS = 0.002
"""Seconds between two statements of the stopwatch: sysbench needs the machine, too."""
_STEP_TIMEOUT_SECONDS = 60.0
_STATS_WAIT_SECONDS = 1.5
"""Seconds after which all that was counted has been told."""
_MIGRATIONS_METRIC = "envoy_tidevoy_migrations"
MIGRATED = ("moved", "ok")


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


ALL_COMBINATIONS = tuple(
    Combination(prepared, tls, workers)
    for prepared, tls, workers in product((True, False), (True, False), (2, 1))
)


@dataclass(frozen=True, slots=True)
class RollingRestartResult:
    """What came of it.

    `moves`: how many, by node and by result and reason. `asked`: what the stopwatch has asked; `left`: when
    sessions left nodes.
    """

    combination: Combination
    counts: SysbenchCounts
    migrations: Mapping[str, Mapping[tuple[str, str], int]]
    statements: Sequence[TimedStatement]
    drain_windows: Sequence[TimeWindow]

    @property
    def moved(self) -> dict[str, int]:
        """Sessions that have moved away, by node."""
        return {node: ended.get(MIGRATED, 0) for node, ended in self.migrations.items()}

    @property
    def failed_by_reason(self) -> dict[str, int]:
        """Attempts that came to nothing, by reason."""
        reasons: dict[str, int] = {}
        for ended in self.migrations.values():
            for (result, reason), count in ended.items():
                if (result, reason) != MIGRATED and count:
                    name = reason or result
                    reasons[name] = reasons.get(name, 0) + count
        return reasons

    @property
    def slowest_while_draining(self) -> float:
        """The slowest statement of the stopwatch while sessions left a node, in milliseconds."""
        return slowest_ms(statements_during(self.statements, self.drain_windows))

    @property
    def slowest_while_moving(self) -> float:
        """The slowest of those during which, or just before which, the stopwatch's own session moved."""
        return slowest_ms(one for one in self.statements if one.moved)

    @property
    def slowest_at_rest(self) -> float:
        """The slowest while no node was drained, which the machine makes of the load alone."""
        return slowest_ms(
            one for one in statements_outside(self.statements, self.drain_windows) if not one.moved
        )


async def run_rolling_restart(
    stack: LocalCluster,
    combination: Combination,
    directory: Path,
    *,
    rounds: int,
    rate: int = 0,
    ca: Path | None = None,
) -> RollingRestartResult:
    """Restart all nodes of `stack` so often, one after the other, under load. `ca`: of the Envoy, with TLS.

    `rate`: transactions a second; 0: as many as there can be.

    ProcessFailed: sysbench or the stopwatch has met what it does not pass over; NotInTime, TimeoutError.
    """
    await make_table(stack.mariadb.port, directory, rows=ROWS)
    load = SysbenchLoad(ROWS, THREADS, combination.prepared, combination.tls, rate)
    drain_windows: list[TimeWindow] = []
    async with (
        run_stopwatch(stack.sql_port, directory, interval=_STOPWATCH_INTERVAL_SECONDS, ca=ca) as stopwatch,
        load.running(stack.sql_port, directory, ca) as working,
    ):
        for _ in range(rounds):
            for node in stack.tidb:
                drain_windows.append(await restart_node(stack, node, working))
        counts = await working.stop()
        statements = await stopwatch.stop()
    return RollingRestartResult(
        combination, counts, await _read_migration_counts(stack), statements, drain_windows
    )


async def restart_node(stack: LocalCluster, node: Tidb, clients: RunningSysbench) -> TimeWindow:
    """Drain it, stop it, start it, and put it into service again; when its sessions left."""

    async def is_in(state: str) -> bool:
        clients.raise_if_ended()
        return (await stack.states()).get(node.address) == state

    begin = time.monotonic()
    (await stack.api.post(f"/v1/nodes/{node.address}/drain")).raise_for_status()
    await stack.wait_until(lambda: is_in("drained"), f"{node.address} to be empty", _STEP_TIMEOUT_SECONDS)
    window = TimeWindow(begin, time.monotonic())
    await node.terminate()
    await node.launch()
    (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()
    await stack.wait_until(lambda: is_in("active"), f"{node.address} in service", _STEP_TIMEOUT_SECONDS)
    return window


async def _read_migration_counts(stack: LocalCluster) -> dict[str, dict[tuple[str, str], int]]:
    """As the module has told Envoy, all of them: it does once a second."""
    await asyncio.sleep(_STATS_WAIT_SECONDS)
    page = (await stack.envoy.get("/stats/prometheus?filter=^tidevoy")).text
    found: dict[str, dict[tuple[str, str], int]] = {node.address: {} for node in stack.tidb}
    for node, result, reason, count in parse_migration_counts(page):
        found.setdefault(node, {})[result, reason] = count
    return found


def parse_migration_counts(page: str) -> Iterator[tuple[str, str, str, int]]:
    """Node, result, reason and count of each series of moves on Envoy's page for Prometheus."""
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            if one.name in (_MIGRATIONS_METRIC, f"{_MIGRATIONS_METRIC}_total"):
                labels = one.labels
                yield labels["node"], labels["result"], labels["reason"], int(one.value)
