"""`python -m bench.balance`: simulate some cases and print the results."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

import typer

from bench.balance.cases import CASES
from bench.balance.imbalance_statistics import UNEVEN_THRESHOLD
from bench.balance.simulation import BALANCERS, Simulation
from bench.balance.summary import JOINED_SHARE_TARGET, SimulationSummary, summarize


def main(
    letters: Annotated[list[str] | None, typer.Argument(metavar="[CASE]...", help="Default: all.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only balancers whose name contains this text.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Measured minutes, after a warm-up of five.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 1,
    lifetime: Annotated[
        float | None, typer.Option(help="Mean lifetime of a session in seconds; default: the case's.")
    ] = None,
) -> None:
    """Simulate cases and print their figures."""
    names = [name for name in BALANCERS if not only or any(part in name for part in only)]
    for letter in letters or CASES:
        case = CASES[letter]
        case = case if lifetime is None else replace(case, lifetime=lifetime)
        print(f"{letter}: {case.description}; {case.arrivals:.1f} arrivals a second")
        for name in names:
            start = time.perf_counter()
            summary = summarize(Simulation(case, name, minutes * 60, seed).run())
            print(
                f"  {name:12}{format_summary(summary)}; took {time.perf_counter() - start:.0f} s", flush=True
            )


def format_summary(summary: SimulationSummary) -> str:
    """Format the figures in a few lines."""
    stay = "-" if summary.shortest_stay is None else f"{summary.shortest_stay:.1f} s"
    lines = [
        f"max/mean median {summary.median:.3f} mean {summary.mean:.3f} p99 {summary.p99:.3f} most"
        f" {summary.highest:.3f}"
        f" steady {summary.steady_median:.3f}, above {UNEVEN_THRESHOLD:.2f} {summary.uneven_fraction:.1%}",
        f"    {summary.moves_per_hour:,.0f} moves/h, {summary.hasty_moves} hasty, shortest stay {stay};"
        f" swing {summary.oscillation:.3f}; {summary.sessions:,.0f} sessions",
    ]
    for recovery in summary.recoveries:
        settled = "never" if recovery.settled_after is None else f"after {recovery.settled_after} s"
        shared = "never" if recovery.shared_after is None else f"after {recovery.shared_after} s"
        lines.append(
            f"    {recovery.name} at {recovery.at} s: below {UNEVEN_THRESHOLD:.2f} {settled}, worst"
            f" {recovery.worst_imbalance:.3f}"
            + (f", {JOINED_SHARE_TARGET} of the share {shared}" if recovery.is_join else "")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
