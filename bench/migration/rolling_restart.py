"""Rolling restarts of all nodes under sysbench's oltp_read_write, while a stopwatch session measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.migration.stopwatch import (
    TimedStatement,
    TimeWindow,
    run_stopwatch,
    slowest_ms,
    statements_during,
    stop_stopwatch,
)
from bench.sysbench import RunningSysbench, SysbenchCounts, SysbenchLoad, make_table
from sandbox.envoy import EnvoyProcess
from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb

NODE_COUNT = 3
THREADS = 32
ROWS = 10_000
MODERATE_TRANSACTIONS_PER_SECOND = 100
"""Transactions per second (2,000 statements) that do not saturate the machine. At full load, statements queue
at the fake TiDB servers, and their latency says nothing about migration."""
_STOPWATCH_INTERVAL_SECONDS = 0.002
"""Interval of the stopwatch's statements, long enough to leave CPU for sysbench."""
_STEP_TIMEOUT_SECONDS = 60.0
_STATS_WAIT_SECONDS = 1.5
"""Time until the module has reported all counts."""
_MIGRATIONS_METRIC = "envoy_tidevoy_migrations"
MIGRATED = ("moved", "ok")


@dataclass(frozen=True, slots=True)
class Combination:
    """The protocol options of a run. `tls`: whether both sides of Envoy use TLS."""

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
    """The result of a run. `migrations`: counts by node, then by result and reason.

    `statements`: of the stopwatch. `drain_windows`: from the start of each drain until the node was empty.
    """

    combination: Combination
    counts: SysbenchCounts
    migrations: Mapping[str, Mapping[tuple[str, str], int]]
    statements: Sequence[TimedStatement]
    drain_windows: Sequence[TimeWindow]

    @property
    def migrated(self) -> dict[str, int]:
        """Sessions that have migrated away, per node."""
        return {node: counts.get(MIGRATED, 0) for node, counts in self.migrations.items()}

    @property
    def failed_by_reason(self) -> dict[str, int]:
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
    def slowest_while_migrating(self) -> float:
        """The slowest statement, in ms, just before or during which the stopwatch's session migrated."""
        return slowest_ms(statement for statement in self.statements if statement.migrated)

    @property
    def slowest_at_rest(self) -> float:
        """The slowest statement of the stopwatch without any drain or migration, in milliseconds."""
        undisturbed = statements_during(self.statements, self.drain_windows, inside=False)
        return slowest_ms(statement for statement in undisturbed if not statement.migrated)


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

    `rate`: transactions per second, 0: full speed; `ca`: the CA of Envoy's certificate, with TLS.

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
        statements = await stop_stopwatch(stopwatch)
    return RollingRestartResult(
        combination, counts, await _read_migration_counts(stack), statements, drain_windows
    )


async def restart_node(stack: LocalCluster, node: Tidb, clients: RunningSysbench) -> TimeWindow:
    """Drain, stop, start and undrain a node; return the window from the drain until the node was empty."""

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
    page = await fetch_module_stats(stack.envoy)
    counts: dict[str, dict[tuple[str, str], int]] = {node.address: {} for node in stack.tidb}
    for node, result, reason, count in parse_migration_counts(page):
        counts.setdefault(node, {})[result, reason] = count
    return counts


async def fetch_module_stats(envoy: EnvoyProcess) -> str:
    """Return the module's metrics in Prometheus' text format, from Envoy's admin interface."""
    return (await envoy.get("/stats/prometheus?filter=^tidevoy")).text


def parse_samples(page: str, name: str) -> Iterator[Sample]:
    """Yield the samples of one gauge or counter."""
    for family in text_string_to_metric_families(page):
        yield from (sample for sample in family.samples if sample.name in (name, f"{name}_total"))


def parse_migration_counts(page: str) -> Iterator[tuple[str, str, str, int]]:
    """Yield node, result, reason and count of each migration series on Envoy's Prometheus page."""
    for sample in parse_samples(page, _MIGRATIONS_METRIC):
        yield sample.labels["node"], sample.labels["result"], sample.labels["reason"], int(sample.value)
