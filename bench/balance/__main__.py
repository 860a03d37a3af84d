"""`python -m bench.balance`: some cases, shown and not kept."""

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
    only: Annotated[list[str] | None, typer.Option(help="Only balancers with this in their name.")] = None,
    minutes: Annotated[float, typer.Option(help="That are measured, after five to warm up.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 1,
    lifetime: Annotated[
        float | None, typer.Option(help="Mean seconds of a session, instead of the case's own.")
    ] = None,
) -> None:
    """Simulate cases."""
    names = [name for name in BALANCERS if not only or any(part in name for part in only)]
    for letter in letters or CASES:
        case = CASES[letter]
        case = case if lifetime is None else replace(case, lifetime=lifetime)
        print(f"{letter}: {case.description}; {case.arrivals:.1f} arrivals a second")
        for name in names:
            start = time.perf_counter()
            found = summarize(Simulation(case, name, minutes * 60, seed).run())
            print(f"  {name:12}{format_summary(found)}; took {time.perf_counter() - start:.0f} s", flush=True)


def format_summary(found: SimulationSummary) -> str:
    """The figures in a few lines."""
    stay = "-" if found.shortest_stay is None else f"{found.shortest_stay:.1f} s"
    lines = [
        f"max/mean median {found.median:.3f} mean {found.mean:.3f} p99 {found.p99:.3f} most {found.highest:.3f}"
        f" steady {found.steady_median:.3f}, above {UNEVEN_THRESHOLD:.2f} {found.uneven_fraction:.1%}",
        f"    {found.moves_per_hour:,.0f} moves/h, {found.hasty_moves} hasty, shortest stay {stay};"
        f" swing {found.oscillation:.3f}; {found.sessions:,.0f} sessions",
    ]
    for each in found.recoveries:
        settled = "never" if each.settled_after is None else f"after {each.settled_after} s"
        shared = "never" if each.shared_after is None else f"after {each.shared_after} s"
        lines.append(
            f"    {each.name} at {each.at} s: below {UNEVEN_THRESHOLD:.2f} {settled}, worst {each.worst_imbalance:.3f}"
            + (f", {JOINED_SHARE_TARGET} of the share {shared}" if each.is_join else "")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
