"""Rolling restarts of all nodes under sysbench's oltp_read_write, measured by a stopwatch session."""

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
"""Rate of transactions (2,000 statements per second) that does not saturate the machine: otherwise each
statement queues at the simulated TiDB servers, and its latency says nothing about migration."""
_STOPWATCH_INTERVAL_SECONDS = 0.002
"""Interval of the stopwatch's statements: sysbench needs the machine, too."""
_STEP_TIMEOUT_SECONDS = 60.0
_STATS_WAIT_SECONDS = 1.5
"""Time until all counts are reported."""
_MIGRATIONS_METRIC = "envoy_tidevoy_migrations"
MIGRATED = ("moved", "ok")


@dataclass(frozen=True, slots=True)
class Combination:
    """The protocol options of a run. `tls`: on both sides of the Envoy."""

    prepared: bool
    tls: bool
    workers: int

    @property
    def name(self) -> str:
        """A name such as `prepared, TLS, 2 workers`."""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{'prepared' if self.prepared else 'text'}, {'TLS' if self.tls else 'plain'}, {workers}"


ALL_COMBINATIONS = tuple(
    Combination(prepared, tls, workers)
    for prepared, tls, workers in product((True, False), (True, False), (2, 1))
)


@dataclass(frozen=True, slots=True)
class RollingRestartResult:
    """The result of a run.

    `migrations`: counts by node, then by result and reason. `statements`: of the stopwatch. `drain_windows`:
    when sessions left nodes.
    """

    combination: Combination
    counts: SysbenchCounts
    migrations: Mapping[str, Mapping[tuple[str, str], int]]
    statements: Sequence[TimedStatement]
    drain_windows: Sequence[TimeWindow]

    @property
    def moved(self) -> dict[str, int]:
        """Sessions that have migrated away, by node."""
        return {node: counts.get(MIGRATED, 0) for node, counts in self.migrations.items()}

    @property
    def failed_by_reason(self) -> dict[str, int]:
        """Failed attempts by reason."""
        reasons: dict[str, int] = {}
        for counts in self.migrations.values():
            for (result, reason), count in counts.items():
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
        """The slowest statement during or just after a migration of the stopwatch's own session, in ms."""
        return slowest_ms(statement for statement in self.statements if statement.moved)

    @property
    def slowest_at_rest(self) -> float:
        """The slowest statement without any drain or migration, in milliseconds: the effect of the load."""
        undisturbed = statements_outside(self.statements, self.drain_windows)
        return slowest_ms(statement for statement in undisturbed if not statement.moved)


async def run_rolling_restart(
    stack: LocalCluster,
    combination: Combination,
    directory: Path,
    *,
    rounds: int,
    rate: int = 0,
    ca: Path | None = None,
) -> RollingRestartResult:
    """Restart all nodes of `stack` one after another under load, `rounds` times.

    `rate`: transactions per second, 0: full speed; `ca`: the Envoy's CA, with TLS.

    Raises ProcessFailed if sysbench or the stopwatch fails, WaitTimeout and TimeoutError.
    """
    await make_table(stack.mariadb.port, directory, rows=ROWS)
    load = SysbenchLoad(ROWS, THREADS, combination.prepared, combination.tls, rate)
    drain_windows: list[TimeWindow] = []
    async with (
        run_stopwatch(stack.sql_port, directory, interval=_STOPWATCH_INTERVAL_SECONDS, ca=ca) as stopwatch,
        load.running(stack.sql_port, directory, ca) as sysbench,
    ):
        for _ in range(rounds):
            for node in stack.tidb:
                drain_windows.append(await restart_node(stack, node, sysbench))
        counts = await sysbench.stop()
        statements = await stopwatch.stop()
    return RollingRestartResult(
        combination, counts, await _read_migration_counts(stack), statements, drain_windows
    )


async def restart_node(stack: LocalCluster, node: Tidb, clients: RunningSysbench) -> TimeWindow:
    """Drain, stop, start and undrain a node; return when its sessions left."""

    async def is_in_state(state: str) -> bool:
        clients.raise_if_ended()
        return (await stack.states()).get(node.address) == state

    begin = time.monotonic()
    (await stack.api.post(f"/v1/nodes/{node.address}/drain")).raise_for_status()
    await stack.wait_until(
        lambda: is_in_state("drained"), f"{node.address} to be empty", _STEP_TIMEOUT_SECONDS
    )
    window = TimeWindow(begin, time.monotonic())
    await node.terminate()
    await node.launch()
    (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()
    await stack.wait_until(lambda: is_in_state("active"), f"{node.address} in service", _STEP_TIMEOUT_SECONDS)
    return window


async def _read_migration_counts(stack: LocalCluster) -> dict[str, dict[tuple[str, str], int]]:
    """Return the module's migration counts, which it reports to Envoy once a second."""
    await asyncio.sleep(_STATS_WAIT_SECONDS)
    page = (await stack.envoy.get("/stats/prometheus?filter=^tidevoy")).text
    counts: dict[str, dict[tuple[str, str], int]] = {node.address: {} for node in stack.tidb}
    for node, result, reason, count in parse_migration_counts(page):
        counts.setdefault(node, {})[result, reason] = count
    return counts


def parse_migration_counts(page: str) -> Iterator[tuple[str, str, str, int]]:
    """Yield node, result, reason and count of each migration series on Envoy's Prometheus page."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in (_MIGRATIONS_METRIC, f"{_MIGRATIONS_METRIC}_total"):
                labels = sample.labels
                yield labels["node"], labels["result"], labels["reason"], int(sample.value)
