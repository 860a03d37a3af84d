"""`tidevoy bench proxies`: compare Tidevoy with HAProxy, Envoy and others, in front of MariaDB or TiDB."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bench.errors import convert_errors_to_benchmark_failed
from bench.machine import Machine, MachineBusy, MachineCondition
from bench.proxies import drains as drain_benchmark
from bench.proxies import page
from bench.proxies.comparison import compare, show_comparisons
from bench.proxies.contenders import (
    ENVOY,
    HAPROXY,
    TIDEVOY,
    Contender,
    InvalidPeer,
    contender_from_command,
    standard_contenders,
)
from bench.proxies.latency_and_memory import measure_added_latency, measure_memory
from bench.proxies.results import Results
from bench.proxies.setup import prepare_setup
from bench.proxies.workloads import OnlyOption, ProxyWorkload, select_workloads
from cli.output import print_note, print_result
from sandbox import tidb_binaries
from sandbox.tidb_binaries import TidbBinaries

RESULTS_DIRECTORY = Path(__file__).parents[1] / "results"
README_FILE = Path(__file__).parents[2] / "README.md"


class BackendName(StrEnum):
    MARIADB = "mariadb"
    TIDB = "tidb"


def command(
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="All workloads, latency with up to 10,000 clients, and memory; writes the results to files.",
        ),
    ] = False,
    backend: Annotated[
        BackendName, typer.Option(help="The server behind all proxies.")
    ] = BackendName.MARIADB,
    tidb_bin: Annotated[
        Path | None,
        typer.Option(
            help="Folder with tidb-server and pd-server; default: the newest release installed by TiUP."
        ),
    ] = None,
    tidb_store: Annotated[
        str | None,
        typer.Option(help="The storage server: a path or a whole command; default: the one in that folder."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND",
            help="Another proxy to compare. COMMAND may use {listen}, {server}, {pd} and {directory}.",
        ),
    ] = None,
    only: OnlyOption = None,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare Tidevoy with HAProxy and Envoy: CPU, latency, new connections, TLS. 7 minutes; --whole: 25."""
    workloads = select_workloads(only or [], whole=whole)
    try:
        peers = [contender_from_command(text) for text in peer or ()]
    except InvalidPeer as error:
        raise typer.BadParameter(str(error)) from None
    names = [HAPROXY, ENVOY, TIDEVOY, *(peer_contender.name for peer_contender in peers)]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise typer.BadParameter(f"two proxies have the name {duplicates.pop()}; give yours another one")
    contenders = [*standard_contenders(), *peers]
    if backend is BackendName.MARIADB and any("{pd}" in text for text in peer or ()):
        raise typer.BadParameter("a --peer with {pd} needs PD: add --backend tidb")
    binaries = tidb_binaries.require_binaries(tidb_bin, tidb_store) if backend is BackendName.TIDB else None
    machine = Machine.here()
    with convert_errors_to_benchmark_failed("proxies"):
        measured = asyncio.run(_measure(machine, contenders, workloads, binaries, whole=whole and not only))
    if print_json:
        print_result(measured.as_json_text())
    else:
        show_comparisons(measured.comparisons, measured.reference)
        if measured.moves is not None:
            print_result(
                f"{measured.moves.per_second:,.0f} sessions migrated per second;"
                f" slowest statement {measured.moves.slowest:.1f} ms"
            )
    if whole and not only:
        if measured.others_busy > MachineCondition.MAX_OTHERS_BUSY:
            raise MachineBusy(measured.others_busy)
        for path in page.write_results(measured, RESULTS_DIRECTORY):
            print_note(f"wrote {path}")
        if page.write_readme(README_FILE, RESULTS_DIRECTORY):
            print_note(f"wrote {README_FILE}")


async def _measure(
    machine: Machine,
    contenders: Sequence[Contender],
    workloads: Sequence[ProxyWorkload],
    binaries: TidbBinaries | None,
    *,
    whole: bool,
) -> Results:
    async with prepare_setup(binaries) as bench:
        backend = bench.site.backend
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        memory = await measure_memory(contenders, bench) if whole else None
        latencies = await measure_added_latency(contenders, bench) if whole else []
        comparisons = await compare(contenders, workloads, bench)
        # Last, since drains start a second TiDB server.
        measures_drains = whole and backend.cluster is not None
        tidevoy = next(contender for contender in contenders if contender.name == TIDEVOY)
        drain_result = await drain_benchmark.measure(tidevoy, bench) if measures_drains else None
    return Results(
        backend.name,
        backend.version,
        at,
        asdict(machine),
        {contender.name: contender.version for contender in contenders},
        tuple(comparisons),
        tuple(latencies),
        memory,
        drain_result,
    )
