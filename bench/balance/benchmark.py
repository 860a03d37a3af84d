"""The benchmark `balance`: simulate all cases with all balancers for an hour each, with targets."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple

from bench.balance.cases import CASES, Case
from bench.balance.simulation import BALANCERS, LEAST_CONNECTIONS, TIDEVOY, Simulation
from bench.balance.summary import (
    JOINED_SHARE_TARGET,
    NEVER_SECONDS,
    UNEVEN_THRESHOLD,
    SimulationSummary,
    summarize,
)
from bench.reporting.charts import LineChart, Panel
from bench.reporting.report import BenchmarkFigure, Findings, ResultTable
from cli.output import print_note

METHOD = """\
A discrete-event simulation (`bench/balance`): one hour per case, after a warm-up of five minutes. Random
numbers have fixed seeds, and all balancers get the same sessions.

* Decisions: Tidevoy's are those of the control plane (`controlplane.decide.plan`), once a second.
* Envoys: each one reports once a second, and the report arrives a second later (case h: 0.5 to 3 s). It
  picks nodes as the module does, and migrates one session at a time, in 50 ms.
* Sessions: they arrive at random. Half of them last a tenth of the mean; the others have a lognormal
  distribution with a heavy tail.
* `least connections`: each Envoy picks the node on which it has the fewest sessions of its own.
* `round robin`: each Envoy picks the nodes in turn.
* `tiproxy`: TiProxy's rules for connection counts.
* `ideal`: one balancer that always knows all sessions, and migrates at no cost.
* Max/mean: sessions per weight of the fullest node, divided by the mean of all nodes in service. It
  includes direct sessions, and is sampled every second.
* Swing: how far the autocorrelation of a node's deviation from the mean rises again, within a minute, after
  it has fallen. A random deviation only fades, so its autocorrelation does not rise.
* Settled: after a join or leave, max/mean stays below 1.10 for ten seconds."""
MINUTES, SEED = 60.0, 1
_EVEN_LIMIT_PERCENT, _SETTLE_LIMIT_SECONDS = 5.0, 10.0
_OSCILLATION_LIMIT = 0.1  # an autocorrelation
_STEADY_STATE_CASES = ("a", "b", "c", "g")  # letters of the cases whose steady state has a target
_LEAST_CONNECTIONS_CASE = "d"  # the case whose target is the result of least connections
_CHANGES_CASE = "e"  # the case whose changes have charts
_HEADERS = (
    *("", "median", "mean", "99th percentile", "most", f"above {UNEVEN_THRESHOLD:.2f}", "moves per hour"),
    *("shortest stay", "swing", "settles after a join", "after a leave"),
)

SummariesByRun = Mapping[tuple[str, str], SimulationSummary]  # by letter of the case, and balancer


class SimulationRun(NamedTuple):
    case: Case
    balancer: str
    seconds: float
    seed: int


async def measure(
    cases: Sequence[str] = (),
    only: Sequence[str] = (),
    minutes: float = MINUTES,
    seed: int = SEED,
    lifetime: float | None = None,
) -> Findings:
    """Run one simulation per core at a time. Only a run with default arguments returns figures and charts.

    `cases`: letters of cases; `only`: substrings of balancers' names; `lifetime`: mean seconds of a session.
    """
    is_whole = (tuple(cases), tuple(only), minutes, seed, lifetime) == ((), (), MINUTES, SEED, None)
    runs = [
        SimulationRun(
            case if lifetime is None else replace(case, lifetime=lifetime), balancer, minutes * 60, seed
        )
        for case in CASES.values()
        if not cases or case.letter in cases
        for balancer in BALANCERS
        if not only or any(part in balancer for part in only)
    ]
    if is_whole:
        runs.append(SimulationRun(CASES[_LEAST_CONNECTIONS_CASE], LEAST_CONNECTIONS, minutes * 60, seed + 1))
    summaries = await _run_simulations(runs)
    if not is_whole:
        return Findings((), tuple(case_tables(_by_run(summaries))))
    outcomes = _by_run(summaries[:-1])
    return Findings(
        tuple(target_figures(outcomes, summaries[-1])),
        tuple(case_tables(outcomes)),
        tuple(case_charts(outcomes)),
    )


def _by_run(summaries: Sequence[SimulationSummary]) -> SummariesByRun:
    return {(summary.record.case.letter, summary.record.balancer): summary for summary in summaries}


async def _run_simulations(runs: Sequence[SimulationRun]) -> list[SimulationSummary]:
    """Run simulations in parallel; return their summaries in the same order."""
    loop = asyncio.get_running_loop()
    # Spawn instead of fork, because the calling process may have threads.
    workers = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        return list(await asyncio.gather(*(loop.run_in_executor(pool, _run_simulation, run) for run in runs)))
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, do not start the remaining simulations


def _run_simulation(run: SimulationRun) -> SimulationSummary:
    summary = summarize(Simulation(*run).run())
    figures = f"median {summary.imbalance.median:.3f}, 99th percentile {summary.imbalance.p99:.3f}"
    print_note(f"case {run.case.letter}, {run.balancer}: {figures}")
    return summary


# --- targets -----------------------------------------------------------------------------------------------


def target_figures(outcomes: SummariesByRun, other_seed: SimulationSummary) -> list[BenchmarkFigure]:
    """Return the figures with targets. `other_seed`: summary of least connections with another seed."""
    tidevoy = {case: summary for (case, balancer), summary in outcomes.items() if balancer == TIDEVOY}
    figures = [
        _steady_state_figure(tidevoy[case], outcomes[case, LEAST_CONNECTIONS]) for case in _STEADY_STATE_CASES
    ]
    join_name = f"longest until below {UNEVEN_THRESHOLD:.2f} after a join"
    for case, summary in tidevoy.items():
        figures += _settling_figures(summary, f"{case}: {join_name}", joins=True)
        figures += _settling_figures(summary, f"{case}: the same after a leave", joins=False)
    for case, summary in tidevoy.items():
        figures.append(BenchmarkFigure(f"{case}: swing", summary.oscillation, "", _OSCILLATION_LIMIT))
    for case, summary in tidevoy.items():
        name = f"{case}: sessions that moved twice in a minute"
        figures.append(BenchmarkFigure(name, summary.record.early_moves, "", 0.0))
    case = _LEAST_CONNECTIONS_CASE
    name = f"{case}: fullest node above the mean, mean over time, against least connections"
    target = _percent_above_mean(outcomes[case, LEAST_CONNECTIONS].mean)
    tolerance = abs(target - _percent_above_mean(other_seed.mean))
    value = _percent_above_mean(tidevoy[case].mean)
    return [*figures, BenchmarkFigure(name, value, "%", target, tolerance=tolerance)]


def _steady_state_figure(tidevoy: SimulationSummary, least_connections: SimulationSummary) -> BenchmarkFigure:
    name = f"{tidevoy.record.case.letter}: fullest node above the mean, median"
    note = (
        f"least connections {_percent_above_mean(least_connections.steady_median):.0f} %;"
        " without two minutes after each join or leave"
    )
    value = _percent_above_mean(tidevoy.steady_median)
    return BenchmarkFigure(name, value, "%", _EVEN_LIMIT_PERCENT, note=note)


def _settling_figures(summary: SimulationSummary, name: str, *, joins: bool) -> list[BenchmarkFigure]:
    recoveries = [recovery for recovery in summary.recoveries if bool(recovery.change.joins) is joins]
    if not recoveries:
        return []
    worst = max(recoveries, key=lambda recovery: recovery.settled_after)
    note = f"when {worst.change.name}"
    if joins:
        latest = max(recovery.shared_after for recovery in recoveries)
        note += f"; {JOINED_SHARE_TARGET:.0%} of their share after {_format_seconds(latest)} at most"
    return [BenchmarkFigure(name, worst.settled_after, "s", _SETTLE_LIMIT_SECONDS, note=note)]


def _percent_above_mean(imbalance: float) -> float:
    return (imbalance - 1) * 100


# --- tables and charts -------------------------------------------------------------------------------------


def case_tables(outcomes: SummariesByRun) -> list[ResultTable]:
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
    spread = summary.imbalance
    return (
        summary.record.balancer,
        *(f"{value:.3f}" for value in (spread.median, summary.mean, spread.p99, spread.high)),
        f"{summary.uneven_fraction:.1%}",
        f"{summary.moves_per_hour:,.0f}",
        "-" if summary.record.shortest_stay == math.inf else _format_seconds(summary.record.shortest_stay),
        f"{summary.oscillation:.2f}",
        _longest_settling(summary, joins=True),
        _longest_settling(summary, joins=False),
    )


def _longest_settling(summary: SimulationSummary, *, joins: bool) -> str:
    times = [
        recovery.settled_after for recovery in summary.recoveries if bool(recovery.change.joins) is joins
    ]
    return _format_seconds(max(times)) if times else "-"


def _format_seconds(seconds: float) -> str:
    return "never" if seconds >= NEVER_SECONDS else f"{seconds:.0f} s"


def case_charts(outcomes: SummariesByRun) -> list[LineChart]:
    """Return two charts: the hour of each case, and the two minutes after each change of one case."""
    cases = tuple(
        Panel(
            f"{letter}: {case.description}",
            {
                summary.record.balancer: summary.minute_medians
                for summary in _summaries_of_case(outcomes, letter)
            },
        )
        for letter, case in CASES.items()
    )
    changed = _summaries_of_case(outcomes, _CHANGES_CASE)
    changes = tuple(
        Panel(
            change.name,
            {summary.record.balancer: summary.recoveries[index].imbalances for summary in changed},
        )
        for index, change in enumerate(CASES[_CHANGES_CASE].changes)
    )
    hour_chart = LineChart(
        file="balance-cases.svg",
        title="Sessions of the fullest node, in proportion to the mean",
        about="Median of each minute; values above 1.6 are drawn at 1.6",
        values="sessions per node, max/mean",
        unit="min",
        low=1.0,
        high=1.6,
        limit=1.05,
        panels=cases,
    )
    changes_chart = replace(
        hour_chart,
        file="balance-changes.svg",
        title="Sessions of the fullest node, in proportion to the mean, after nodes join or leave",
        about="Second by second; values above 1.6 are drawn at 1.6",
        unit="s",
        limit=UNEVEN_THRESHOLD,
        panels=changes,
    )
    return [hour_chart, changes_chart]


def _summaries_of_case(outcomes: SummariesByRun, letter: str) -> list[SimulationSummary]:
    return [summary for (case, _), summary in outcomes.items() if case == letter]
