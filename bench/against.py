"""What this build of the module costs against another one while no session moves."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.builds import Build, envoy_of, revision
from bench.costs import Proxy, Usage
from bench.load_client import NAME, LoadClient
from bench.paired import added, rotated
from bench.peers import Site
from bench.report import Figure, Spread
from bench.servers import make_certificate
from bench.sysbench import POINT_SELECT, Outcome, Sysbench, simple_range
from bench.workloads import ROWS, Load, Stage
from controlplane.publish import module_file
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.process import ProcessFailed, ProgramMissing

METHOD = (
    "Real Envoys with one worker each, in front of one MariaDB: one with this build of the module, one with"
    " the other, one with the other again (A/A). Each runs what a control plane publishes to it with default"
    " settings; with --rev, that of the revision does for the other. One of them works at a time; a round has"
    " a run of each, in an order that rotates, and one round is to warm up. Loads: sysbench point selects,"
    " and ranges of 100 rows, in the text protocol with 16 clients; 300 new connections a second, each with a"
    " login and one statement. CPU is the time that all threads of the Envoy were on one"
    " (`/proc/PID/task/*/schedstat`) per query, or per connection. Shown is the median of the quotients"
    " within a round; the target is the greatest difference, in any round, of the A/A pair: what chance does."
)
SECONDS = 6
ROUNDS = 7
_WARM_UP = 1
_CLIENTS = 16
_RATE = 300.0

_THIS, _OTHER, _AGAIN = "this", "other", "other again"


@dataclass(frozen=True, slots=True)
class _Churn:
    """New connections, as a load whose queries are connections."""

    client: LoadClient

    async def run(self, port: int, seconds: float) -> Outcome:
        """Let them come. ProcessFailed, be it one that fails; TimeoutError."""
        found = await self.client.churn(port, seconds, rate=_RATE)
        if found.errors:
            raise ProcessFailed(NAME, f"met {found.errors} errors", found.told)
        figures = found.figures
        return Outcome(int(figures["done"]), float(figures["per_second"]), float(figures["p95_ms"]))


@dataclass(frozen=True, slots=True)
class Run:
    """Of one run: CPU per query in microseconds, and the 95th percentile in milliseconds."""

    cpu: float
    p95: float


Runs = Mapping[str, Sequence[Run]]


async def measure(
    module: Path | None = None, rev: str | None = None, rounds: int = ROUNDS, seconds: int = SECONDS
) -> list[Figure]:
    """Against the build in the file `module` (absolute), or that of revision `rev`: about nine minutes.

    ValueError unless one of them is given. Errors as those of `bench.builds.revision` and `envoy_of`.
    """
    if (module is None) == (rev is None):
        raise ValueError("name the other build, by its file or by its revision")
    ours = module_file.find()
    if ours is None:
        raise ProgramMissing("Tidevoy's module for Envoy", "make bench, which builds it")
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(Ports())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidevoy-bench-")))
        other = await stack.enter_async_context(_other(module, rev, directory))
        client = await LoadClient.ready(directory)
        mariadb = await stack.enter_async_context(MariaDb.start(directory))
        sysbench = Sysbench(directory, rows=ROWS, clients=_CLIENTS)
        await sysbench.prepare(mariadb.port)
        certificate = make_certificate(directory)
        proxies = {}
        for name, build in {_THIS: Build(ours), _OTHER: other, _AGAIN: other}.items():
            site = Site(directory / name.replace(" ", "-"), ports, [mariadb.port], certificate, Stage())
            proxies[name] = await stack.enter_async_context(envoy_of(build)(site))
        loads: Mapping[str, Load] = {
            "point select": sysbench.load(*POINT_SELECT),
            "100 rows": sysbench.load(*simple_range(100)),
            f"{_RATE:.0f} new connections/s": _Churn(client),
        }
        figures = []
        for name, load in loads.items():
            figures += compared(name, await _rounds(proxies, load, rounds, seconds))
    return figures


@asynccontextmanager
async def _other(module: Path | None, rev: str | None, directory: Path) -> AsyncIterator[Build]:
    if module is not None:
        yield Build(module)
        return
    assert rev is not None
    async with revision(rev, directory) as build:
        yield build


async def _rounds(
    proxies: Mapping[str, Proxy], load: Load, rounds: int, seconds: float
) -> dict[str, list[Run]]:
    """The runs of all rounds but those to warm up, by proxy."""
    runs: dict[str, list[Run]] = {name: [] for name in proxies}
    for number in range(_WARM_UP + rounds):
        for name in rotated(list(proxies), number):
            before = Usage.of(proxies[name].processes())
            outcome = await load.run(proxies[name].port, seconds)
            used = Usage.of(proxies[name].processes()).since(before)
            runs[name].append(Run(used.on_cpu / outcome.queries * 1e6, outcome.p95))
    return {name: each[_WARM_UP:] for name, each in runs.items()}


def compared(load: str, runs: Runs) -> list[Figure]:
    """How many percent this build has more than the other, and the same for the A/A pair."""
    per = "connection" if "connections" in load else "query"
    figures: list[Figure] = []
    for what, unit, pick in ((f"CPU per {per}", "µs", _cpu), ("95th percentile", "ms", _p95)):
        values = {name: [pick(run) for run in each] for name, each in runs.items()}
        difference = Spread.of(added(values[_THIS], values[_OTHER]))
        chance = Spread.of(added(values[_AGAIN], values[_OTHER]))
        beyond = max(abs(chance.low), abs(chance.high))
        note = (
            f"{verdict(difference.median, beyond)}: A/A {chance.low:+.1f} to {chance.high:+.1f} %; this"
            f" {median(values[_THIS]):.4g} {unit}, the other {median(values[_OTHER]):.4g} {unit}"
        )
        name = f"{load}: {what} against the other build"
        figures += [
            Figure(name, difference.median, "%", beyond, difference, note),
            Figure(f"{name}, A/A", chance.median, "%", None, chance),
        ]
    return figures


def verdict(difference: float, beyond: float) -> str:
    """In words. `beyond`: what equal things differ by at most; percent."""
    if abs(difference) <= beyond:
        return "no difference beyond chance"
    return "costs more" if difference > 0 else "costs less"


def _cpu(run: Run) -> float:
    return run.cpu


def _p95(run: Run) -> float:
    return run.p95
