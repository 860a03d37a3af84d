"""The benchmark `balance`: simulate all cases with all balancers for an hour each, with targets."""

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
_EVEN_LIMIT_PERCENT, _SETTLE_LIMIT_SECONDS = 5.0, 10.0
_OSCILLATION_LIMIT = 0.1  # an autocorrelation
_STEADY_STATE_CASES = ("a", "b", "c", "g")  # cases whose steady state has a target
_LEAST_CONNECTIONS_CASE = "d"  # the case in which least connections per Envoy is good
_CHANGES_CASE = "e"  # the case whose changes have charts
_HEADERS = (
    *("", "median", "mean", "99th percentile", "most", f"above {UNEVEN_THRESHOLD:.2f}", "moves per hour"),
    *("shortest stay", "swing", "settles after a join", "after a leave"),
)

SummariesByRun = Mapping[tuple[str, str], SimulationSummary]  # by case and balancer


class SimulationRun(NamedTuple):
    """The parameters of one simulation."""

    case: str
    balancer: str
    seconds: float
    seed: int


async def measure() -> Findings:
    """Run all simulations, one per core at a time."""
    runs = [SimulationRun(case, balancer, MINUTES * 60, SEED) for case in CASES for balancer in BALANCERS]
    other_seed_run = SimulationRun(_LEAST_CONNECTIONS_CASE, LEAST_CONNECTIONS, MINUTES * 60, SEED + 1)
    *results, other_seed = await run_simulations([*runs, other_seed_run])
    outcomes = {(summary.case, summary.balancer): summary for summary in results}
    return Findings(
        tuple(target_figures(outcomes, other_seed)),
        tuple(case_tables(outcomes)),
        tuple(case_charts(outcomes)),
    )


async def run_simulations(runs: Sequence[SimulationRun]) -> list[SimulationSummary]:
    """Run simulations in parallel; return their summaries in the same order."""
    loop = asyncio.get_running_loop()
    # Not forked, because the calling process may have threads.
    workers = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        return list(await asyncio.gather(*(loop.run_in_executor(pool, run_simulation, run) for run in runs)))
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, do not start the remaining simulations


def run_simulation(run: SimulationRun) -> SimulationSummary:
    """Run one simulation and summarize it."""
    summary = summarize(Simulation(CASES[run.case], run.balancer, run.seconds, run.seed).run())
    figures = f"median {summary.median:.3f}, 99th percentile {summary.p99:.3f}"
    print_note(f"case {run.case}, {run.balancer}: {figures}")
    return summary


# --- targets -----------------------------------------------------------------------------------------------


def target_figures(outcomes: SummariesByRun, other_seed: SimulationSummary) -> list[BenchmarkFigure]:
    """Return the figures with targets. `other_seed`: the least connections run with another seed."""
    tidevoy_summaries = {case: outcomes[case, TIDEVOY] for case, balancer in outcomes if balancer == TIDEVOY}
    figures = [
        _steady_state_figure(tidevoy_summaries[case], outcomes[case, LEAST_CONNECTIONS])
        for case in _STEADY_STATE_CASES
        if case in tidevoy_summaries
    ]
    for case, summary in tidevoy_summaries.items():
        figures += _settling_figures(
            summary, f"{case}: longest until below {UNEVEN_THRESHOLD:.2f} after a join", joins=True
        )
        figures += _settling_figures(summary, f"{case}: the same after a leave", joins=False)
    figures += [
        BenchmarkFigure(f"{case}: swing", summary.oscillation, "", _OSCILLATION_LIMIT)
        for case, summary in tidevoy_summaries.items()
    ]
    figures += [
        BenchmarkFigure(f"{case}: sessions that moved twice in a minute", summary.hasty_moves, "", 0.0)
        for case, summary in tidevoy_summaries.items()
    ]
    if _LEAST_CONNECTIONS_CASE in tidevoy_summaries:
        least_connections = outcomes[_LEAST_CONNECTIONS_CASE, LEAST_CONNECTIONS]
        target, other = _percent_above_mean(least_connections.mean), _percent_above_mean(other_seed.mean)
        name = (
            f"{_LEAST_CONNECTIONS_CASE}: fullest node above the mean, mean over time,"
            " against a balancer alone"
        )
        tolerance = abs(target - other)
        figures.append(
            BenchmarkFigure(
                name,
                _percent_above_mean(tidevoy_summaries[_LEAST_CONNECTIONS_CASE].mean),
                "%",
                target,
                tolerance=tolerance,
            )
        )
    return figures


def _steady_state_figure(tidevoy: SimulationSummary, least_connections: SimulationSummary) -> BenchmarkFigure:
    name = f"{tidevoy.case}: fullest node above the mean, median"
    note = (
        f"each Envoy alone {_percent_above_mean(least_connections.steady_median):.0f} %;"
        " without two minutes after each join or leave"
    )
    value = _percent_above_mean(tidevoy.steady_median)
    return BenchmarkFigure(name, value, "%", _EVEN_LIMIT_PERCENT, note=note)


def _settling_figures(summary: SimulationSummary, name: str, *, joins: bool) -> list[BenchmarkFigure]:
    recoveries = [recovery for recovery in summary.recoveries if recovery.is_join is joins]
    if not recoveries:
        return []
    worst = max(recoveries, key=lambda recovery: _seconds_or_never(recovery.settled_after))
    note = f"when {worst.name}"
    if joins:
        latest = max(_seconds_or_never(recovery.shared_after) for recovery in recoveries)
        note += f"; {JOINED_SHARE_TARGET:.0%} of their share after {_format_seconds(latest)} at most"
    return [
        BenchmarkFigure(
            name,
            _seconds_or_never(worst.settled_after),
            "s",
            _SETTLE_LIMIT_SECONDS,
            note=note,
        )
    ]


_NEVER_SECONDS = 3_600.0
"""Represents "never": the whole hour."""


def _seconds_or_never(seconds: float | None) -> float:
    return _NEVER_SECONDS if seconds is None else seconds


def _percent_above_mean(imbalance: float) -> float:
    return (imbalance - 1) * 100


# --- tables and charts -------------------------------------------------------------------------------------


def case_tables(outcomes: SummariesByRun) -> list[ResultTable]:
    """Return a table per case."""
    return [
        ResultTable(
            f"{letter}: {case.description}",
            _HEADERS,
            tuple(_row(summary) for summary in _summaries_of_case(outcomes, letter)),
        )
        for letter, case in CASES.items()
        if _summaries_of_case(outcomes, letter)
    ]


def _row(summary: SimulationSummary) -> tuple[str, ...]:
    return (
        summary.balancer,
        *(f"{value:.3f}" for value in (summary.median, summary.mean, summary.p99, summary.highest)),
        f"{summary.uneven_fraction:.1%}",
        f"{summary.moves_per_hour:,.0f}",
        "-" if summary.shortest_stay is None else _format_seconds(summary.shortest_stay),
        f"{summary.oscillation:.2f}",
        _longest_settling(summary.recoveries, lambda recovery: recovery.is_join),
        _longest_settling(summary.recoveries, lambda recovery: not recovery.is_join),
    )


def _longest_settling(recoveries: Sequence[Recovery], predicate: Callable[[Recovery], bool]) -> str:
    times = [recovery.settled_after for recovery in recoveries if predicate(recovery)]
    if not times:
        return "-"
    settled = [seconds for seconds in times if seconds is not None]
    return _format_seconds(max(settled)) if len(settled) == len(times) else "never"


def _format_seconds(seconds: float) -> str:
    return "never" if seconds >= _NEVER_SECONDS else f"{seconds:.0f} s"


def case_charts(outcomes: SummariesByRun) -> list[LineChart]:
    """Return two charts: each case over the hour, and the time after each change."""
    cases = [
        Panel(
            table.title,
            1.0,
            tuple(
                Line(summary.balancer, summary.minute_medians)
                for summary in _summaries_of_case(outcomes, table.title[0])
            ),
        )
        for table in case_tables(outcomes)
    ]
    changes = [
        Panel(
            change.name,
            1.0,
            tuple(
                Line(summary.balancer, summary.recoveries[index].imbalances)
                for summary in _summaries_of_case(outcomes, _CHANGES_CASE)
            ),
        )
        for index, change in enumerate(CASES[_CHANGES_CASE].changes)
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
    return [chart for chart in (hour_chart, changes_chart) if chart.panels]


def _summaries_of_case(outcomes: SummariesByRun, letter: str) -> list[SimulationSummary]:
    return [summary for (case, _), summary in outcomes.items() if case == letter]
