"""Proxies side by side, before the same servers, under the same load: what each costs and how it answers."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.cli.output import elapsed, remark
from bench.comparison import SUITE, as_table, samples
from bench.costs import CannotCount, Proxy, SystemCalls, figures, per_connection, resident_kb, watching
from bench.load_client import build
from bench.machine import Condition, Machine
from bench.paired import rotated
from bench.peers import AGAIN, REFERENCE, Peer, Site
from bench.servers import make_certificate, serving
from bench.workloads import WORKLOADS, Load, Stage, Workload
from sandbox.ports import Ports

METHOD = (
    "All proxies stand before the same two MariaDB servers with the same data, all on one machine and on"
    " loopback; nothing is pinned to a core. `direct` is the first server without a proxy. One of them works"
    " at a time, while the others are idle. A round has a run of each, in an order that rotates. Before the"
    " rounds, each has a short run that is not timed: it warms up, and perf counts the system calls of the"
    " proxy (tracepoint raw_syscalls:sys_enter). CPU is the time that all threads of the proxy's processes"
    " were on a core (`/proc/PID/task/*/schedstat`), divided by the queries; user and system share it as the"
    " kernel's ticks do. The machine's CPU is all that was busy on it (`/proc/stat`): clients, servers, proxy"
    " and control planes. Memory is the most that was resident during a run; memory per connection (`kB"
    " each`, of 1,000 bytes) is what was resident more when the first of them were held, before any load."
    " Where something is beside the load, each run has one without it right before, and `QPS kept` is the"
    " share of that one's queries. A ratio is the median of those within a round. What chance does is the"
    " greatest difference, in any round, between HAProxy and HAProxy again, which are the same; a target is"
    " missed when it is exceeded by more than that."
)
ROUNDS = 5
SECONDS = 4  # of each run
_WARM_UP_SECONDS = 2.0
_BESIDE_A_RUN = 0.3  # seconds that a run takes beside the load, about
_BESIDE_A_STAGE = 15.0  # seconds to start everything, about


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. The peers must hold the reference, twice (`peers.REFERENCE`, `peers.AGAIN`)."""

    workloads: Sequence[Workload]
    peers: Sequence[Peer]
    rounds: int = ROUNDS
    seconds: float = SECONDS

    @property
    def whole(self) -> bool:
        """Whether it is the benchmark as it is meant, or more: such results are kept."""
        return len(self.workloads) == len(WORKLOADS) and self.rounds >= ROUNDS and self.seconds >= SECONDS

    @property
    def warm_up(self) -> float:
        """Length of the run that is not timed, in seconds."""
        return min(_WARM_UP_SECONDS, self.seconds)

    def table_seconds(self) -> float:
        """How long one table will take, about."""
        runs = self.rounds * (self.seconds + _BESIDE_A_RUN) + self.warm_up + 2 * _BESIDE_A_RUN
        return len(self.peers) * runs

    def estimate(self) -> float:
        """How many seconds all of it will take, about."""
        stages = len({workload.stage for workload in self.workloads})
        twice = sum(workload.make_without is not None for workload in self.workloads)
        again = twice * len(self.peers) * self.rounds * self.seconds
        return len(self.workloads) * self.table_seconds() + again + stages * _BESIDE_A_STAGE


def document(machine: Machine, tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is kept of a run, as plain data."""
    return {"suite": SUITE, "method": METHOD, "machine": machine.as_json(), "tables": list(tables)}


async def measure(plan: Plan, ended: Callable[[dict[str, Any]], None]) -> None:
    """Measure all workloads; `ended` is given each table as soon as there is one.

    ProcessFailed, ProgramMissing, TimeoutError.
    """
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as made:
        directory = Path(made)
        certificate = make_certificate(directory)
        # Now rather than in an hour, should it not work.
        program = await build(directory) if any(each.built for each in plan.workloads) else None
        done = 0
        async with serving(directory, certificate) as servers:
            for stage, workloads in itertools.groupby(plan.workloads, lambda workload: workload.stage):
                site = Site(directory, ports, servers, certificate, stage)
                async with _started(plan.peers, site) as proxies:
                    for workload in workloads:
                        _announce(plan, done, workload)
                        ended(await _table(plan, workload, proxies, directory, program))
                        done += 1


def _announce(plan: Plan, done: int, workload: Workload) -> None:
    left = elapsed((len(plan.workloads) - done) * plan.table_seconds())
    remark(f"{done + 1} of {len(plan.workloads)}: {workload.title} ({left} left)")


@asynccontextmanager
async def _started(peers: Sequence[Peer], site: Site) -> AsyncIterator[dict[str, Proxy]]:
    """All peers, each in a directory of its own."""
    async with AsyncExitStack() as stack:
        proxies = {}
        for number, peer in enumerate(peers):
            directory = site.directory / f"{_named(site.stage)}-{number}"
            own = Site(directory, site.ports, site.servers, site.certificate, site.stage)
            proxies[peer.name] = await stack.enter_async_context(peer.start(own))
        yield proxies


def _named(stage: Stage) -> str:
    return f"{stage.workers}-{stage.connections}{'-tls' if stage.tls else ''}"


async def _table(
    plan: Plan, workload: Workload, proxies: Mapping[str, Proxy], directory: Path, program: Path | None
) -> dict[str, Any]:
    condition = await Condition.now()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in proxies}
    loads: dict[str, Load] = {}
    once: dict[str, dict[str, list[float]]] = {}
    without = workload.without(directory)
    for name, proxy in proxies.items():
        load = loads[name] = workload.load(directory, tls_first=proxy.tls_first, program=program)
        before = resident_kb(proxy)
        async with workload.beside(proxy.port, directory, program):
            once[name] = per_connection(before, resident_kb(proxy), workload.stage.connections)
            once[name] |= await _warmed_up(load, proxy, plan.warm_up, directory)
    for number in range(plan.rounds):
        for name in rotated(list(proxies), number):
            proxy = proxies[name]

            async def run(name: str = name, proxy: Proxy = proxy) -> dict[str, float]:
                async with workload.beside(proxy.port, directory, program):
                    return await _run(loads[name], proxy, plan.seconds)

            async def alone(proxy: Proxy = proxy) -> float:
                assert without is not None
                return (await without.run(proxy.port, plan.seconds)).per_second

            runs[name].append(await sample(number, run, alone if without is not None else None))
    return as_table(
        workload,
        {name: {**samples(each), **once[name]} for name, each in runs.items()},
        {peer.name: peer.version for peer in plan.peers},
        rounds=plan.rounds,
        seconds=float(plan.seconds),
        condition=condition.as_json(),
        reference=REFERENCE,
        again=AGAIN,
    )


async def sample(
    number: int,
    run: Callable[[], Awaitable[dict[str, float]]],
    alone: Callable[[], Awaitable[float]] | None,
) -> dict[str, float]:
    """The figures of one run; with `alone`, the queries per second without company, also the share kept.

    In every other round the run without company comes last, so that drift favours neither.
    """
    if alone is None:
        return await run()
    if number % 2:
        figures_beside, per_second = await run(), await alone()
    else:
        per_second, figures_beside = await alone(), await run()
    return {**figures_beside, "kept": figures_beside["qps"] / per_second}


async def _warmed_up(load: Load, proxy: Proxy, seconds: float, directory: Path) -> dict[str, list[float]]:
    """The one sample of system calls per query; none when there is no proxy, or perf may not count."""
    processes = proxy.processes()
    if processes:
        try:
            async with SystemCalls(processes, directory) as calls:
                outcome = await load.run(proxy.port, seconds)
            return {"system_calls": [calls.count / outcome.queries]}
        except CannotCount as problem:
            remark(str(problem))
    await load.run(proxy.port, seconds)
    return {}


async def _run(load: Load, proxy: Proxy, seconds: float) -> dict[str, float]:
    with watching(proxy) as watch:
        outcome = await load.run(proxy.port, seconds)
    return figures(outcome, watch.used, watch.resident_mib)
