"""`tidevoy bench`: measure Tidevoy on this machine, print the results and write them to files."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.errors import translate_errors
from bench.machine import Machine, MachineCondition
from bench.proxies import build_comparison
from bench.proxies import command as proxies
from bench.reporting.report import Findings, Report, ReportSection, print_report, report_as_json, write_report
from cli.output import print_note, show_json

RESULTS = Path(__file__).with_name("results")
_ResultsOption = Annotated[
    Path | None,
    typer.Option(help="Directory for the results.", show_default="bench/results next to the code"),
]
_JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module with the text `METHOD` and `async measure(...) -> list[BenchmarkFigure] | Findings`.

    The results of all benchmarks of a suite are in one file.
    """

    name: str
    description: str
    module: str


CONTROL_PLANE = (
    Benchmark("plan", "one decision for 5,000 nodes", "bench.control_plane.plan_benchmark"),
    Benchmark("latency", "drain or new node to Envoy's ACK", "bench.control_plane.latency"),
    Benchmark("fleet", "200 Envoys over 1,000 nodes", "bench.control_plane.fleet"),
    Benchmark(
        "loop", "CPU of the control plane for 5,000 nodes and 100 Envoys", "bench.control_plane.steady_load"
    ),
)
BALANCE = Benchmark("balance", "how evenly simulated fleets distribute sessions", "bench.balance")
MOVES = Benchmark("moves", "cost of session migration", "bench.migration.benchmark")


def register(app: typer.Typer) -> None:
    """Add the commands to `app` (entry point group `tidevoy.commands`)."""
    bench = typer.Typer(
        help="Measure Tidevoy on this machine. The command reports a missed target, but does not fail.",
        no_args_is_help=True,
    )
    bench.command("control-plane")(_control_plane)
    bench.command("proxies")(proxies.command)
    bench.command("against")(build_comparison.command)
    bench.command("moves")(_moves)
    bench.command("balance")(_balance)
    app.add_typer(bench, name="bench")


def _control_plane(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Which: {', '.join(f'{item.name} ({item.description})' for item in CONTROL_PLANE)}.",
            show_default=False,
        ),
    ] = None,
    results: _ResultsOption = None,
    print_json: _JsonOption = False,
) -> None:
    """Measure the control plane: decisions, latency of changes, a large fleet. About ten minutes."""
    selected = select_benchmarks(names or [])
    _run_and_report(
        "control-plane",
        selected,
        {},
        results,
        print_json=print_json,
        is_whole_suite=len(selected) == len(CONTROL_PLANE),
    )


def _moves(
    sessions: Annotated[
        int | None, typer.Option(help="Idle sessions; default: 10,000.", min=10, max=100_000)
    ] = None,
    moves: Annotated[
        int | None, typer.Option(help="Migrations back and forth; default: 100,000.", min=10)
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rolling restarts; default: 3.", min=1)] = None,
    results: _ResultsOption = None,
    print_json: _JsonOption = False,
) -> None:
    """Measure the cost of session migration. About six minutes."""
    parameters = {"sessions": sessions, "moves": moves, "rounds": rounds}
    options = {name: value for name, value in parameters.items() if value is not None}
    _run_and_report("moves", [MOVES], options, results, print_json=print_json, is_whole_suite=not options)


def _balance(results: _ResultsOption = None, print_json: _JsonOption = False) -> None:
    """Simulate how evenly fleets distribute sessions. About ten minutes."""
    _run_and_report("balance", [BALANCE], {}, results, print_json=print_json)


def select_benchmarks(names: Sequence[str]) -> list[Benchmark]:
    """Return the benchmarks with these names in the order of CONTROL_PLANE; without names, all of them.

    Raises BadParameter for an unknown name.
    """
    all_names = [benchmark.name for benchmark in CONTROL_PLANE]
    for name in names:
        if name not in all_names:
            raise typer.BadParameter(f"there is no benchmark {name!r}; choose from {', '.join(all_names)}")
    return [benchmark for benchmark in CONTROL_PLANE if not names or benchmark.name in names]


def _run_and_report(
    suite: str,
    benchmarks: Sequence[Benchmark],
    options: Mapping[str, Any],
    results: Path | None,
    *,
    print_json: bool,
    is_whole_suite: bool = True,
) -> None:
    """Run benchmarks, print the results, and write them to files if the suite is complete."""
    # Without this, gRPC logs every closed connection; it reads the variable at its first use.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    document = run_suite(suite, benchmarks, options)
    if print_json:
        show_json(document)
    else:
        print_report(document)
    if is_whole_suite:
        for path in write_report(document, results or RESULTS):
            print_note(f"wrote {path}")


def run_suite(suite: str, benchmarks: Sequence[Benchmark], options: Mapping[str, Any]) -> dict[str, Any]:
    """Run benchmarks of one suite one after another, and return the report as JSON data.

    Raises BenchmarkFailed.
    """
    machine = Machine.here()
    sections = tuple(asyncio.run(_measure_section(benchmark, options)) for benchmark in benchmarks)
    return report_as_json(Report(suite, machine, sections))


async def _measure_section(benchmark: Benchmark, options: Mapping[str, Any]) -> ReportSection:
    module = importlib.import_module(benchmark.module)
    print_note(f"measuring {benchmark.name}: {benchmark.description}")
    condition = await MachineCondition.now()
    with translate_errors(benchmark.name):
        result = await module.measure(**options)
    findings = result if isinstance(result, Findings) else Findings(tuple(result))
    return ReportSection(
        benchmark.name,
        module.METHOD,
        condition,
        findings.figures,
        findings.sheets,
        findings.drawings,
    )
