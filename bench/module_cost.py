"""What the module costs: CPU of an Envoy per query with it, against one that only passes bytes on.

Three Envoys side by side in front of one MariaDB: plain, with the module, and plain again, which tells what
the comparison is worth. Each runs what its own control plane publishes to it, so what is measured is what
ships.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

from bench.machine import on_cpu_seconds, user_and_system
from bench.paired import paired_figures, rotated
from bench.report import Figure, Spread
from bench.sysbench import Outcome, Sysbench
from controlplane.publish import module_file
from controlplane.publish.bootstrap import render
from sandbox.control_plane import ControlPlane
from sandbox.envoy import EnvoyProcess
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.process import ProgramMissing
from sandbox.server import greets

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
_PATIENCE = 30.0  # seconds until an Envoy has its configuration
_POLL = 0.05

_PLAIN, _MODULE, _AGAIN = "plain", "with module", "plain again"
_FILTERS = {_PLAIN: "none", _MODULE: "module", _AGAIN: "none"}  # as `GET /v1/envoys` has them


@dataclass(frozen=True, slots=True)
class _Workload:
    """A script of sysbench, and the most percent that the module may add to it."""

    name: str
    script: tuple[str, ...]
    target: float


_WORKLOADS = (
    _Workload("point select", ("oltp_point_select", "--db-ps-mode=disable"), 3.0),
    _Workload(
        "10,000-row range",
        (
            "oltp_read_only",
            "--db-ps-mode=disable",
            "--skip-trx=on",
            "--point-selects=0",
            "--simple-ranges=1",
            "--sum-ranges=0",
            "--order-ranges=0",
            "--distinct-ranges=0",
            "--range-size=10000",
            # Ranges begin around the middle of the table, so that none is cut off by its end.
            "--rand-type=gaussian",
        ),
        10.0,
    ),
)


@dataclass(frozen=True, slots=True)
class _Proxy:
    """A running Envoy, and where clients reach it."""

    pid: int
    port: int


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
        proxies = {
            name: await stack.enter_async_context(
                _proxy(directory / name.replace(" ", "-"), filter_name, module, ports, mariadb.port)
            )
            for name, filter_name in _FILTERS.items()
        }
        figures, resting = [], []
        for workload in _WORKLOADS:
            runs = await _rounds(sysbench, proxies, workload, seconds)
            figures += _figures(workload, runs)
            resting += [run for each in runs.values() for run in each]
    return figures + _at_rest(resting)


@asynccontextmanager
async def _proxy(
    directory: Path, filter_name: str, module: Path, ports: Ports, node: int
) -> AsyncIterator[_Proxy]:
    """An Envoy with a control plane of its own, in front of the server at port `node`."""
    port = ports.take()
    control_plane = ControlPlane(directory, _settings(directory, ports, node, port))
    bootstrap = render(
        control_plane.parsed(),
        control_planes=[control_plane.parsed().xds.listen],
        node_id="measured",
        admin="127.0.0.1:0",
        module=str(module) if filter_name == "module" else None,
    )
    async with control_plane, EnvoyProcess(bootstrap, directory) as envoy:
        async with asyncio.timeout(_PATIENCE):
            while not (await _runs(control_plane, filter_name) and await greets(port)):  # noqa: ASYNC110 - the other processes tell us nothing by themselves
                await asyncio.sleep(_POLL)
        yield _Proxy(envoy.process.pid, port)


def _settings(directory: Path, ports: Ports, node: int, listen: int) -> dict[str, Any]:
    return {
        "nodes": [{"address": f"127.0.0.1:{node}"}],
        "health": {"status": {"enabled": False}, "sql": {"enabled": False}},
        "sql": {"listen": f"127.0.0.1:{listen}"},
        "xds": {"listen": f"127.0.0.1:{ports.take()}"},
        "api": {"listen": f"127.0.0.1:{ports.take()}"},
        "state_dir": str(directory / "state"),
    }


async def _runs(control_plane: ControlPlane, filter_name: str) -> bool:
    """Whether its Envoy runs what is published, with the filter that is to be measured."""
    async with httpx2.AsyncClient(base_url=control_plane.api, trust_env=False) as api:
        envoys = (await api.get("/v1/envoys")).raise_for_status().json()["envoys"]
    return any(
        envoy["filter"] == filter_name and envoy["acked_version"] == envoy["published_version"] != ""
        for envoy in envoys
    )


async def _rounds(
    sysbench: Sysbench, proxies: Mapping[str, _Proxy], workload: _Workload, seconds: int
) -> dict[str, list[_Run]]:
    """The runs of all rounds but those to warm up, by proxy."""
    runs: dict[str, list[_Run]] = {name: [] for name in proxies}
    for number in range(_WARM_UP + _ROUNDS):
        for name in rotated(list(proxies), number):
            runs[name].append(await _run(sysbench, proxies, name, workload, seconds))
    return {name: each[_WARM_UP:] for name, each in runs.items()}


async def _run(
    sysbench: Sysbench, proxies: Mapping[str, _Proxy], name: str, workload: _Workload, seconds: int
) -> _Run:
    pid = proxies[name].pid
    split = user_and_system(pid)
    before = {each: on_cpu_seconds(proxy.pid) for each, proxy in proxies.items()}
    outcome = await sysbench.run(proxies[name].port, workload.script, seconds)
    used = {each: on_cpu_seconds(proxy.pid) - before[each] for each, proxy in proxies.items()}
    user, system = (after - start for after, start in zip(user_and_system(pid), split, strict=True))
    took = outcome.queries / outcome.per_second
    resting = {each: cpu / took for each, cpu in used.items() if each != name}
    return _Run(outcome, used[name], user, system, resting)


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
