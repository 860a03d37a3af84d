"""`tidevoy profile`: where HAProxy, Envoy and Tidevoy spend their CPU, as flame graphs and as a table."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bench.errors import failures
from bench.machine import Condition, Machine
from bench.profiling.call_stacks import FIELDS, Stack, fold
from bench.profiling.page import Profile, keep
from bench.proxies.command import Bench, prepared
from bench.proxies.comparison import running
from bench.proxies.contenders import Contender, Proxy, standard
from bench.proxies.workloads import WORKLOADS, Encryption, Workload
from cli.output import remark
from controlplane.errors import TidevoyError
from sandbox.child_process import Process, ProcessFailed, describe_exit, find_program

PERF_PACKAGE = "linux-perf"
_WORKLOADS = ("point select, 16 clients", "10,000 rows", "300 new connections/s")
_SECONDS = 10
_PATIENCE = 30.0  # seconds for perf to write its file, and to read it
_DOCS = Path(__file__).parents[2] / "docs" / "internals"

# All processes, of which those of one proxy are looked at afterwards: a clock that belongs to a process is
# set anew at every task switch, and that would be a good part of what is seen. No hardware counter, since not
# every machine has one.
_RECORD = ("record", "--all-cpus", "--event=cpu-clock", "--freq=997", "-g", "--quiet")


class NothingSeen(TidevoyError):
    """A proxy used so little CPU that no sample hit it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"perf has no sample of {name}; record it for longer: tidevoy profile --seconds 30")


@dataclass(frozen=True, slots=True)
class _Recording:
    """What perf wrote while a proxy, with these processes, carried a load. `cpu`: seconds for each query."""

    workload: Workload
    contender: Contender
    processes: Sequence[int]
    condition: Condition
    cpu: float
    per_second: float
    data: Path


def register(app: typer.Typer) -> None:
    """Add the command to `app` (entry point group `tidevoy.commands`)."""
    app.command("profile")(command)


def command(
    seconds: Annotated[int, typer.Option(help="How long each proxy is looked at.", min=1)] = _SECONDS,
    directory: Annotated[
        Path, typer.Option(help="Where the page profiles.md and its pictures are written.")
    ] = _DOCS,
) -> None:
    """Show with perf on what HAProxy, Envoy and Tidevoy spend their CPU; wants root."""
    machine = Machine.here()
    with failures("profile"):
        profiles = asyncio.run(profile(seconds))
    for path in keep(profiles, machine, directory):
        remark(f"wrote {path}")


async def profile(seconds: int) -> list[Profile]:
    """Profile each proxy under each load for so many seconds.

    NothingSeen, ProcessFailed, ProgramMissing, TimeoutError.
    """
    find_program("perf", PERF_PACKAGE)  # before anything is started for nothing
    workloads = [workload for workload in WORKLOADS if workload.name in _WORKLOADS]
    contenders = standard()
    async with (
        prepared() as bench,
        running(contenders, bench.site, Encryption.NONE, bench.pinning) as proxies,
    ):
        recordings = [
            await _record(workload, contender, proxies[contender.name], bench, seconds)
            for workload in workloads
            for contender in contenders
        ]
        return [_read(recording) for recording in recordings]


async def _record(
    workload: Workload, contender: Contender, proxy: Proxy, bench: Bench, seconds: int
) -> _Recording:
    remark(f"{workload.name}: {contender.name}")
    condition = await Condition.now()
    directory = bench.site.directory
    data = directory / f"{contender.name}, {workload.name.replace('/', ' per ')}.perf"
    async with bench.client.slices(
        [proxy.target],
        connections=workload.clients,
        statement=workload.statement,
        numbers=workload.highest_id,
    ) as slices:
        perf = Process.start(
            "perf", [find_program("perf", PERF_PACKAGE), *_RECORD, f"--output={data}"], directory=directory
        )
        try:
            before = proxy.cpu_seconds()
            taken = await slices.run(0, seconds, rate=workload.rate, new_connections=workload.new_connections)
            used = proxy.cpu_seconds() - before
            perf.send(signal.SIGINT)
            async with asyncio.timeout(_PATIENCE):
                code = await perf.wait()
        finally:
            await perf.kill()  # nothing, when it has ended
    if code not in (0, -signal.SIGINT):
        raise ProcessFailed("perf", f"{describe_exit(code)} (it needs root)", perf.tail())
    queries = len(taken.latencies)
    return _Recording(
        workload, contender, proxy.processes(), condition, used / queries, queries / taken.seconds, data
    )


def _read(recording: _Recording) -> Profile:
    stacks = _stacks(recording)
    if not stacks:
        raise NothingSeen(recording.contender.name)
    return Profile(
        workload=recording.workload.name,
        peer=recording.contender.name,
        version=recording.contender.version,
        condition=recording.condition,
        cpu_us=recording.cpu * 1e6,
        per_second=recording.per_second,
        stacks=stacks,
    )


def _stacks(recording: _Recording) -> Counter[Stack]:
    command = [
        *(find_program("perf", PERF_PACKAGE), "script"),
        *(f"--input={recording.data}", f"--fields={FIELDS}"),
        f"--pid={','.join(str(pid) for pid in recording.processes)}",
        "--no-inline",  # what the compiler inlined would be looked up address by address
    ]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=_PATIENCE
    )
    return fold(printed.stdout)
