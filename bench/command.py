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

from bench.balance.cases import CASES
from bench.errors import convert_errors_to_benchmark_failed
from bench.machine import Machine, MachineCondition
from bench.proxies import build_comparison, capture_costs, statement_costs
from bench.proxies import command as proxies
from bench.reporting.report import Findings, ReportSection, print_report, report_as_json, write_report
from cli.output import print_note, show_json

RESULTS = Path(__file__).with_name("results")
_JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module with the text `METHOD` and `async measure(...) -> list[BenchmarkFigure] | Findings`.

    The results of all benchmarks of a suite (a command such as `control-plane`) are in one file.
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
BALANCE = Benchmark("balance", "how evenly simulated fleets distribute sessions", "bench.balance.benchmark")
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
    bench.command("statements")(statement_costs.command)
    bench.command("capture")(capture_costs.command)
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
    print_json: _JsonOption = False,
) -> None:
    """Measure the control plane: decisions, latency of changes, a large fleet. About ten minutes."""
    selected = select_benchmarks(names or [])
    _run_and_report("control-plane", selected, {}, print_json=print_json)


def _moves(
    sessions: Annotated[
        int | None, typer.Option(help="Idle sessions; default: 10,000.", min=10, max=100_000)
    ] = None,
    moves: Annotated[
        int | None, typer.Option(help="Migrations back and forth; default: 100,000.", min=10)
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rolling restarts; default: 3.", min=1)] = None,
    print_json: _JsonOption = False,
) -> None:
    """Measure the cost of session migration. About six minutes."""
    parameters = {"sessions": sessions, "moves": moves, "rounds": rounds}
    _run_and_report("moves", [MOVES], _given(parameters), print_json=print_json)


def _balance(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASE]...", help="Letters; default: all.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only balancers whose name contains this text.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Measured minutes, after a warm-up of five; default: 60.", min=1)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers; default: 1.")] = None,
    lifetime: Annotated[
        float | None,
        typer.Option(help="Mean lifetime of a session in seconds; default: depends on the case.", min=1),
    ] = None,
    print_json: _JsonOption = False,
) -> None:
    """Simulate how evenly fleets distribute sessions. Ten minutes. With options, results are not saved."""
    if unknown := set(cases or ()) - CASES.keys():
        raise typer.BadParameter(f"there is no case {min(unknown)!r}; choose from {', '.join(CASES)}")
    parameters = {"cases": cases, "only": only, "minutes": minutes, "seed": seed, "lifetime": lifetime}
    _run_and_report("balance", [BALANCE], _given(parameters), print_json=print_json)


def _given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    # Typer passes None or an empty list for an option that is not given; 0 is a value.
    return {name: value for name, value in parameters.items() if value not in (None, [])}


def select_benchmarks(names: Sequence[str]) -> list[Benchmark]:
    """Return the benchmarks with these names; all without names. Raises BadParameter for an unknown name."""
    all_names = [benchmark.name for benchmark in CONTROL_PLANE]
    for name in names:
        if name not in all_names:
            raise typer.BadParameter(f"there is no benchmark {name!r}; choose from {', '.join(all_names)}")
    return [benchmark for benchmark in CONTROL_PLANE if not names or benchmark.name in names]


def _run_and_report(
    suite: str,
    benchmarks: Sequence[Benchmark],
    options: Mapping[str, Any],
    *,
    print_json: bool,
) -> None:
    """Run benchmarks and print the results. A complete suite without options also writes them to files."""
    # Without this variable, gRPC logs every closed connection. gRPC reads the variable when it is first used.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    machine = Machine.here()
    sections = [asyncio.run(_measure_section(benchmark, options)) for benchmark in benchmarks]
    document = report_as_json(suite, machine, sections)
    if print_json:
        show_json(document)
    else:
        print_report(document)
    if not options and (suite != "control-plane" or len(benchmarks) == len(CONTROL_PLANE)):
        for path in write_report(document, RESULTS):
            print_note(f"wrote {path}")


async def _measure_section(benchmark: Benchmark, options: Mapping[str, Any]) -> ReportSection:
    module = importlib.import_module(benchmark.module)
    print_note(f"measuring {benchmark.name}: {benchmark.description}")
    condition = await MachineCondition.now()
    with convert_errors_to_benchmark_failed(benchmark.name):
        result = await module.measure(**options)
    findings = result if isinstance(result, Findings) else Findings(result)
    return ReportSection(benchmark.name, module.METHOD, condition, findings)
