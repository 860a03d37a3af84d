"""Benchmark of session migration: effect on other sessions, Envoy's resources, and migrated sessions."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from bench.load_client import LoadClient
from bench.machine import ResourceUsage, raise_file_limit
from bench.migration import event_loop_latency
from bench.migration.cluster import STATS_FLUSH_WAIT_SECONDS, MigrationCluster, check_all_alive, run_cluster
from bench.migration.figures import (
    IdleSessionsResult,
    ObservedPhase,
    RepeatedMigrationsResult,
    idle_sessions_figures,
    repeated_migrations_figures,
    rolling_figures,
)
from bench.migration.rolling_restart import (
    MODERATE_TRANSACTIONS_PER_SECOND,
    NODE_COUNT,
    Combination,
    RollingRestartResult,
    run_rolling_restart,
)
from bench.migration.stopwatch import TimeWindow, run_stopwatch, stop_stopwatch
from bench.programs import find_built_module
from bench.reporting.report import BenchmarkFigure
from sandbox.child_process import ProcessFailed
from sandbox.local_cluster import LocalCluster
from sandbox.session_certificate import SessionCertificate

DEFAULT_SESSIONS = 10_000
DEFAULT_MIGRATIONS = 100_000
DEFAULT_ROUNDS = 3
METHOD = """\
One Envoy with one worker stands in front of small fake TiDB servers that answer at once
(`bench/migration/fake_node.py`), all on one machine. A real control plane with default settings configures
it.

* Idle sessions: they are distributed over ten nodes of equal weight, one of which is drained. Meanwhile
  another session of the same worker sends a statement every millisecond (`bench/migration/stopwatch.py`).
  Its node gets hardly any idle sessions and runs in its own process. The figures are the slowest statement
  of that session, and the longest iteration of the worker's event loop as Envoy measures it
  (`enable_dispatcher_stats`), with and without a drain.
* Back and forth: sessions migrate between two nodes, which are drained alternately, at most 5,000 sessions
  per second. The figures are Envoy's resources after a tenth, half and all of the migrations, and after the
  last session has ended.
* Rolling restarts: sysbench oltp_read_write with 32 clients (prepared statements, no TLS, two workers) runs
  on simulated TiDB servers with MariaDB behind them. Meanwhile each node is drained, stopped, started and
  put into service again. The figures are the errors, and the slowest statement of another session, which
  only measures."""
_NODE_COUNT = 10
_ENVOY_RESERVED_FILES = 200
"""Open files that Envoy needs, apart from two per session."""
_BASELINE_SECONDS = 5.0
"""Duration of the measurement without a drain."""
_MAX_REPEATED_SESSIONS = 2_000
"""Maximum of sessions that migrate repeatedly."""
_FAST_MIGRATION_SETTINGS = {"max_per_second": 5_000, "max_concurrent": 256}
_SAMPLE_FRACTIONS = (0.1, 0.5, 1.0)
_WARM_UP_SESSIONS = 20
_LOGINS_PER_SECOND = 1_000.0
"""Rate of new sessions while the idle sessions connect."""


async def measure(
    sessions: int = DEFAULT_SESSIONS, moves: int = DEFAULT_MIGRATIONS, rounds: int = DEFAULT_ROUNDS
) -> list[BenchmarkFigure]:
    """Measure idle sessions, repeated migrations and rolling restarts: about six minutes with the defaults.

    Raises ProgramMissing without the module, or without the tools to build the load client.
    """
    module = find_built_module()
    with tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as name:
        directory = Path(name)
        client = await LoadClient.create(directory)
        idle = await measure_idle_sessions(
            directory / "idle", module, client, fit_session_count(sessions, raise_file_limit())
        )
        repeated = await measure_repeated_migrations(directory / "long", module, client, moves)
        rolling = await _measure_rolling_restart(directory / "rolling", module, rounds)
    return [
        *idle_sessions_figures(idle),
        *repeated_migrations_figures(repeated),
        *rolling_figures(rolling, rounds),
    ]


def fit_session_count(sessions: int, files: int) -> int:
    """Return the highest multiple of the node count up to `sessions` for which `files` open files suffice."""
    return max(_NODE_COUNT, min(sessions, (files - _ENVOY_RESERVED_FILES) // 2) // _NODE_COUNT * _NODE_COUNT)


async def measure_idle_sessions(
    directory: Path, module: Path, client: LoadClient, sessions: int
) -> IdleSessionsResult:
    """Drain one of ten nodes that together have `sessions` idle sessions. Raises WaitTimeout.

    Raises ProcessFailed if a session was lost or had an error.
    """
    async with run_cluster(directory, module, _NODE_COUNT, with_isolated_node=True) as (cluster, [*nodes, _]):
        # All other nodes are drained, so that the stopwatch's session gets the isolated node.
        await cluster.drain(*nodes)
        await cluster.wait_envoy_up_to_date()
        async with run_stopwatch(cluster.port, directory) as stopwatch:
            await cluster.undrain(*nodes)
            idle_sessions = client.keep_idle(
                cluster.port, connections=sessions, ramp=_LOGINS_PER_SECOND, seconds=sessions / 100 + 30
            )
            async with idle_sessions as idle_results:
                sessions_on_node = (await cluster.fetch_nodes_report()).sessions[nodes[0]]
                await asyncio.sleep(STATS_FLUSH_WAIT_SECONDS)
                loops_at_start, begin = await cluster.fetch_loop_durations(), time.monotonic()
                await asyncio.sleep(_BASELINE_SECONDS)
                without_drain = TimeWindow(begin, time.monotonic())
                await asyncio.sleep(STATS_FLUSH_WAIT_SECONDS)
                loops_before_drain = await cluster.fetch_loop_durations()
                begin = await cluster.drain(nodes[0])
                during_drain = TimeWindow(begin, await cluster.wait_empty(nodes[0]))
                await asyncio.sleep(STATS_FLUSH_WAIT_SECONDS)
                loops_after_drain = await cluster.fetch_loop_durations()
                nodes_report = await cluster.fetch_nodes_report()
            check_all_alive(idle_results, sessions)
            statements = await stop_stopwatch(stopwatch)
    _check_no_reconnects(nodes_report.logins.total(), sessions + 1)
    return IdleSessionsResult(
        sessions,
        sessions_on_node,
        statements,
        ObservedPhase(without_drain, event_loop_latency.subtract(loops_before_drain, loops_at_start)),
        ObservedPhase(during_drain, event_loop_latency.subtract(loops_after_drain, loops_before_drain)),
    )


async def measure_repeated_migrations(
    directory: Path, module: Path, client: LoadClient, migrations: int
) -> RepeatedMigrationsResult:
    """Drain two nodes alternately until `migrations` migrations have happened. Raises WaitTimeout.

    Raises ProcessFailed if a session was lost or had an error.
    """
    async with run_cluster(directory, module, 2, settings={"migration": _FAST_MIGRATION_SETTINGS}) as (
        cluster,
        [source, target],
    ):
        await cluster.drain(target)
        await cluster.wait_envoy_up_to_date()
        source, target = await _warm_up(cluster, client, source, target)
        resources_before = await cluster.wait_stable_resources()
        sessions = max(1, min(_MAX_REPEATED_SESSIONS, migrations // 10))
        samples: list[tuple[int, ResourceUsage]] = []
        migrated, seconds = 0, 0.0
        async with client.keep_idle(
            cluster.port, connections=sessions, ramp=_LOGINS_PER_SECOND
        ) as idle_results:
            while migrated < migrations:
                begin = time.monotonic()
                source, target = await _migrate_all_sessions(cluster, source, target)
                seconds += time.monotonic() - begin
                migrated += sessions
                if migrated >= migrations * _SAMPLE_FRACTIONS[len(samples)]:
                    samples.append((migrated, await cluster.wait_stable_resources()))
            nodes_report = await cluster.fetch_nodes_report()
        check_all_alive(idle_results, sessions)
        _check_no_reconnects(nodes_report.logins.total(), sessions + _WARM_UP_SESSIONS)
        await _wait_all_closed(cluster)
        return RepeatedMigrationsResult(
            sessions,
            seconds,
            resources_before,
            samples,
            await cluster.wait_stable_resources(),
            await cluster.count_module_sessions(),
        )


async def _warm_up(
    cluster: MigrationCluster, client: LoadClient, source: str, target: str
) -> tuple[str, str]:
    """Migrate a few sessions and close them, so that Envoy and the module allocate permanent memory."""
    async with client.keep_idle(cluster.port, connections=_WARM_UP_SESSIONS):
        source, target = await _migrate_all_sessions(cluster, source, target)
    await _wait_all_closed(cluster)
    return source, target


async def _migrate_all_sessions(cluster: MigrationCluster, source: str, target: str) -> tuple[str, str]:
    """Migrate all sessions from `source` to `target`; return the nodes as (now full, now empty)."""
    await cluster.undrain(target)
    await cluster.drain(source)
    await cluster.wait_empty(source)
    return target, source


async def _wait_all_closed(cluster: MigrationCluster) -> None:
    await cluster.wait_until(lambda report: not report.sessions.total(), "all sessions to be closed")
    # The module reports with a delay, and Envoy closes some descriptors late.
    await asyncio.sleep(STATS_FLUSH_WAIT_SECONDS)


async def _measure_rolling_restart(directory: Path, module: Path, rounds: int) -> RollingRestartResult:
    arguments = SessionCertificate.load_or_create(directory).arguments
    async with LocalCluster.start(directory / "stack", nodes=0, module=module) as stack:
        for _ in range(NODE_COUNT):
            await stack.add_tidb(*arguments)
        await stack.wait_until(
            lambda: stack.is_in_service(NODE_COUNT), f"{NODE_COUNT} active nodes behind Envoy", 60.0
        )
        combination = Combination(prepared=True, tls=False, workers=2)
        result = await run_rolling_restart(
            stack, combination, directory / "load", rounds=rounds, rate=MODERATE_TRANSACTIONS_PER_SECOND
        )
        if violations := stack.violations():
            raise ProcessFailed(
                "Envoy", "has violated the protocol on a connection to a node", "\n".join(violations)
            )
        return result


def _check_no_reconnects(logins: int, expected: int) -> None:
    if logins != expected:
        raise ProcessFailed("Envoy", f"has lost sessions: {expected} sessions, but {logins} logins", "")
