"""The benchmark `balance`: all cases with all balancers, for an hour each, and what is to come of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

from bench.balance.cases import CASES
from bench.balance.imbalance_statistics import UNEVEN
from bench.balance.simulation import ALONE, BALANCERS, TIDEVOY, Simulation
from bench.balance.summary import SHARE, Outcome, Recovery, outcome
from bench.reporting.line_chart import Drawing, Line, Panel
from bench.reporting.report import Figure, Findings, Sheet
from cli.output import remark

METHOD = (
    "A discrete-event simulation (`bench/balance`), an hour of each case after five minutes to warm up, with"
    " fixed random numbers and the same sessions for each balancer. Tidevoy's decisions are those of the"
    " control plane itself, `controlplane.decide.plan`, once a second; each Envoy reports once a second, a"
    " second late unless said otherwise, and picks as the module does; it moves one session after the other,"
    " 50 ms each. Sessions come at random; half of them last a tenth of the mean, the others are lognormal"
    " with a heavy tail. `alone`: each Envoy picks the node on which it has the fewest sessions itself."
    " `round robin`: nodes take turns in each Envoy. `tiproxy`: TiProxy's rules for connections. `ideal`: one"
    " balancer that sees all at once and moves at no cost. Max/mean is that of the sessions on nodes in"
    " service, by weight, direct ones included, looked at each second. A swing is how much of a node's"
    " deviation from the mean comes back after it was gone: by how much its autocorrelation rises again, up"
    " to a minute; what is off by chance only fades away. A fleet has settled after a join or leave when"
    " max/mean stays below 1.10 for ten seconds."
)
MINUTES, SEED = 60.0, 1
_EVEN, _SETTLES, _SWING = 5.0, 10.0, 0.1  # targets: %, seconds, an autocorrelation
_STEADY = ("a", "b", "c", "g")  # cases whose steady state has a target
_LIKE_ALONE = "d"  # the case in which a balancer alone does well
_CHANGING = "e"  # the one whose changes are drawn
_HEADS = (
    *("", "median", "mean", "99th percentile", "most", f"above {UNEVEN:.2f}", "moves per hour"),
    *("shortest stay", "swing", "settles after a join", "after a leave"),
)

Outcomes = Mapping[tuple[str, str], Outcome]  # by case and balancer


class Run(NamedTuple):
    """What is simulated in one go."""

    case: str
    balancer: str
    seconds: float
    seed: int


async def measure() -> Findings:
    """Simulate all of it, as many at a time as there are cores."""
    runs = [Run(case, balancer, MINUTES * 60, SEED) for case in CASES for balancer in BALANCERS]
    again = Run(_LIKE_ALONE, ALONE, MINUTES * 60, SEED + 1)
    *found, other = await simulated([*runs, again])
    outcomes = {(each.case, each.balancer): each for each in found}
    return Findings(tuple(figures(outcomes, other)), tuple(sheets(outcomes)), tuple(drawings(outcomes)))


async def simulated(runs: Sequence[Run]) -> list[Outcome]:
    """What comes of these, in their order."""
    loop = asyncio.get_running_loop()
    # Not forked: who runs this may have threads.
    workers = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        return list(await asyncio.gather(*(loop.run_in_executor(pool, one, run) for run in runs)))
    finally:
        pool.shutdown(cancel_futures=True)  # who interrupts this does not wait for what has not begun


def one(run: Run) -> Outcome:
    """One simulation."""
    found = outcome(Simulation(CASES[run.case], run.balancer, run.seconds, run.seed).run())
    remark(f"case {run.case}, {run.balancer}: median {found.median:.3f}, 99th percentile {found.p99:.3f}")
    return found


# --- targets -----------------------------------------------------------------------------------------------


def figures(outcomes: Outcomes, again: Outcome) -> list[Figure]:
    """What has a target. `again`: a balancer alone in the case in which it does well, with other chances."""
    ours = {case: outcomes[case, TIDEVOY] for case, balancer in outcomes if balancer == TIDEVOY}
    found = [_steady(ours[case], outcomes[case, ALONE]) for case in _STEADY if case in ours]
    for case, each in ours.items():
        found += _settled(each, f"{case}: longest until below {UNEVEN:.2f} after a join", joins=True)
        found += _settled(each, f"{case}: the same after a leave", joins=False)
    found += [Figure(f"{case}: swing", each.swing, "", _SWING) for case, each in ours.items()]
    found += [
        Figure(f"{case}: sessions that moved twice in a minute", each.hasty, "", 0.0)
        for case, each in ours.items()
    ]
    if _LIKE_ALONE in ours:
        alone = outcomes[_LIKE_ALONE, ALONE]
        target, other = _percent(alone.mean), _percent(again.mean)
        name = f"{_LIKE_ALONE}: fullest node above the mean, mean over time, against a balancer alone"
        tolerance = abs(target - other)
        found.append(Figure(name, _percent(ours[_LIKE_ALONE].mean), "%", target, tolerance=tolerance))
    return found


def _steady(ours: Outcome, alone: Outcome) -> Figure:
    name = f"{ours.case}: fullest node above the mean, median"
    note = f"each Envoy alone {_percent(alone.steady):.0f} %; without two minutes behind each join or leave"
    return Figure(name, _percent(ours.steady), "%", _EVEN, note=note)


def _settled(found: Outcome, name: str, *, joins: bool) -> list[Figure]:
    recoveries = [each for each in found.recoveries if each.is_join is joins]
    if not recoveries:
        return []
    worst = max(recoveries, key=lambda each: _INFINITE if each.settled is None else each.settled)
    note = f"when {worst.name}"
    if joins:
        late = max(_INFINITE if each.shared is None else each.shared for each in recoveries)
        note += f"; {SHARE:.0%} of their share after {_seconds(late)} at most"
    return [Figure(name, _INFINITE if worst.settled is None else worst.settled, "s", _SETTLES, note=note)]


_INFINITE = 3_600.0
"""Seconds that stand for never: the whole hour."""


def _percent(imbalance: float) -> float:
    return (imbalance - 1) * 100


# --- tables and charts -------------------------------------------------------------------------------------


def sheets(outcomes: Outcomes) -> list[Sheet]:
    """A table for each case."""
    return [
        Sheet(
            f"{letter}: {case.about}",
            _HEADS,
            tuple(_row(each) for (of, _), each in outcomes.items() if of == letter),
        )
        for letter, case in CASES.items()
        if any(of == letter for of, _ in outcomes)
    ]


def _row(found: Outcome) -> tuple[str, ...]:
    return (
        found.balancer,
        *(f"{value:.3f}" for value in (found.median, found.mean, found.p99, found.most)),
        f"{found.uneven:.1%}",
        f"{found.moves_per_hour:,.0f}",
        "-" if found.shortest_stay is None else _seconds(found.shortest_stay),
        f"{found.swing:.2f}",
        _longest(found.recoveries, lambda each: each.is_join),
        _longest(found.recoveries, lambda each: not each.is_join),
    )


def _longest(recoveries: Sequence[Recovery], which: Callable[[Recovery], bool]) -> str:
    times = [each.settled for each in recoveries if which(each)]
    if not times:
        return "-"
    settled = [each for each in times if each is not None]
    return _seconds(max(settled)) if len(settled) == len(times) else "never"


def _seconds(seconds: float) -> str:
    return "never" if seconds >= _INFINITE else f"{seconds:.0f} s"


def drawings(outcomes: Outcomes) -> list[Drawing]:
    """Each case over the hour, and what comes behind a change."""
    cases = [
        Panel(sheet.title, 1.0, tuple(Line(each.balancer, each.minutes) for each in of))
        for sheet, of in ((sheet, _of(outcomes, sheet.title[0])) for sheet in sheets(outcomes))
    ]
    changes = [
        Panel(
            change.name,
            1.0,
            tuple(Line(each.balancer, each.recoveries[n].imbalances) for each in _of(outcomes, _CHANGING)),
        )
        for n, change in enumerate(CASES[_CHANGING].changes)
        if _of(outcomes, _CHANGING)
    ]
    hour = Drawing(
        file="balance-cases.svg",
        title="Sessions of the fullest node, in proportion to the mean",
        about="Median of each minute; values above 1.6 are drawn at 1.6",
        values="sessions per node, max/mean",
        unit="min",
        low=1.0,
        high=1.6,
        limit=1.05,
        panels=tuple(cases),
    )
    after = Drawing(
        file="balance-changes.svg",
        title="Sessions of the fullest node, in proportion to the mean, after nodes join or leave",
        about="Second by second; values above 1.6 are drawn at 1.6",
        values="sessions per node, max/mean",
        unit="s",
        low=1.0,
        high=1.6,
        limit=UNEVEN,
        panels=tuple(changes),
    )
    return [each for each in (hour, after) if each.panels]


def _of(outcomes: Outcomes, letter: str) -> list[Outcome]:
    return [each for (of, _), each in outcomes.items() if of == letter]
