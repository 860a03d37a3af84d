"""`tidevoy bench proxies`: Tidevoy beside HAProxy, Envoy and others, before MariaDB or real TiDB."""

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
from bench.proxies import drains as moving
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
    """What stands behind the proxies."""

    MARIADB = "mariadb"
    TIDB = "tidb"


@dataclass(frozen=True, slots=True)
class ProxyBenchSetup:
    """What every comparison needs: a site for the proxies, the load client, and the cores."""

    site: ProxySite
    client: LoadClient
    pinning: CpuPinning | None


@asynccontextmanager
async def prepare_setup(binaries: TidbBinaries | None = None) -> AsyncIterator[ProxyBenchSetup]:
    """Build the load client and start the server: MariaDB, or TiDB with `binaries`. ProcessFailed."""
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
            "--whole", help="All workloads, latency with up to 10,000 clients, and memory; keeps the results."
        ),
    ] = False,
    backend: Annotated[
        BackendName, typer.Option(help="The server behind all proxies.")
    ] = BackendName.MARIADB,
    tidb_bin: Annotated[
        Path | None, typer.Option(help="Folder with tidb-server and pd-server; default: TiUP's newest.")
    ] = None,
    tidb_store: Annotated[
        str | None,
        typer.Option(help="The store's program or command, if it is not tikv-server in that folder."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND",
            help="One more proxy. In the command {listen}, {server}, {pd} and {directory} are filled in.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only workloads with this in their name.", show_default=False)
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the results; default: with --whole bench/results, else they are not kept."
        ),
    ] = None,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare Tidevoy with HAProxy and Envoy: CPU, latency, new connections, TLS. 7 minutes; --whole: 25."""
    workloads = select_workloads(only or [], whole=whole)
    try:
        peers = [contender_from_command(text) for text in peer or ()]
    except InvalidPeer as problem:
        raise typer.BadParameter(str(problem)) from None
    names = [HAPROXY, ENVOY, TIDEVOY, *(each.name for each in peers)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise typer.BadParameter(f"there are two proxies with the name {twice.pop()}; give yours another one")
    contenders = [*standard_contenders(), *peers]
    if backend is BackendName.MARIADB and any("{pd}" in text for text in peer or ()):
        raise typer.BadParameter("a --peer with {pd} needs PD: add --backend tidb")
    binaries = tidb_binaries.require_binaries(tidb_bin, tidb_store) if backend is BackendName.TIDB else None
    print_note(
        f"{len(workloads)} workloads: about {format_duration(estimate_seconds(workloads, len(contenders)))}"
    )
    machine = Machine.here()
    with translate_errors("proxies"):
        found = asyncio.run(_measure(machine, contenders, workloads, binaries, whole=whole and not only))
    if print_json:
        show_json(found.as_json())
    else:
        show_table(column_titles(found.reference), [table_row(each) for each in found.comparisons])
        if found.moves is not None:
            print_result(
                f"{found.moves.per_second:,.0f} sessions moved per second;"
                f" slowest statement {found.moves.slowest:.1f} ms"
            )
    directory = results or (RESULTS_DIRECTORY if whole and not only else None)
    if directory is not None and found.others_busy > MachineCondition.MAX_OTHERS_BUSY:
        raise MachineBusy(found.others_busy)
    if directory is not None:
        for path in page.write_results(found, directory):
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
        drains = whole and backend.cluster is not None
        tidevoy = next(each for each in contenders if each.name == TIDEVOY)
        moves = await moving.measure(tidevoy, *setup_parts) if drains else None
    return Results(
        backend.name,
        backend.version,
        at,
        machine.as_json(),
        {each.name: each.version for each in contenders},
        tuple(comparisons),
        tuple(latencies),
        memory_by_contender,
        moves,
    )
