"""`tidevoy bench`: runs benchmarks, shows what they found and keeps it."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx2
import typer

from api.cli.output import remark, show_json
from bench.machine import Condition, Machine
from bench.report import Findings, Report, Section, as_json, keep, show
from bench.side_by_side_command import Wishes, run_side_by_side
from controlplane.errors import TidevoyError
from sandbox.stack import NotInTime

RESULTS = Path(__file__).with_name("results")
SIDE_BY_SIDE, MOVES, AGAINST, BALANCE = "side_by_side", "moves", "against", "balance"
DOORS = "doors"


class BenchmarkFailed(TidevoyError):
    """A benchmark could not be carried through, so there is no figure."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"benchmark {name} was given up: {reason}")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One file of this package, with `METHOD`, a text, and `async measure() -> list[Figure] | Findings`.

    The benchmarks of a suite are kept together, in one file of results. `takes`: the options, by name, that
    go to `measure`. `only_by_name`: it takes too long to be one of all, or has to be told something.
    """

    name: str
    suite: str
    about: str
    takes: tuple[str, ...] = ()
    only_by_name: bool = False


BENCHMARKS = (
    Benchmark("plan", "control-plane", "one decision for 5,000 nodes"),
    Benchmark("latency", "control-plane", "drain or new node to Envoy's ACK"),
    Benchmark("fleet", "control-plane", "200 Envoys over 1,000 nodes"),
    Benchmark("loop", "control-plane", "CPU of the control plane for 5,000 nodes and 100 Envoys"),
    Benchmark("module_cost", "module", "CPU of Envoy per query with the module", takes=("seconds",)),
    Benchmark(
        BALANCE,
        BALANCE,
        "how evenly simulated fleets share sessions out; ten minutes",
        only_by_name=True,
    ),
    Benchmark(
        DOORS,
        DOORS,
        "what wrong tokens, as many as can be sent, do to changes; three minutes",
        only_by_name=True,
    ),
    Benchmark(
        MOVES,
        "moves",
        "what moving sessions costs; six minutes",
        takes=("sessions", "moves", "rounds"),
        only_by_name=True,
    ),
    Benchmark(
        AGAINST,
        "against",
        "this build of the module against another; nine minutes",
        takes=("module", "rev", "rounds", "seconds"),
        only_by_name=True,
    ),
    Benchmark(
        SIDE_BY_SIDE,
        "side-by-side",
        "with HAProxy; over an hour",
        takes=("seconds", "rounds", "only", "peer", "workers"),
        only_by_name=True,
    ),
)
_NAMING = ("module", "rev")
"""Options that say what is measured, and leave how much as it is."""


def register(app: typer.Typer) -> None:
    """Add the command to `app` (entry point group `tidevoy.commands`)."""
    app.command("bench")(bench)


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Which: {', '.join(f'{b.name} ({b.about})' for b in BENCHMARKS)}; default: all but"
            f" {', '.join(b.name for b in BENCHMARKS if b.only_by_name)}.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        int | None,
        typer.Option(
            help=f"Length of each run of module_cost, {AGAINST} and {SIDE_BY_SIDE} instead of their own; such"
            f" results are not kept, but for {SIDE_BY_SIDE}.",
            min=1,
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help=f"Rounds of {SIDE_BY_SIDE} (default: 5) or {AGAINST} (7), rolling restarts of {MOVES} (3).",
            min=1,
        ),
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(help=f"Idle sessions of {MOVES}; default: 10,000.", min=10, max=100_000)
    ] = None,
    moves: Annotated[
        int | None, typer.Option(help=f"Moves to and fro of {MOVES}; default: 100,000.", min=10)
    ] = None,
    module: Annotated[
        Path | None,
        typer.Option(
            help=f"The other build of {AGAINST}: its file, for the control plane of this checkout.",
            exists=True,
            dir_okay=False,
            resolve_path=True,
            show_default=False,
        ),
    ] = None,
    rev: Annotated[
        str | None,
        typer.Option(
            help=f"The other build of {AGAINST}: its git revision, which is built and runs with the control"
            " plane of that revision.",
            show_default=False,
        ),
    ] = None,
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
    given = {
        name: value
        for name, value in {
            "seconds": seconds,
            "rounds": rounds,
            "sessions": sessions,
            "moves": moves,
            "module": module,
            "rev": rev,
            "only": only,
            "peer": peer,
            "workers": workers,
        }.items()
        if value
    }
    check(wanted, given)
    wishes = Wishes(seconds, rounds, tuple(only or ()), tuple(peer or ()), workers)
    # gRPC would write a line for every connection that ends; it reads this when it is first used.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    documents = []
    for suite in dict.fromkeys(benchmark.suite for benchmark in wanted):
        parts = [benchmark for benchmark in wanted if benchmark.suite == suite]
        if parts[0].name == SIDE_BY_SIDE:
            with _given_up_in_words(SIDE_BY_SIDE):
                documents.append(run_side_by_side(wishes, results, RESULTS, quiet=print_json))
            continue
        document = run_suite(suite, parts, given)
        documents.append(document)
        if not print_json:
            show(document)
        changed = any(name in benchmark.takes for benchmark in parts for name in given if name not in _NAMING)
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


def check(wanted: Sequence[Benchmark], given: Mapping[str, Any]) -> None:
    """BadParameter when an option is for none of these benchmarks, or one lacks what it must be told."""
    for name in given:
        if not any(name in benchmark.takes for benchmark in wanted):
            takers = " and ".join(benchmark.name for benchmark in BENCHMARKS if name in benchmark.takes)
            raise typer.BadParameter(f"--{name} is for {takers}; name it")
    named = [name for name in _NAMING if name in given]
    if any(benchmark.name == AGAINST for benchmark in wanted) and len(named) != 1:
        raise typer.BadParameter(f"{AGAINST} needs the other build: either --module PATH or --rev REV")


def run_suite(suite: str, wanted: Sequence[Benchmark], given: Mapping[str, Any]) -> dict[str, Any]:
    """Run benchmarks of one suite, one after the other; their report as plain data. BenchmarkFailed.

    `given`: options by name; each benchmark gets those that it takes.
    """
    machine = Machine.here()
    sections = tuple(asyncio.run(_measured(benchmark, given)) for benchmark in wanted)
    return as_json(Report(suite, machine, sections))


async def _measured(benchmark: Benchmark, given: Mapping[str, Any]) -> Section:
    module = importlib.import_module(f"bench.{benchmark.name}")
    remark(f"measuring {benchmark.name}: {benchmark.about}")
    condition = await Condition.now()
    with _given_up_in_words(benchmark.name):
        found = await module.measure(**{name: given[name] for name in benchmark.takes if name in given})
    findings = found if isinstance(found, Findings) else Findings(tuple(found))
    return Section(
        benchmark.name,
        module.METHOD,
        condition,
        findings.figures,
        findings.sheets,
        findings.drawings,
    )


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
