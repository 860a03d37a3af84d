"""The figures of moving sessions, from what was seen. Pure."""

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
"""Seconds in which 1,000 sessions are to have left a node; at 500 a second it takes 2."""
MAX_STALL_MS = 10.0
"""Milliseconds that a worker may be busy with one thing."""
MAX_STATEMENT_MS = 100.0
"""Milliseconds that a statement may take while sessions move."""
MEMORY_TOLERANCE_PERCENT = 5.0
"""Percent by which memory may differ and still be called flat: allocators give back when they like."""
_MAX_LISTED_STATEMENTS = 5


@dataclass(frozen=True, slots=True)
class ObservedPhase:
    """What was seen in a while: statements of the session beside, and turns of the worker's event loop."""

    window: TimeWindow
    loop_durations: LoopDurations

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.window.end - self.window.begin


@dataclass(frozen=True, slots=True)
class CrowdResult:
    """`moved` of these sessions were on the node that was drained. `asked`: what the one beside has asked."""

    sessions: int
    moved: int
    statements: Sequence[TimedStatement]
    without_drain: ObservedPhase
    during_drain: ObservedPhase


def crowd_figures(result: CrowdResult) -> list[BenchmarkFigure]:
    """How long the node took to be empty, and how long others waited meanwhile."""
    target = MAX_EMPTYING_SECONDS * max(1.0, result.moved / 1000)
    name = f"{result.moved:,} of {result.sessions:,} sessions leave a node"
    note = "none reconnected, and all answered afterwards"
    figures = [
        BenchmarkFigure(f"{name}: until it is empty", result.during_drain.seconds, "s", target, note=note)
    ]
    for one, how, limit in (
        (result.during_drain, "meanwhile", MAX_STALL_MS),
        (result.without_drain, "without a drain", None),
    ):
        found = statements_during(result.statements, [one.window])
        figures += [
            BenchmarkFigure(
                f"slowest statement of a session beside, {how}",
                slowest_ms(found),
                "ms",
                limit,
                Spread.of(latencies_ms(found)),
                f"the slowest of all: {_format_numbers(latencies_ms(found)[:_MAX_LISTED_STATEMENTS])} ms",
            ),
            BenchmarkFigure(
                f"longest turn of the worker, {how}",
                event_loop_latency.longest_ms(one.loop_durations),
                "ms",
                limit,
                note=f"of {sum(one.loop_durations.values()):,}; longer than 1 ms: {event_loop_latency.count_longer(one.loop_durations, 1.0):,}",
            ),
        ]
    return figures


@dataclass(frozen=True, slots=True)
class RepeatedMovesResult:
    """Sessions that moved to and fro. `before`: Envoy before they came; `after`: when all had gone.

    `samples`: moves so far, and what Envoy held then. `left`: sessions that the module counts at the end.
    """

    sessions: int
    seconds: float
    before: ResourceUsage
    samples: Sequence[tuple[int, ResourceUsage]]
    after: ResourceUsage
    sessions_left: int


def repeated_moves_figures(result: RepeatedMovesResult) -> list[BenchmarkFigure]:
    """Whether what Envoy holds is flat."""
    (first_moves, first), (moves, last) = result.samples[0], result.samples[-1]
    named = f"after {moves:,} moves against {first_moves:,}"
    samples_text = "; ".join(
        f"{count:,}: {held.memory_mib:.1f} MiB, {held.open_files:,} files, {held.epoll_entries:,} watched"
        for count, held in result.samples
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
    """What the clients of restarted nodes noticed."""
    counts, others = result.counts, latencies_ms(result.statements)
    note = f"{sum(result.moved.values()):,} sessions moved, {counts.statements:,} statements of sysbench"
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
            spread=Spread.of(others),
            note="what the machine makes of the load alone; the spread is of all statements",
        ),
    ]


def _format_numbers(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)
