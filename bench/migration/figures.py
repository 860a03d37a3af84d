"""Figures of session migration from the measurements. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.migration import event_loop_latency
from bench.migration.event_loop_latency import LoopDurations
from bench.migration.rolling_restart import RollingRestartResult
from bench.migration.statement_latency import (
    TimedStatement,
    TimeWindow,
    latencies_ms,
    slowest_ms,
    statements_during,
)
from bench.reporting.report import BenchmarkFigure, Spread
from bench.resource_usage import ResourceUsage

MAX_EMPTYING_SECONDS = 5.0
"""Target for 1,000 sessions to leave a node; at 500 per second it takes 2 s."""
MAX_STALL_MS = 10.0
"""Target for the longest time that a worker serves no other session."""
MAX_STATEMENT_MS = 100.0
"""Target for the slowest statement while sessions migrate."""
MEMORY_TOLERANCE_PERCENT = 5.0
"""Growth that still counts as flat: allocators return memory at unpredictable times."""
_MAX_LISTED_STATEMENTS = 5


@dataclass(frozen=True, slots=True)
class ObservedPhase:
    """A time window with the iterations of the worker's event loop in it."""

    window: TimeWindow
    loop_durations: LoopDurations

    @property
    def seconds(self) -> float:
        """The length of the window."""
        return self.window.end - self.window.begin


@dataclass(frozen=True, slots=True)
class CrowdResult:
    """The drain of a node with `moved` of `sessions` sessions. `statements`: of the measuring session."""

    sessions: int
    moved: int
    statements: Sequence[TimedStatement]
    without_drain: ObservedPhase
    during_drain: ObservedPhase


def crowd_figures(result: CrowdResult) -> list[BenchmarkFigure]:
    """Return how long the node took to be empty, and how long others waited meanwhile."""
    target = MAX_EMPTYING_SECONDS * max(1.0, result.moved / 1000)
    name = f"{result.moved:,} of {result.sessions:,} sessions leave a node"
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
                f"slowest statement of a session beside, {phase_name}",
                slowest_ms(statements),
                "ms",
                limit,
                Spread.of(latencies),
                f"the slowest of all: {_format_numbers(latencies[:_MAX_LISTED_STATEMENTS])} ms",
            ),
            BenchmarkFigure(
                f"longest turn of the worker, {phase_name}",
                event_loop_latency.longest_ms(phase.loop_durations),
                "ms",
                limit,
                note=f"of {sum(phase.loop_durations.values()):,}; longer than 1 ms: {slow_iterations:,}",
            ),
        ]
    return figures


@dataclass(frozen=True, slots=True)
class RepeatedMovesResult:
    """Sessions that migrated repeatedly.

    `before`: Envoy's resources before the sessions connected; `after`: after all were closed; `samples`:
    migrations so far, and Envoy's resources then; `sessions_left`: the module's count at the end.
    """

    sessions: int
    seconds: float
    before: ResourceUsage
    samples: Sequence[tuple[int, ResourceUsage]]
    after: ResourceUsage
    sessions_left: int


def repeated_moves_figures(result: RepeatedMovesResult) -> list[BenchmarkFigure]:
    """Return the growth of Envoy's resources over the migrations."""
    (first_moves, first), (moves, last) = result.samples[0], result.samples[-1]
    named = f"after {moves:,} moves against {first_moves:,}"
    samples_text = "; ".join(
        f"{count:,}: {usage.memory_mib:.1f} MiB, {usage.open_files:,} files,"
        f" {usage.epoll_entries:,} epoll entries"
        for count, usage in result.samples
    )
    rate_text = f"{result.sessions:,} sessions, {moves / result.seconds:,.0f} moves/s"
    growth_percent = (last.memory_mib / first.memory_mib - 1) * 100
    return [
        BenchmarkFigure(
            f"resident memory {named}",
            growth_percent,
            "%",
            MEMORY_TOLERANCE_PERCENT,
            note=f"{rate_text}; {samples_text}",
        ),
        BenchmarkFigure(f"open files {named}", last.open_files - first.open_files, "more", 0),
        BenchmarkFigure(f"epoll entries {named}", last.epoll_entries - first.epoll_entries, "more", 0),
        BenchmarkFigure(
            "open files when all sessions have gone",
            result.after.open_files - result.before.open_files,
            "more",
            0,
        ),
        BenchmarkFigure(
            "epoll entries when all sessions have gone",
            result.after.epoll_entries - result.before.epoll_entries,
            "more",
            0,
        ),
        BenchmarkFigure("sessions still counted when all have gone", result.sessions_left, "", 0),
    ]


def rolling_figures(result: RollingRestartResult, rounds: int) -> list[BenchmarkFigure]:
    """Return the effect of rolling restarts on clients."""
    counts, latencies = result.counts, latencies_ms(result.statements)
    note = f"{sum(result.moved.values()):,} sessions migrated, {counts.statements:,} statements of sysbench"
    name = f"{rounds} rolling restarts"
    return [
        BenchmarkFigure(
            f"{name}: errors and reconnects", counts.errors + counts.reconnects, "", 0, note=note
        ),
        BenchmarkFigure(
            f"{name}: slowest statement while sessions leave",
            result.slowest_while_draining,
            "ms",
            MAX_STATEMENT_MS,
        ),
        BenchmarkFigure(
            f"{name}: slowest statement around a move of its own",
            result.slowest_while_moving,
            "ms",
            MAX_STATEMENT_MS,
        ),
        BenchmarkFigure(
            f"{name}: slowest statement while none leaves",
            result.slowest_at_rest,
            "ms",
            spread=Spread.of(latencies),
            note="the effect of the load alone; the spread is of all statements",
        ),
    ]


def _format_numbers(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)
