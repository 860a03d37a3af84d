"""`tidevoy profile`: profile the CPU time of HAProxy, Envoy and Tidevoy as flame graphs and tables."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.errors import convert_errors_to_benchmark_failed
from bench.machine import Machine, MachineCondition
from bench.profiling.call_stacks import PERF_FIELDS, CallStack, fold_stacks
from bench.profiling.page import Profile, write_profiles
from bench.proxies.contenders import Contender, RunningProxy, standard_contenders
from bench.proxies.setup import ProxyBenchSetup, prepare_setup
from bench.proxies.workloads import WORKLOADS, ProxyWorkload
from cli.output import print_note
from controlplane.errors import TidevoyError
from sandbox.child_process import ChildProcess, ProcessFailed, describe_exit, find_program

PERF_PACKAGE = "linux-perf"
_PROFILED_WORKLOADS = ("point select, 16 clients", "10,000 rows", "300 new connections/s")
_RECORD_SECONDS = 10
_PERF_TIMEOUT_SECONDS = 30.0  # for perf to write its file, and for perf script to read it
_DOCS_DIRECTORY = Path(__file__).parents[2] / "docs" / "internals"

# perf records all processes, and the samples are filtered afterwards: with a clock for only one process, the
# kernel reprograms the timer at every task switch, which would dominate the profile. `cpu-clock` needs no
# hardware counter, which some machines lack.
_PERF_RECORD_ARGUMENTS = ("record", "--all-cpus", "--event=cpu-clock", "--freq=997", "-g", "--quiet")


class NoSamples(TidevoyError):
    """A proxy used so little CPU that no sample hit it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"perf has no sample of {name}; record longer: tidevoy profile --seconds 30")


def register(app: typer.Typer) -> None:
    """Add the command to `app` (entry point group `tidevoy.commands`)."""
    app.command("profile")(command)


def command(
    seconds: Annotated[int, typer.Option(help="How long each proxy is recorded.", min=1)] = _RECORD_SECONDS,
    directory: Annotated[
        Path, typer.Option(help="Directory for the page profiles.md and its images.")
    ] = _DOCS_DIRECTORY,
) -> None:
    """Profile the CPU time of HAProxy, Envoy and Tidevoy with perf; needs root."""
    machine = Machine.here()
    with convert_errors_to_benchmark_failed("profile"):
        profiles = asyncio.run(profile_proxies(seconds))
    for path in write_profiles(profiles, machine, directory):
        print_note(f"wrote {path}")


async def profile_proxies(seconds: int) -> list[Profile]:
    """Profile each proxy under each workload for `seconds`.

    Raises NoSamples, ProcessFailed, ProgramMissing or TimeoutError.
    """
    find_program("perf", PERF_PACKAGE)  # fail before starting anything
    workloads = [workload for workload in WORKLOADS if workload.name in _PROFILED_WORKLOADS]
    contenders = standard_contenders()
    async with prepare_setup() as bench, bench.run(contenders) as proxies:
        return [
            await _profile_proxy(workload, contender, proxies[contender.name], bench, seconds)
            for workload in workloads
            for contender in contenders
        ]


async def _profile_proxy(
    workload: ProxyWorkload, contender: Contender, proxy: RunningProxy, bench: ProxyBenchSetup, seconds: int
) -> Profile:
    print_note(f"{workload.name}: {contender.name}")
    condition = await MachineCondition.now()
    directory = bench.site.directory
    data = directory / f"{contender.name}, {workload.name.replace('/', ' per ')}.perf"
    async with bench.client.slices(
        [proxy.target],
        connections=workload.clients,
        statement=workload.statement,
        max_number=workload.highest_id,
    ) as slices:
        perf = ChildProcess(
            "perf",
            [find_program("perf", PERF_PACKAGE), *_PERF_RECORD_ARGUMENTS, f"--output={data}"],
            directory=directory,
        )
        try:
            cpu_seconds_before = proxy.cpu_seconds()
            slice_result = await slices.run(
                0, seconds, rate=workload.rate, new_connections=workload.new_connections
            )
            cpu_seconds = proxy.cpu_seconds() - cpu_seconds_before
            perf.send_signal(signal.SIGINT)
            async with asyncio.timeout(_PERF_TIMEOUT_SECONDS):
                code = await perf.wait()
        finally:
            await perf.kill()  # no effect if perf has exited
    if code not in (0, -signal.SIGINT):
        raise ProcessFailed("perf", f"{describe_exit(code)} (it needs root)", perf.tail())
    queries = len(slice_result.latencies)
    stacks = _read_stacks(data, proxy.processes())
    if not stacks:
        raise NoSamples(contender.name)
    return Profile(
        workload=workload.name,
        proxy=contender.name,
        version=contender.version,
        condition=condition,
        cpu_us_per_query=cpu_seconds / queries * 1e6,
        queries_per_second=queries / slice_result.seconds,
        stacks=stacks,
    )


def _read_stacks(data: Path, processes: Sequence[int]) -> Counter[CallStack]:
    command = [
        *(find_program("perf", PERF_PACKAGE), "script", f"--input={data}", f"--fields={PERF_FIELDS}"),
        f"--pid={','.join(map(str, processes))}",
        "--no-inline",  # looking up inlined functions is slow
    ]
    perf_script = subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=_PERF_TIMEOUT_SECONDS
    )
    return fold_stacks(perf_script.stdout)
