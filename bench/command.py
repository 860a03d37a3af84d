"""`tidevoy bench`: runs benchmarks, shows what they found and keeps it."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx2
import typer

from api.cli.output import remark, show_json
from bench.machine import Condition, Machine
from bench.report import Report, Section, as_json, keep, show
from controlplane.errors import TidevoyError
from sandbox.stack import NotInTime

RESULTS = Path(__file__).with_name("results")


class BenchmarkFailed(TidevoyError):
    """A benchmark could not be carried through, so there is no figure."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"benchmark {name} was given up: {reason}")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One file of this package, with `METHOD`, a text, and `async measure() -> list[Figure]`.

    The benchmarks of a suite are kept together, in one file of results. `timed`: `measure` takes the length
    of its runs in seconds.
    """

    name: str
    suite: str
    about: str
    timed: bool = False


BENCHMARKS = (
    Benchmark("plan", "control-plane", "one decision for 5,000 nodes"),
    Benchmark("latency", "control-plane", "drain or new node to Envoy's ACK"),
    Benchmark("fleet", "control-plane", "200 Envoys over 1,000 nodes"),
    Benchmark("module_cost", "module", "CPU of Envoy per query with the module", timed=True),
)


def register(app: typer.Typer) -> None:
    """Add the command to `app` (entry point group `tidevoy.commands`)."""
    app.command("bench")(bench)


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Which: {', '.join(f'{b.name} ({b.about})' for b in BENCHMARKS)}; default: all.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        int | None,
        typer.Option(
            help="Length of each run of module_cost instead of its own; such results are not kept.", min=1
        ),
    ] = None,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    results: Annotated[
        Path, typer.Option(help="Directory in which the results of whole suites are kept.")
    ] = RESULTS,
) -> None:
    """Measure Tidevoy on this machine. A missed target is shown as such and is no failure of the command."""
    wanted = chosen(names or [])
    # gRPC would write a line for every connection that ends; it reads this when it is first used.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    documents = []
    for suite in dict.fromkeys(benchmark.suite for benchmark in wanted):
        parts = [benchmark for benchmark in wanted if benchmark.suite == suite]
        document = run_suite(suite, parts, seconds)
        documents.append(document)
        if not print_json:
            show(document)
        changed = seconds is not None and any(benchmark.timed for benchmark in parts)
        if not changed and len(parts) == sum(benchmark.suite == suite for benchmark in BENCHMARKS):
            for path in keep(document, results):
                remark(f"wrote {path}")
    if print_json:
        show_json({"suites": documents})


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """The benchmarks of these names, all without any, in our order. BadParameter for one that is none."""
    known = [benchmark.name for benchmark in BENCHMARKS]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"there is no benchmark {name!r}; choose from {', '.join(known)}")
    return [benchmark for benchmark in BENCHMARKS if not names or benchmark.name in names]


def run_suite(suite: str, wanted: Sequence[Benchmark], seconds: int | None = None) -> dict[str, Any]:
    """Run benchmarks of one suite, one after the other; their report as plain data. BenchmarkFailed.

    `seconds`: the length of the runs of those that are timed; None: their own.
    """
    machine = Machine.here()
    sections = tuple(asyncio.run(_measured(benchmark, seconds)) for benchmark in wanted)
    return as_json(Report(suite, machine, sections))


async def _measured(benchmark: Benchmark, seconds: int | None) -> Section:
    module = importlib.import_module(f"bench.{benchmark.name}")
    remark(f"measuring {benchmark.name}: {benchmark.about}")
    condition = await Condition.now()
    try:
        figures = await (module.measure(seconds) if benchmark.timed and seconds else module.measure())
    except httpx2.HTTPError as error:
        raise BenchmarkFailed(benchmark.name, f"the control plane did not answer ({error!r})") from None
    except (TimeoutError, NotInTime):
        raise BenchmarkFailed(
            benchmark.name, "what it waited for did not happen in time; try again on a quieter machine"
        ) from None
    return Section(benchmark.name, module.METHOD, condition, tuple(figures))
