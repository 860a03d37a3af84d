"""`tidevoy profile`: where HAProxy, Envoy and Tidevoy spend their CPU, as flame graphs and as a table."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from api.cli.output import remark
from bench.command import BenchmarkFailed
from bench.costs import PERF_PACKAGE, Proxy, figures, watching
from bench.load_client import build
from bench.machine import Condition, Machine
from bench.peers import REFERENCE, TIDEVOY, Peer, Site, ours
from bench.profile_page import Profile, keep
from bench.servers import make_certificate, serving
from bench.stacks import FIELDS, Stack, fold
from bench.workloads import WORKLOADS, Stage, Workload
from controlplane.errors import TidevoyError
from sandbox.ports import Ports
from sandbox.process import Process, ProcessFailed, describe_exit, find_program

_SHOWN = (REFERENCE, "Envoy", TIDEVOY)
_TITLES = (
    "point select, text, 16 clients, 1 worker",
    "result of 10,000 rows, 4 clients, 1 worker",
    "point select beside 300 new connections/s, 16 clients, 1 worker",
)
_SECONDS = 10
_PATIENCE = 30.0  # seconds for perf to write its file, and to read it
_DOCS = Path(__file__).parents[1] / "docs"

# All processes, of which those of one proxy are looked at afterwards: a clock that belongs to a process is
# set anew at every task switch, and that would be a good part of what is seen. No hardware counter, since not
# every machine has one.
_RECORD = ("record", "--all-cpus", "--event=cpu-clock", "--freq=997", "-g", "--quiet")


class NothingSeen(TidevoyError):
    """A proxy used so little CPU that no sample hit it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"perf has no sample of {name}; give it longer: tidevoy profile --seconds 10")


@dataclass(frozen=True, slots=True)
class _Recording:
    """What perf wrote while a proxy, with these processes, carried a load; `figures` as in `bench.costs`."""

    workload: Workload
    peer: Peer
    processes: Sequence[int]
    condition: Condition
    figures: Mapping[str, float]
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
    try:
        profiles = asyncio.run(profile(seconds))
    except TimeoutError:
        reason = "what it waited for did not happen in time; try again on a quieter machine"
        raise BenchmarkFailed("profile", reason) from None
    for path in keep(profiles, machine, directory):
        remark(f"wrote {path}")


async def profile(seconds: int) -> list[Profile]:
    """Profile each proxy under each load for so many seconds.

    NothingSeen, ProcessFailed, ProgramMissing, TimeoutError.
    """
    find_program("perf", PERF_PACKAGE)  # before anything is started for nothing
    peers = [peer for peer in ours() if peer.name in _SHOWN]
    workloads = [workload for workload in WORKLOADS if workload.title in _TITLES]
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-profile-") as made:
        directory = Path(made)
        certificate = make_certificate(directory)
        program = await build(directory)
        async with serving(directory, certificate) as servers:
            site = Site(directory, ports, servers, certificate, Stage())
            async with _started(peers, site) as proxies:
                recordings = [
                    await _record(workload, peer, proxy, directory, seconds, program)
                    for workload in workloads
                    for peer, proxy in proxies
                ]
        return [_read(recording) for recording in recordings]


@asynccontextmanager
async def _started(peers: Sequence[Peer], site: Site) -> AsyncIterator[list[tuple[Peer, Proxy]]]:
    async with AsyncExitStack() as stack:
        yield [
            (peer, await stack.enter_async_context(peer.start(replace(site, directory=own))))
            for peer, own in ((peer, site.directory / peer.name) for peer in peers)
        ]


async def _record(
    workload: Workload, peer: Peer, proxy: Proxy, directory: Path, seconds: int, program: Path
) -> _Recording:
    remark(f"{workload.title}: {peer.name}")
    load = workload.load(directory, program=program)
    condition = await Condition.now()
    data = directory / f"{peer.name}, {workload.title.replace('/', ' per ')}.perf"
    perf = Process.start(
        "perf", [find_program("perf", PERF_PACKAGE), *_RECORD, f"--output={data}"], directory=directory
    )
    try:
        with watching(proxy) as watch:
            outcome = await load.run(proxy.port, seconds)
        perf.send(signal.SIGINT)
        async with asyncio.timeout(_PATIENCE):
            code = await perf.wait()
    finally:
        await perf.kill()  # nothing, when it has ended
    if code not in (0, -signal.SIGINT):
        raise ProcessFailed("perf", f"{describe_exit(code)} (it wants root)", perf.tail())
    found = figures(outcome, watch.used, watch.resident_mib)
    return _Recording(workload, peer, proxy.processes(), condition, found, data)


def _read(recording: _Recording) -> Profile:
    stacks = _stacks(recording)
    if not stacks:
        raise NothingSeen(recording.peer.name)
    return Profile(
        workload=recording.workload.title,
        peer=recording.peer.name,
        version=recording.peer.version,
        condition=recording.condition,
        cpu_us=recording.figures["cpu_us"],
        per_second=recording.figures["qps"],
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
