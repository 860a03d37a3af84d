"""`tidevoy bench proxies`: compare Tidevoy with HAProxy, Envoy and others, in front of MariaDB or TiDB."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bench.errors import translate_errors
from bench.load_client import LoadClient
from bench.machine import Machine, MachineBusy, MachineCondition
from bench.proxies import added_latency, memory, page
from bench.proxies import drains as drain_benchmark
from bench.proxies.backends import start_mariadb, start_tidb
from bench.proxies.comparison import column_titles, compare, estimate_seconds, table_row
from bench.proxies.contenders import (
    ENVOY,
    HAPROXY,
    TIDEVOY,
    Contender,
    InvalidPeer,
    ProxySite,
    contender_from_command,
    direct_contender,
    standard_contenders,
)
from bench.proxies.pinning import CpuPinning
from bench.proxies.results import Results
from bench.proxies.workloads import ROWS, ProxyWorkload, select_workloads
from cli.output import format_duration, print_note, print_result, show_json, show_table
from sandbox import tidb_binaries
from sandbox.ports import Ports
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_binaries import TidbBinaries

RESULTS_DIRECTORY = Path(__file__).parents[1] / "results"
README_FILE = Path(__file__).parents[2] / "README.md"


class BackendName(StrEnum):
    """The server behind the proxies."""

    MARIADB = "mariadb"
    TIDB = "tidb"


@dataclass(frozen=True, slots=True)
class ProxyBenchSetup:
    """The resources of every comparison: a site for the proxies, the load client, and the CPU cores."""

    site: ProxySite
    client: LoadClient
    pinning: CpuPinning | None


@asynccontextmanager
async def prepare_setup(binaries: TidbBinaries | None = None) -> AsyncIterator[ProxyBenchSetup]:
    """Build the load client and run the server: MariaDB, or TiDB with `binaries`. Raises ProcessFailed."""
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as temporary_directory:
        directory = Path(temporary_directory)
        certificate = SessionCertificate.load_or_create(directory, rsa=True)
        client = await LoadClient.create(directory)
        pinning = CpuPinning.of(os.sched_getaffinity(0))
        if pinning is not None:
            pinning.pin_servers()
        print_note(f"starting {'MariaDB' if binaries is None else 'TiDB'} with a table of {ROWS:,} rows")
        backend = (
            start_mariadb(directory, certificate) if binaries is None else start_tidb(directory, binaries)
        )
        async with backend as server:
            yield ProxyBenchSetup(ProxySite(directory, ports, server, certificate), client, pinning)


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
        typer.Option(help="Folder with tidb-server and pd-server; default: the newest of TiUP."),
    ] = None,
    tidb_store: Annotated[
        str | None,
        typer.Option(help="Program or command of the store; default: tikv-server in that folder."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND",
            help="An additional proxy. {listen}, {server}, {pd} and {directory} in the command are replaced.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only workloads whose name contains this text.", show_default=False),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the results; default: bench/results with --whole, otherwise no files."
        ),
    ] = None,
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
    print_note(
        f"{len(workloads)} workloads: about {format_duration(estimate_seconds(workloads, len(contenders)))}"
    )
    machine = Machine.here()
    with translate_errors("proxies"):
        measured = asyncio.run(_measure(machine, contenders, workloads, binaries, whole=whole and not only))
    if print_json:
        show_json(measured.as_json())
    else:
        rows = [table_row(comparison) for comparison in measured.comparisons]
        show_table(column_titles(measured.reference), rows)
        if measured.moves is not None:
            print_result(
                f"{measured.moves.per_second:,.0f} sessions migrated per second;"
                f" slowest statement {measured.moves.slowest:.1f} ms"
            )
    directory = results or (RESULTS_DIRECTORY if whole and not only else None)
    if directory is not None and measured.others_busy > MachineCondition.MAX_OTHERS_BUSY:
        raise MachineBusy(measured.others_busy)
    if directory is not None:
        for path in page.write_results(measured, directory):
            print_note(f"wrote {path}")
        if directory == RESULTS_DIRECTORY and page.write_readme(README_FILE, RESULTS_DIRECTORY):
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
        site, backend = bench.site, bench.site.backend
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        setup_parts = (site, bench.client, bench.pinning)
        memory_by_contender = await memory.measure(contenders, *setup_parts) if whole else None
        latencies = (
            await added_latency.measure(direct_contender(backend), contenders, *setup_parts) if whole else []
        )
        comparisons = await compare(contenders, workloads, *setup_parts)
        # Last, since it starts a second server.
        measures_drains = whole and backend.cluster is not None
        tidevoy = next(contender for contender in contenders if contender.name == TIDEVOY)
        moves = await drain_benchmark.measure(tidevoy, *setup_parts) if measures_drains else None
    return Results(
        backend.name,
        backend.version,
        at,
        machine.as_json(),
        {contender.name: contender.version for contender in contenders},
        tuple(comparisons),
        tuple(latencies),
        memory_by_contender,
        moves,
    )
