"""`tidevoy bench`: runs benchmarks, shows what they found and keeps it."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx2
import typer

from api.cli.output import remark, show_json
from bench.machine import Condition, Machine
from bench.report import Report, Section, as_json, keep, show
from bench.side_by_side_command import Wishes, run_side_by_side
from controlplane.errors import TidevoyError
from sandbox.stack import NotInTime

RESULTS = Path(__file__).with_name("results")
SIDE_BY_SIDE = "side_by_side"


class BenchmarkFailed(TidevoyError):
    """A benchmark could not be carried through, so there is no figure."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"benchmark {name} was given up: {reason}")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One file of this package, with `METHOD`, a text, and `async measure() -> list[Figure]`.

    The benchmarks of a suite are kept together, in one file of results. `timed`: `measure` takes the length
    of its runs in seconds. `only_by_name`: it takes too long to be one of all.
    """

    name: str
    suite: str
    about: str
    timed: bool = False
    only_by_name: bool = False


BENCHMARKS = (
    Benchmark("plan", "control-plane", "one decision for 5,000 nodes"),
    Benchmark("latency", "control-plane", "drain or new node to Envoy's ACK"),
    Benchmark("fleet", "control-plane", "200 Envoys over 1,000 nodes"),
    Benchmark("module_cost", "module", "CPU of Envoy per query with the module", timed=True),
    Benchmark(SIDE_BY_SIDE, "side-by-side", "with HAProxy; over an hour", timed=True, only_by_name=True),
)


def register(app: typer.Typer) -> None:
    """Add the command to `app` (entry point group `tidevoy.commands`)."""
    app.command("bench")(bench)


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Which: {', '.join(f'{b.name} ({b.about})' for b in BENCHMARKS)}; default: all but"
            f" {SIDE_BY_SIDE}.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        int | None,
        typer.Option(
            help=f"Length of each run of module_cost and {SIDE_BY_SIDE} instead of their own; such results of"
            " module_cost are not kept.",
            min=1,
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help=f"Rounds of {SIDE_BY_SIDE}; default: 5.", min=1)] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Only workloads of {SIDE_BY_SIDE} with this in their name.", show_default=False),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND",
            help=f"One more proxy for {SIDE_BY_SIDE}; in the command {{listen}}, {{servers}} and {{workers}}"
            " are filled in.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help=f"Only workloads of {SIDE_BY_SIDE} with so many workers, e.g. 1,2.", show_default=False
        ),
    ] = None,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Directory in which the results of whole suites are kept, and those of a reduced"
            f" {SIDE_BY_SIDE} too.",
            show_default="bench/results beside the code",
        ),
    ] = None,
) -> None:
    """Measure Tidevoy on this machine. A missed target is shown as such and is no failure of the command."""
    wanted = chosen(names or [])
    wishes = Wishes(seconds, rounds, tuple(only or ()), tuple(peer or ()), workers)
    if wishes.side_by_side_alone and SIDE_BY_SIDE not in [benchmark.name for benchmark in wanted]:
        raise typer.BadParameter(f"--rounds, --only, --peer and --workers are for {SIDE_BY_SIDE}; name it")
    # gRPC would write a line for every connection that ends; it reads this when it is first used.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    documents = []
    for suite in dict.fromkeys(benchmark.suite for benchmark in wanted):
        parts = [benchmark for benchmark in wanted if benchmark.suite == suite]
        if parts[0].name == SIDE_BY_SIDE:
            with _given_up_in_words(SIDE_BY_SIDE):
                documents.append(run_side_by_side(wishes, results, RESULTS, quiet=print_json))
            continue
        document = run_suite(suite, parts, seconds)
        documents.append(document)
        if not print_json:
            show(document)
        changed = seconds is not None and any(benchmark.timed for benchmark in parts)
        if not changed and len(parts) == sum(benchmark.suite == suite for benchmark in BENCHMARKS):
            for path in keep(document, results or RESULTS):
                remark(f"wrote {path}")
    if print_json:
        show_json({"suites": documents})


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """The benchmarks of these names in our order; without any, all but those `only_by_name`. BadParameter."""
    known = [benchmark.name for benchmark in BENCHMARKS]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"there is no benchmark {name!r}; choose from {', '.join(known)}")
    return [each for each in BENCHMARKS if (each.name in names if names else not each.only_by_name)]


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
    with _given_up_in_words(benchmark.name):
        figures = await (module.measure(seconds) if benchmark.timed and seconds else module.measure())
    return Section(benchmark.name, module.METHOD, condition, tuple(figures))


@contextmanager
def _given_up_in_words(name: str) -> Iterator[None]:
    """BenchmarkFailed instead of errors that say nothing to who asked for a figure."""
    try:
        yield
    except httpx2.HTTPError as error:
        raise BenchmarkFailed(name, f"the control plane did not answer ({error!r})") from None
    except (TimeoutError, NotInTime):
        raise BenchmarkFailed(
            name, "what it waited for did not happen in time; try again on a quieter machine"
        ) from None
