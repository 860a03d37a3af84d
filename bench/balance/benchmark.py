"""The benchmark `balance`: all cases with all balancers, for an hour each, and what is to come of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

from bench.balance.cases import CASES
from bench.balance.imbalance_statistics import UNEVEN_THRESHOLD
from bench.balance.simulation import BALANCERS, LEAST_CONNECTIONS, TIDEVOY, Simulation
from bench.balance.summary import JOINED_SHARE_TARGET, Recovery, SimulationSummary, summarize
from bench.reporting.line_chart import Line, LineChart, Panel
from bench.reporting.report import BenchmarkFigure, Findings, ResultTable
from cli.output import print_note

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
_EVEN_LIMIT_PERCENT, _SETTLE_LIMIT_SECONDS, _OSCILLATION_LIMIT = (
    5.0,
    10.0,
    0.1,
)  # targets: %, seconds, an autocorrelation
_STEADY_STATE_CASES = ("a", "b", "c", "g")  # cases whose steady state has a target
_LEAST_CONNECTIONS_CASE = "d"  # the case in which a balancer alone does well
_CHANGES_CASE = "e"  # the one whose changes are drawn
_HEADERS = (
    *("", "median", "mean", "99th percentile", "most", f"above {UNEVEN_THRESHOLD:.2f}", "moves per hour"),
    *("shortest stay", "swing", "settles after a join", "after a leave"),
)

SummariesByRun = Mapping[tuple[str, str], SimulationSummary]  # by case and balancer


class SimulationRun(NamedTuple):
    """What is simulated in one go."""

    case: str
    balancer: str
    seconds: float
    seed: int


async def measure() -> Findings:
    """Simulate all of it, as many at a time as there are cores."""
    runs = [SimulationRun(case, balancer, MINUTES * 60, SEED) for case in CASES for balancer in BALANCERS]
    other_seed_run = SimulationRun(_LEAST_CONNECTIONS_CASE, LEAST_CONNECTIONS, MINUTES * 60, SEED + 1)
    *found, other_seed = await run_simulations([*runs, other_seed_run])
    outcomes = {(each.case, each.balancer): each for each in found}
    return Findings(
        tuple(target_figures(outcomes, other_seed)),
        tuple(case_tables(outcomes)),
        tuple(case_charts(outcomes)),
    )


async def run_simulations(runs: Sequence[SimulationRun]) -> list[SimulationSummary]:
    """What comes of these, in their order."""
    loop = asyncio.get_running_loop()
    # Not forked: who runs this may have threads.
    workers = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        return list(await asyncio.gather(*(loop.run_in_executor(pool, run_simulation, run) for run in runs)))
    finally:
        pool.shutdown(cancel_futures=True)  # who interrupts this does not wait for what has not begun


def run_simulation(run: SimulationRun) -> SimulationSummary:
    """One simulation."""
    found = summarize(Simulation(CASES[run.case], run.balancer, run.seconds, run.seed).run())
    print_note(f"case {run.case}, {run.balancer}: median {found.median:.3f}, 99th percentile {found.p99:.3f}")
    return found


# --- targets -----------------------------------------------------------------------------------------------


def target_figures(outcomes: SummariesByRun, other_seed: SimulationSummary) -> list[BenchmarkFigure]:
    """What has a target. `again`: a balancer alone in the case in which it does well, with other chances."""
    tidevoy_summaries = {case: outcomes[case, TIDEVOY] for case, balancer in outcomes if balancer == TIDEVOY}
    found = [
        _steady_state_figure(tidevoy_summaries[case], outcomes[case, LEAST_CONNECTIONS])
        for case in _STEADY_STATE_CASES
        if case in tidevoy_summaries
    ]
    for case, each in tidevoy_summaries.items():
        found += _settling_figures(
            each, f"{case}: longest until below {UNEVEN_THRESHOLD:.2f} after a join", joins=True
        )
        found += _settling_figures(each, f"{case}: the same after a leave", joins=False)
    found += [
        BenchmarkFigure(f"{case}: swing", each.oscillation, "", _OSCILLATION_LIMIT)
        for case, each in tidevoy_summaries.items()
    ]
    found += [
        BenchmarkFigure(f"{case}: sessions that moved twice in a minute", each.hasty_moves, "", 0.0)
        for case, each in tidevoy_summaries.items()
    ]
    if _LEAST_CONNECTIONS_CASE in tidevoy_summaries:
        alone = outcomes[_LEAST_CONNECTIONS_CASE, LEAST_CONNECTIONS]
        target, other = _percent_above_mean(alone.mean), _percent_above_mean(other_seed.mean)
        name = f"{_LEAST_CONNECTIONS_CASE}: fullest node above the mean, mean over time, against a balancer alone"
        tolerance = abs(target - other)
        found.append(
            BenchmarkFigure(
                name,
                _percent_above_mean(tidevoy_summaries[_LEAST_CONNECTIONS_CASE].mean),
                "%",
                target,
                tolerance=tolerance,
            )
        )
    return found


def _steady_state_figure(ours: SimulationSummary, least_connections: SimulationSummary) -> BenchmarkFigure:
    name = f"{ours.case}: fullest node above the mean, median"
    note = f"each Envoy alone {_percent_above_mean(least_connections.steady_median):.0f} %; without two minutes behind each join or leave"
    return BenchmarkFigure(name, _percent_above_mean(ours.steady_median), "%", _EVEN_LIMIT_PERCENT, note=note)


def _settling_figures(found: SimulationSummary, name: str, *, joins: bool) -> list[BenchmarkFigure]:
    recoveries = [each for each in found.recoveries if each.is_join is joins]
    if not recoveries:
        return []
    worst = max(
        recoveries, key=lambda each: _NEVER_SECONDS if each.settled_after is None else each.settled_after
    )
    note = f"when {worst.name}"
    if joins:
        late = max(_NEVER_SECONDS if each.shared_after is None else each.shared_after for each in recoveries)
        note += f"; {JOINED_SHARE_TARGET:.0%} of their share after {_format_seconds(late)} at most"
    return [
        BenchmarkFigure(
            name,
            _NEVER_SECONDS if worst.settled_after is None else worst.settled_after,
            "s",
            _SETTLE_LIMIT_SECONDS,
            note=note,
        )
    ]


_NEVER_SECONDS = 3_600.0
"""Seconds that stand for never: the whole hour."""


def _percent_above_mean(imbalance: float) -> float:
    return (imbalance - 1) * 100


# --- tables and charts -------------------------------------------------------------------------------------


def case_tables(outcomes: SummariesByRun) -> list[ResultTable]:
    """A table for each case."""
    return [
        ResultTable(
            f"{letter}: {case.description}",
            _HEADERS,
            tuple(_row(each) for (of, _), each in outcomes.items() if of == letter),
        )
        for letter, case in CASES.items()
        if any(of == letter for of, _ in outcomes)
    ]


def _row(found: SimulationSummary) -> tuple[str, ...]:
    return (
        found.balancer,
        *(f"{value:.3f}" for value in (found.median, found.mean, found.p99, found.highest)),
        f"{found.uneven_fraction:.1%}",
        f"{found.moves_per_hour:,.0f}",
        "-" if found.shortest_stay is None else _format_seconds(found.shortest_stay),
        f"{found.oscillation:.2f}",
        _longest_settling(found.recoveries, lambda each: each.is_join),
        _longest_settling(found.recoveries, lambda each: not each.is_join),
    )


def _longest_settling(recoveries: Sequence[Recovery], predicate: Callable[[Recovery], bool]) -> str:
    times = [each.settled_after for each in recoveries if predicate(each)]
    if not times:
        return "-"
    settled = [each for each in times if each is not None]
    return _format_seconds(max(settled)) if len(settled) == len(times) else "never"


def _format_seconds(seconds: float) -> str:
    return "never" if seconds >= _NEVER_SECONDS else f"{seconds:.0f} s"


def case_charts(outcomes: SummariesByRun) -> list[LineChart]:
    """Each case over the hour, and what comes behind a change."""
    cases = [
        Panel(sheet.title, 1.0, tuple(Line(each.balancer, each.minute_medians) for each in of))
        for sheet, of in (
            (sheet, _summaries_of_case(outcomes, sheet.title[0])) for sheet in case_tables(outcomes)
        )
    ]
    changes = [
        Panel(
            change.name,
            1.0,
            tuple(
                Line(each.balancer, each.recoveries[n].imbalances)
                for each in _summaries_of_case(outcomes, _CHANGES_CASE)
            ),
        )
        for n, change in enumerate(CASES[_CHANGES_CASE].changes)
        if _summaries_of_case(outcomes, _CHANGES_CASE)
    ]
    hour_chart = LineChart(
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
    changes_chart = LineChart(
        file="balance-changes.svg",
        title="Sessions of the fullest node, in proportion to the mean, after nodes join or leave",
        about="Second by second; values above 1.6 are drawn at 1.6",
        values="sessions per node, max/mean",
        unit="s",
        low=1.0,
        high=1.6,
        limit=UNEVEN_THRESHOLD,
        panels=tuple(changes),
    )
    return [each for each in (hour_chart, changes_chart) if each.panels]


def _summaries_of_case(outcomes: SummariesByRun, letter: str) -> list[SimulationSummary]:
    return [each for (of, _), each in outcomes.items() if of == letter]
