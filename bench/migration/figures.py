"""Figures of session migration from the measurements. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.machine import ResourceUsage
from bench.migration import event_loop_latency
from bench.migration.event_loop_latency import LoopDurations
from bench.migration.rolling_restart import RollingRestartResult
from bench.migration.stopwatch import (
    TimedStatement,
    TimeWindow,
    latencies_ms,
    slowest_ms,
    statements_during,
)
from bench.reporting.report import BenchmarkFigure, Spread

MAX_EMPTYING_SECONDS = 5.0
"""Target for 1,000 sessions to leave a node. At 500 migrations per second, this takes 2 s."""
MAX_STALL_MS = 10.0
"""Target for the longest iteration of the worker's event loop. Other sessions wait until it ends."""
MAX_STATEMENT_MS = 100.0
"""Target for the slowest statement while sessions migrate."""
MEMORY_TOLERANCE_PERCENT = 5.0
"""Memory growth that counts as none, since allocators return memory at unpredictable times."""
_MAX_LISTED_STATEMENTS = 5


@dataclass(frozen=True, slots=True)
class ObservedPhase:
    """A time window, and the iterations of the worker's event loop during it."""

    window: TimeWindow
    loop_durations: LoopDurations

    @property
    def seconds(self) -> float:
        return self.window.end - self.window.begin


@dataclass(frozen=True, slots=True)
class IdleSessionsResult:
    """A drain that migrated `migrated` of `sessions` sessions. `statements`: those of the stopwatch."""

    sessions: int
    migrated: int
    statements: Sequence[TimedStatement]
    without_drain: ObservedPhase
    during_drain: ObservedPhase


def idle_sessions_figures(result: IdleSessionsResult) -> list[BenchmarkFigure]:
    """Return how long the drain took, and how long the stopwatch's session and the worker's loop stalled."""
    target = MAX_EMPTYING_SECONDS * max(1.0, result.migrated / 1000)
    name = f"{result.migrated:,} of {result.sessions:,} sessions leave a node"
    note = "none reconnected, and all answered afterwards"
    figures = [
        BenchmarkFigure(f"{name}: until it is empty", result.during_drain.seconds, "s", target, note=note)
    ]
    for phase, phase_name, limit in (
        (result.during_drain, "meanwhile", MAX_STALL_MS),
        (result.without_drain, "without a drain", None),
    ):
        statements = statements_during(result.statements, [phase.window])
        latencies = latencies_ms(statements)
        slow_iterations = event_loop_latency.count_longer(phase.loop_durations, 1.0)
        figures += [
            BenchmarkFigure(
                f"slowest statement of another session, {phase_name}",
                slowest_ms(statements),
                "ms",
                limit,
                Spread.of(latencies),
                f"the slowest of all: {_format_numbers(latencies[:_MAX_LISTED_STATEMENTS])} ms",
            ),
            BenchmarkFigure(
                f"longest loop iteration of the worker, {phase_name}",
                event_loop_latency.longest_ms(phase.loop_durations),
                "ms",
                limit,
                note=f"of {sum(phase.loop_durations.values()):,}; longer than 1 ms: {slow_iterations:,}",
            ),
        ]
    return figures


@dataclass(frozen=True, slots=True)
class RepeatedMigrationsResult:
    """Sessions that migrated repeatedly. `sessions_left`: the module's session count at the end.

    `before`: Envoy's resources before the sessions connected; `after`: after all were closed; `samples`:
    numbers of migrations so far, each with Envoy's resources at that time.
    """

    sessions: int
    seconds: float
    before: ResourceUsage
    samples: Sequence[tuple[int, ResourceUsage]]
    after: ResourceUsage
    sessions_left: int


def repeated_migrations_figures(result: RepeatedMigrationsResult) -> list[BenchmarkFigure]:
    """Return the growth of Envoy's resources over the migrations."""
    (first_count, first), (last_count, last) = result.samples[0], result.samples[-1]
    named = f"after {last_count:,} moves against {first_count:,}"
    samples_text = "; ".join(
        f"{count:,}: {usage.memory_mib:.1f} MiB, {usage.open_files:,} files,"
        f" {usage.epoll_entries:,} epoll entries"
        for count, usage in result.samples
    )
    rate_text = f"{result.sessions:,} sessions, {last_count / result.seconds:,.0f} moves/s"
    memory = BenchmarkFigure(
        f"resident memory {named}",
        (last.memory_mib / first.memory_mib - 1) * 100,
        "%",
        MEMORY_TOLERANCE_PERCENT,
        note=f"{rate_text}; {samples_text}",
    )
    before, after, gone = result.before, result.after, "when all sessions have gone"
    counts = {
        f"open files {named}": last.open_files - first.open_files,
        f"epoll entries {named}": last.epoll_entries - first.epoll_entries,
        f"open files {gone}": after.open_files - before.open_files,
        f"epoll entries {gone}": after.epoll_entries - before.epoll_entries,
    }
    return [
        memory,
        *(BenchmarkFigure(name, value, "more", 0) for name, value in counts.items()),
        BenchmarkFigure("sessions still counted when all have gone", result.sessions_left, "", 0),
    ]


def rolling_figures(result: RollingRestartResult, rounds: int) -> list[BenchmarkFigure]:
    """Return the effect of rolling restarts on clients."""
    counts, latencies = result.counts, latencies_ms(result.statements)
    note = (
        f"{sum(result.migrated.values()):,} sessions migrated, {counts.statements:,} statements of sysbench"
    )
    name = f"{rounds} rolling restarts"
    return [
        BenchmarkFigure(
            f"{name}: errors and reconnects", counts.errors + counts.reconnects, "", 0, note=note
        ),
        *(
            BenchmarkFigure(f"{name}: slowest statement {when}", value, "ms", MAX_STATEMENT_MS)
            for when, value in (
                ("while sessions leave", result.slowest_while_draining),
                ("during its own migration", result.slowest_while_migrating),
            )
        ),
        BenchmarkFigure(
            f"{name}: slowest statement without a drain",
            result.slowest_at_rest,
            "ms",
            spread=Spread.of(latencies),
            note="the effect of the load alone; the spread is of all statements",
        ),
    ]


def _format_numbers(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)
