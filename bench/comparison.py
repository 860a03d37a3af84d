"""Runs of several proxies as one table of a result document: what is in it, and how it is shown.

Only runs of the same round are compared, each with that of the reference. The reference takes part twice
(A/A): the greatest difference between its two runs of a round is what chance does in this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.targets import Samples, judged, quotients, told
from bench.workloads import Workload

SUITE = "side-by-side"

# All that a peer may have: name in the document, head of the column, digits behind the point.
FIGURES = (
    ("qps", "QPS", 0),
    ("p95_ms", "p95 ms", 2),
    ("cpu_us", "CPU µs", 1),
    ("user_us", "user", 1),
    ("system_us", "system", 1),
    ("machine_us", "machine µs", 1),
    ("system_calls", "calls", 2),
    ("resident_mib", "MiB", 1),
    ("connection_kb", "kB each", 1),
    ("kept", "QPS kept", 3),
)
HEADS = {name: head for name, head, _ in FIGURES}
_COMPARED = (("cpu_us", "CPU ratio"), ("p95_ms", "p95 ratio"))
_STYLES: Mapping[str, str] = {"met": "green", "missed": "red", "undecided": "yellow"}


def samples(runs: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The figures that all runs have, each round by round."""
    return {
        name: [run[name] for run in runs]
        for name, _, _ in FIGURES
        if runs and all(name in run for run in runs)
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """At least one value."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def as_table(
    workload: Workload,
    measured: Mapping[str, Samples],
    versions: Mapping[str, str],
    *,
    rounds: int,
    seconds: float,
    condition: Mapping[str, Any],
    reference: str,
    again: str,
) -> dict[str, Any]:
    """One table as plain data; numbers are not rounded. `measured` and `versions` by peer, in their order."""
    return {
        "workload": workload.name,
        "method": workload.method,
        "workers": workload.stage.workers,
        "threads": workload.threads,
        "rounds": rounds,
        "seconds": seconds,
        "reference": reference,
        "again": again,
        "condition": dict(condition),
        "peers": [
            {
                "name": name,
                "version": versions[name],
                "figures": {figure: spread(values) for figure, values in figures.items()},
                "ratios": {
                    figure: spread(values)
                    for figure, values in quotients(figures, measured[reference]).items()
                },
            }
            for name, figures in measured.items()
        ],
        "targets": judged(workload.targets, measured, reference, again),
    }


def show(table: Mapping[str, Any]) -> None:
    """One table on standard output: medians, ratios with their range, and the targets below."""
    workers = "1 worker" if table["workers"] == 1 else f"{table['workers']} workers"
    length = f"{table['rounds']} x {table['seconds']:g} s"
    title = f"{table['workload']}, {table['threads']} clients, {workers}; {length}"
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False)
    drawn.add_column("", no_wrap=True)
    for _, head, _ in FIGURES:
        drawn.add_column(head, justify="right", no_wrap=True)
    for _, head in _COMPARED:
        drawn.add_column(head, no_wrap=True)
    for peer in table["peers"]:
        drawn.add_row(*cells(peer))
    # A pipe or a log gets whole lines, not lines folded at 80 columns.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=180)
    console.print(drawn)
    for target in table["targets"]:
        console.print(
            told(target, HEADS[target["figure"]], table["reference"]), style=_STYLES[target["verdict"]]
        )
    console.print()


def cells(peer: Mapping[str, Any]) -> list[str]:
    """A peer's row."""
    figures, ratios = peer["figures"], peer["ratios"]
    row = [peer["name"]]
    row += [
        f"{figures[name]['median']:,.{digits}f}" if name in figures else "-" for name, _, digits in FIGURES
    ]
    for name, _ in _COMPARED:
        ratio = ratios.get(name)
        row.append(f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})" if ratio else "-")
    return row
