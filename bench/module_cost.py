"""What the module costs: CPU of an Envoy per query with it, against one that only passes bytes on.

Three Envoys side by side in front of one MariaDB: plain, with the module, and plain again, which tells what
the comparison is worth. Each runs what its own control plane publishes to it, so what is measured is what
ships.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.costs import Proxy, Usage
from bench.paired import paired_figures, rotated
from bench.peers import Site, envoy
from bench.report import Figure, Spread
from bench.servers import make_certificate
from bench.sysbench import POINT_SELECT, Outcome, Sysbench, simple_range
from bench.workloads import Stage
from controlplane.publish import module_file
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.process import ProgramMissing

METHOD = (
    "Real Envoys with one worker each, configured by real control planes with default settings, in front of"
    " one MariaDB; sysbench with 4 clients (text protocol, a table of 100,000 rows; a range has 10,000)."
    " Three Envoys: plain (tcp_proxy alone), with the module, and plain again (A/A: same program, same"
    " configuration). One of them works at a time. A round has a run of each, in an order that rotates; one"
    " round to warm up, then 5. CPU is the time that all threads of the Envoy were on one"
    " (`/proc/PID/task/*/schedstat`), divided by the queries. What the module adds is the median of the five"
    " quotients within a round. The target is missed when it is exceeded by more than the greatest difference"
    " that the A/A pair shows in any round (±), and met only when that is not greater than the target itself."
)
SECONDS = 6  # of each run
_ROUNDS = 5
_WARM_UP = 1
_ROWS = 100_000
_CLIENTS = 4

_PLAIN, _MODULE, _AGAIN = "plain", "with module", "plain again"


@dataclass(frozen=True, slots=True)
class _Workload:
    """A script of sysbench, and the most percent that the module may add to it."""

    name: str
    script: tuple[str, ...]
    target: float


_WORKLOADS = (
    _Workload("point select", POINT_SELECT, 3.0),
    _Workload("10,000-row range", simple_range(10_000), 10.0),
)


@dataclass(frozen=True, slots=True)
class _Run:
    """What one run cost its Envoy, in seconds of CPU, and what its clients had of it.

    `resting` is what each other Envoy used per second meanwhile.
    """

    outcome: Outcome
    cpu: float
    user: float
    system: float
    resting: Mapping[str, float]

    @property
    def microseconds(self) -> float:
        """CPU per query."""
        return self.cpu / self.outcome.queries * 1e6


async def measure(seconds: int = SECONDS) -> list[Figure]:
    """Measure all workloads with runs of so many seconds; with 6, about four minutes.

    ProgramMissing without the module or sysbench.
    """
    module = module_file.find()
    if module is None:
        raise ProgramMissing("Tidevoy's module for Envoy", "make bench, which builds it")
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(Ports())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidevoy-bench-")))
        mariadb = await stack.enter_async_context(MariaDb.start(directory))
        sysbench = Sysbench(directory, rows=_ROWS, clients=_CLIENTS)
        await sysbench.prepare(mariadb.port)
        certificate = make_certificate(directory)
        proxies = {}
        for name, file in {_PLAIN: None, _MODULE: module, _AGAIN: None}.items():
            site = Site(directory / name.replace(" ", "-"), ports, [mariadb.port], certificate, Stage())
            proxies[name] = await stack.enter_async_context(envoy(file)(site))
        figures, resting = [], []
        for workload in _WORKLOADS:
            runs = await _rounds(sysbench, proxies, workload, seconds)
            figures += _figures(workload, runs)
            resting += [run for each in runs.values() for run in each]
    return figures + _at_rest(resting)


async def _rounds(
    sysbench: Sysbench, proxies: Mapping[str, Proxy], workload: _Workload, seconds: int
) -> dict[str, list[_Run]]:
    """The runs of all rounds but those to warm up, by proxy."""
    runs: dict[str, list[_Run]] = {name: [] for name in proxies}
    for number in range(_WARM_UP + _ROUNDS):
        for name in rotated(list(proxies), number):
            runs[name].append(await _run(sysbench, proxies, name, workload, seconds))
    return {name: each[_WARM_UP:] for name, each in runs.items()}


async def _run(
    sysbench: Sysbench, proxies: Mapping[str, Proxy], name: str, workload: _Workload, seconds: int
) -> _Run:
    before = {each: Usage.of(proxy.processes()) for each, proxy in proxies.items()}
    outcome = await sysbench.run(proxies[name].port, workload.script, seconds)
    used = {each: Usage.of(proxy.processes()).since(before[each]) for each, proxy in proxies.items()}
    took = outcome.queries / outcome.per_second
    resting = {each: usage.on_cpu / took for each, usage in used.items() if each != name}
    return _Run(outcome, used[name].on_cpu, used[name].user, used[name].system, resting)


def _figures(workload: _Workload, runs: Mapping[str, Sequence[_Run]]) -> list[Figure]:
    costs = {name: [run.microseconds for run in each] for name, each in runs.items()}
    compared = paired_figures(
        f"{workload.name}: CPU per query that the module adds",
        costs[_MODULE],
        costs[_PLAIN],
        costs[_AGAIN],
        target=workload.target,
    )
    return compared + [
        Figure(
            f"{workload.name}: CPU per query, {name}", spread.median, "µs", None, spread, _told(runs[name])
        )
        for name, spread in ((name, Spread.of(each)) for name, each in costs.items())
    ]


def _told(runs: Sequence[_Run]) -> str:
    user, system = sum(run.user for run in runs), sum(run.system for run in runs)
    rate = median(run.outcome.per_second for run in runs)
    p95 = median(run.outcome.p95 for run in runs)
    length = median(run.outcome.queries / run.outcome.per_second for run in runs)
    return (
        f"{system / (user + system):.0%} of it in the kernel; {rate:,.0f} queries/s, 95th percentile"
        f" {p95:.2f} ms, in runs of {length:.0f} s"
    )


def _at_rest(runs: Sequence[_Run]) -> list[Figure]:
    """What an Envoy costs that has nothing to do, which is also part of what it costs per query."""
    figures = []
    for name in (_PLAIN, _MODULE):
        spread = Spread.of([run.resting[name] * 1000 for run in runs if name in run.resting])
        figures.append(Figure(f"at rest: CPU per second, {name}", spread.median, "ms", None, spread))
    return figures
