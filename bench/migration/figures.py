"""The figures of moving sessions, from what was seen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.migration import event_loop_latency
from bench.migration.event_loop_latency import Turns
from bench.migration.rolling_restart import Rolled
from bench.migration.statement_latency import Asked, Window, during, milliseconds, slowest
from bench.reporting.report import Figure, Spread
from bench.resource_usage import Held

EMPTY = 5.0
"""Seconds in which 1,000 sessions are to have left a node; at 500 a second it takes 2."""
STALL = 10.0
"""Milliseconds that a worker may be busy with one thing."""
SLOWEST = 100.0
"""Milliseconds that a statement may take while sessions move."""
FLAT = 5.0
"""Percent by which memory may differ and still be called flat: allocators give back when they like."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class While:
    """What was seen in a while: statements of the session beside, and turns of the worker's event loop."""

    window: Window
    turns: Turns

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.window.end - self.window.begin


@dataclass(frozen=True, slots=True)
class Crowd:
    """`moved` of these sessions were on the node that was drained. `asked`: what the one beside has asked."""

    sessions: int
    moved: int
    asked: Sequence[Asked]
    quiet: While
    drained: While


def crowd_figures(crowd: Crowd) -> list[Figure]:
    """How long the node took to be empty, and how long others waited meanwhile."""
    target = EMPTY * max(1.0, crowd.moved / 1000)
    name = f"{crowd.moved:,} of {crowd.sessions:,} sessions leave a node"
    note = "none reconnected, and all answered afterwards"
    figures = [Figure(f"{name}: until it is empty", crowd.drained.seconds, "s", target, note=note)]
    for one, how, limit in ((crowd.drained, "meanwhile", STALL), (crowd.quiet, "without a drain", None)):
        found = during(crowd.asked, [one.window])
        figures += [
            Figure(
                f"slowest statement of a session beside, {how}",
                slowest(found),
                "ms",
                limit,
                Spread.of(milliseconds(found)),
                f"the slowest of all: {_listed(milliseconds(found)[:_SHOWN])} ms",
            ),
            Figure(
                f"longest turn of the worker, {how}",
                event_loop_latency.longest(one.turns),
                "ms",
                limit,
                note=f"of {sum(one.turns.values()):,}; longer than 1 ms: {event_loop_latency.longer(one.turns, 1.0):,}",
            ),
        ]
    return figures


@dataclass(frozen=True, slots=True)
class Long:
    """Sessions that moved to and fro. `before`: Envoy before they came; `after`: when all had gone.

    `samples`: moves so far, and what Envoy held then. `left`: sessions that the module counts at the end.
    """

    sessions: int
    seconds: float
    before: Held
    samples: Sequence[tuple[int, Held]]
    after: Held
    left: int


def long_figures(long: Long) -> list[Figure]:
    """Whether what Envoy holds is flat."""
    (first_moves, first), (moves, last) = long.samples[0], long.samples[-1]
    named = f"after {moves:,} moves against {first_moves:,}"
    told = "; ".join(
        f"{count:,}: {held.memory_mib:.1f} MiB, {held.files:,} files, {held.watched:,} watched"
        for count, held in long.samples
    )
    pace = f"{long.sessions:,} sessions, {moves / long.seconds:,.0f} moves/s"
    grown = (last.memory_mib / first.memory_mib - 1) * 100
    return [
        Figure(f"resident memory {named}", grown, "%", FLAT, note=f"{pace}; {told}"),
        Figure(f"open files {named}", last.files - first.files, "more", 0),
        Figure(f"epoll entries {named}", last.watched - first.watched, "more", 0),
        Figure("open files when all sessions have gone", long.after.files - long.before.files, "more", 0),
        Figure(
            "epoll entries when all sessions have gone", long.after.watched - long.before.watched, "more", 0
        ),
        Figure("sessions still counted when all have gone", long.left, "", 0),
    ]


def rolling_figures(rolled: Rolled, rounds: int) -> list[Figure]:
    """What the clients of restarted nodes noticed."""
    tally, others = rolled.tally, milliseconds(rolled.asked)
    note = f"{sum(rolled.moved.values()):,} sessions moved, {tally.statements:,} statements of sysbench"
    name = f"{rounds} rolling restarts"
    return [
        Figure(f"{name}: errors and reconnects", tally.errors + tally.reconnects, "", 0, note=note),
        Figure(f"{name}: slowest statement while sessions leave", rolled.slowest, "ms", SLOWEST),
        Figure(
            f"{name}: slowest statement around a move of its own", rolled.slowest_of_its_own, "ms", SLOWEST
        ),
        Figure(
            f"{name}: slowest statement while none leaves",
            rolled.slowest_otherwise,
            "ms",
            spread=Spread.of(others),
            note="what the machine makes of the load alone; the spread is of all statements",
        ),
    ]


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)
