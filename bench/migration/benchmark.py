"""What moving sessions costs: others on the same worker, Envoy in the long run, and who is moved."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from bench.load_client import LoadClient
from bench.migration import event_loop_latency
from bench.migration.cluster import STATS_FLUSH_WAIT_SECONDS, MigrationCluster, check_all_alive, run_cluster
from bench.migration.figures import (
    CrowdResult,
    ObservedPhase,
    RepeatedMovesResult,
    crowd_figures,
    repeated_moves_figures,
    rolling_figures,
)
from bench.migration.rolling_restart import (
    MODERATE_TRANSACTIONS_PER_SECOND,
    NODE_COUNT,
    Combination,
    RollingRestartResult,
    run_rolling_restart,
)
from bench.migration.statement_latency import TimeWindow, run_stopwatch
from bench.reporting.report import BenchmarkFigure
from bench.resource_usage import ResourceUsage, raise_file_limit
from controlplane.xds.bootstrap import module_path
from sandbox.child_process import ProcessFailed, ProgramMissing
from sandbox.local_cluster import LocalCluster
from sandbox.session_certificate import SessionCertificate

DEFAULT_SESSIONS = 10_000
DEFAULT_MOVES = 100_000
DEFAULT_ROUNDS = 3
METHOD = (
    "One Envoy with one worker, configured by a real control plane with default settings, in front of small"
    " stand-ins that answer at once (`bench/migration/fake_node.py`), all on one machine. A crowd: idle sessions on"
    " ten nodes of equal weight, one of which is drained. Meanwhile one more session of the same worker asks"
    " a statement each millisecond (`bench/migration/stopwatch.py`); its node takes hardly any part and is a process of"
    " its own. Shown are its slowest statement and the longest turn of the worker's event loop as Envoy"
    " counts it (`enable_dispatcher_stats`), and both in a while without a drain. To and fro: sessions that"
    " move between two nodes, drained in turn, at most 5,000 a second; what Envoy holds after a tenth, a half"
    " and all of the moves, and after the last session has gone. Rolling: sysbench oltp_read_write with 32"
    " clients (prepared statements, no TLS, two workers) on stand-ins for TiDB over MariaDB, while each node"
    " is drained, stopped, started and put into service again; the slowest statement of one more session,"
    " which does nothing else."
)
_NODE_COUNT = 10
_ENVOY_RESERVED_FILES = 200
"""Files that Envoy needs beside two for each session."""
_BASELINE_SECONDS = 5.0
"""Seconds without a drain."""
_MAX_REPEATED_SESSIONS = 2_000
"""Sessions that move so, if so many moves are wanted."""
_FAST_MIGRATION_SETTINGS = {"per_second": 5_000, "at_once": 256}
_SAMPLE_FRACTIONS = (0.1, 0.5, 1.0)
_WARM_UP_SESSIONS = 20
_LOGINS_PER_SECOND = 1_000.0
"""New sessions a second while a crowd comes."""


async def measure(
    sessions: int = DEFAULT_SESSIONS, moves: int = DEFAULT_MOVES, rounds: int = DEFAULT_ROUNDS
) -> list[BenchmarkFigure]:
    """So many idle sessions, moves to and fro, and rolling restarts: about six minutes with all as it is.

    ProgramMissing without the module, or without what is needed to build the load client.
    """
    module = module_path.find_module()
    if module is None:
        raise ProgramMissing("Tidevoy's module for Envoy", "make bench, which builds it")
    with tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as name:
        directory = Path(name)
        client = await LoadClient.create(directory)
        crowd = await measure_crowd(
            directory / "crowd", module, client, fit_session_count(sessions, raise_file_limit())
        )
        long = await measure_repeated_moves(directory / "long", module, client, moves)
        roll = await _measure_rolling_restart(directory / "rolling", module, rounds)
    return [*crowd_figures(crowd), *repeated_moves_figures(long), *rolling_figures(roll, rounds)]


def fit_session_count(sessions: int, files: int) -> int:
    """As many of these sessions as an Envoy can have that may open so many files; the same on each node."""
    return max(_NODE_COUNT, min(sessions, (files - _ENVOY_RESERVED_FILES) // 2) // _NODE_COUNT * _NODE_COUNT)


async def measure_crowd(directory: Path, module: Path, client: LoadClient, sessions: int) -> CrowdResult:
    """Drain one of ten nodes on which these sessions are. ProcessFailed: one of them noticed; NotInTime."""
    async with run_cluster(directory, module, _NODE_COUNT, with_isolated_node=True) as (cluster, [*nodes, _]):
        # The session beside comes while no other node takes one.
        await cluster.drain(*nodes)
        await cluster.wait_envoy_up_to_date()
        async with run_stopwatch(cluster.port, directory, prepared=False) as stopwatch:
            await cluster.undrain(*nodes)
            idle_sessions = client.idle(
                cluster.port, connections=sessions, ramp=_LOGINS_PER_SECOND, seconds=sessions / 100 + 30
            )
            async with idle_sessions as found:
                sessions_on_node = (await cluster.fetch_nodes_report()).sessions[nodes[0]]
                await asyncio.sleep(STATS_FLUSH_WAIT_SECONDS)
                first, begin = await cluster.fetch_loop_durations(), time.monotonic()
                await asyncio.sleep(_BASELINE_SECONDS)
                without_drain = TimeWindow(begin, time.monotonic())
                await asyncio.sleep(STATS_FLUSH_WAIT_SECONDS)
                second = await cluster.fetch_loop_durations()
                begin = await cluster.drain(nodes[0])
                during_drain = TimeWindow(begin, await cluster.wait_empty(nodes[0]))
                await asyncio.sleep(STATS_FLUSH_WAIT_SECONDS)
                third, nodes_report = await cluster.fetch_loop_durations(), await cluster.fetch_nodes_report()
            check_all_alive(found, sessions)
            statements = await stopwatch.stop()
    _check_no_reconnects(nodes_report.logins.total(), sessions + 1)
    return CrowdResult(
        sessions,
        sessions_on_node,
        statements,
        ObservedPhase(without_drain, event_loop_latency.subtract(second, first)),
        ObservedPhase(during_drain, event_loop_latency.subtract(third, second)),
    )


async def measure_repeated_moves(
    directory: Path, module: Path, client: LoadClient, moves: int
) -> RepeatedMovesResult:
    """Drain two nodes in turn until sessions have moved so often. ProcessFailed as above; NotInTime."""
    async with run_cluster(directory, module, 2, settings={"migration": _FAST_MIGRATION_SETTINGS}) as (
        cluster,
        [source, target],
    ):
        await cluster.drain(target)
        await cluster.wait_envoy_up_to_date()
        source, target = await _warm_up(cluster, client, source, target)
        before, sessions = (
            await cluster.wait_stable_resources(),
            max(1, min(_MAX_REPEATED_SESSIONS, moves // 10)),
        )
        samples: list[tuple[int, ResourceUsage]] = []
        moved, took = 0, 0.0
        async with client.idle(cluster.port, connections=sessions, ramp=_LOGINS_PER_SECOND) as found:
            while moved < moves:
                begin = time.monotonic()
                source, target = await _move_all_sessions(cluster, source, target)
                took += time.monotonic() - begin
                moved += sessions
                if moved >= moves * _SAMPLE_FRACTIONS[len(samples)]:
                    samples.append((moved, await cluster.wait_stable_resources()))
            nodes_report = await cluster.fetch_nodes_report()
        check_all_alive(found, sessions)
        _check_no_reconnects(nodes_report.logins.total(), sessions + _WARM_UP_SESSIONS)
        await _wait_all_closed(cluster)
        return RepeatedMovesResult(
            sessions,
            took,
            before,
            samples,
            await cluster.wait_stable_resources(),
            await cluster.count_module_sessions(),
        )


async def _warm_up(
    cluster: MigrationCluster, client: LoadClient, source: str, target: str
) -> tuple[str, str]:
    """A few sessions come, move and go: what Envoy and the module keep for good is there then."""
    async with client.idle(cluster.port, connections=_WARM_UP_SESSIONS):
        source, target = await _move_all_sessions(cluster, source, target)
    await _wait_all_closed(cluster)
    return source, target


async def _move_all_sessions(cluster: MigrationCluster, source: str, target: str) -> tuple[str, str]:
    """All sessions move; where they are now, and where they were."""
    await cluster.undrain(target)
    await cluster.drain(source)
    await cluster.wait_empty(source)
    return target, source


async def _wait_all_closed(cluster: MigrationCluster) -> None:
    await cluster.wait_until(lambda seen: not seen.sessions.total(), "all sessions to be gone")
    # The module takes its time to say so, and Envoy to close what it closes late.
    await asyncio.sleep(STATS_FLUSH_WAIT_SECONDS)


async def _measure_rolling_restart(directory: Path, module: Path, rounds: int) -> RollingRestartResult:
    arguments = SessionCertificate.load_or_create(directory).arguments
    async with LocalCluster.start(directory / "stack", nodes=0, module=module) as stack:
        for _ in range(NODE_COUNT):
            await stack.add_tidb(*arguments)

        async def serves() -> bool:
            return (
                list((await stack.states()).values()).count("active") == NODE_COUNT
                and await stack.envoy.is_live()
            )

        await stack.wait_until(serves, f"{NODE_COUNT} active nodes behind Envoy", 60.0)
        combination = Combination(prepared=True, tls=False, workers=2)
        found = await run_rolling_restart(
            stack, combination, directory / "load", rounds=rounds, rate=MODERATE_TRANSACTIONS_PER_SECOND
        )
        if violations := stack.violations():
            raise ProcessFailed("Envoy", "has broken the protocol towards a node", "\n".join(violations))
        return found


def _check_no_reconnects(logins: int, expected: int) -> None:
    if logins != expected:
        raise ProcessFailed("Envoy", f"has lost sessions: {expected} came, {logins} have logged in", "")
