"""What clients do while proxies are measured side by side: a table of workloads.

A further kind of load is a class with `run` as in `Load`, and a line in `WORKLOADS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bench.loads import Idle, WithNewConnections, over_tls
from bench.sysbench import DATABASE, POINT_SELECT, Outcome, Sysbench, SysbenchLoad, simple_range
from bench.targets import Target

ROWS = 100_000  # of the table that all workloads use
_RATE = 6_000  # queries a second of the load that does not depend on how fast it is answered
_CLIENTS = 16
_RANGE_CLIENTS = 4


class Load(Protocol):
    """Clients that work for a while and say what they did."""

    async def run(self, port: int, seconds: float) -> Outcome:
        """Let them work through 127.0.0.1:`port`; returns when all have left. ProcessFailed, TimeoutError."""


class Beside(Protocol):
    """What is there beside a load, and is not measured when it comes and goes."""

    def held(self, port: int) -> AbstractAsyncContextManager[None]:
        """It is there inside the block. ProcessFailed, TimeoutError."""


# What Tidevoy is to reach: no more CPU than HAProxy, and no slower answers.
AS_CHEAP = (Target("Tidevoy", "cpu_us", 1.00), Target("Tidevoy", "p95_ms", 1.05))
_NEARLY_AS_CHEAP = (Target("Tidevoy", "cpu_us", 1.05), Target("Tidevoy", "p95_ms", 1.05))
# Of 1,000 bytes, and what may be lost of the load since something is beside it.
_IDLE = (
    Target("Tidevoy", "connection_kb", 25, alone=True),
    Target("Tidevoy", "kept", 0.98, least=True, alone=True),
)
_BUSY = (Target("Tidevoy", "qps", 0.97, least=True),)


@dataclass(frozen=True, slots=True)
class Stage:
    """How proxies are set up: one start of all peers serves all workloads of a stage.

    `connections`: how many are open at once, when a proxy must be told so. `tls`: TLS of clients ends in the
    proxies that can do that (see `Proxy.tls_first`); others pass it on.
    """

    workers: int = 1
    connections: int = 0
    tls: bool = False


@dataclass(frozen=True, slots=True)
class Clients:
    """What a load is made of: a directory for logs and files, and whether TLS, if any, comes before MySQL.

    `program`: our load client; None when it was not built.
    """

    directory: Path
    tls_first: bool = False
    program: Path | None = None

    @property
    def ours(self) -> Path:
        """Our load client, for a workload that is `built`."""
        if self.program is None:
            raise RuntimeError("the load client was not built")
        return self.program


@dataclass(frozen=True, slots=True)
class Workload:
    """One table. `method`: one sentence. `built`: its clients are our own program, which has to be built.

    `make_beside`: what is there beside its load. `make_without`: the load when nothing is beside it; then
    each round has a run of that too, next to the other.
    """

    name: str
    method: str
    threads: int
    make: Callable[[Clients], Load]
    stage: Stage = field(default_factory=Stage)
    targets: Sequence[Target] = ()
    built: bool = False
    make_beside: Callable[[Clients], Beside] | None = None
    make_without: Callable[[Clients], Load] | None = None

    def load(self, directory: Path, *, tls_first: bool = False, program: Path | None = None) -> Load:
        """Its clients, with a directory for their files; `tls_first` as in `bench.costs.Proxy`."""
        return self.make(Clients(directory, tls_first, program))

    def without(self, directory: Path) -> Load | None:
        """Its clients when nothing is beside them, where that is of interest."""
        return self.make_without(Clients(directory)) if self.make_without is not None else None

    def beside(self, port: int, directory: Path, program: Path | None) -> AbstractAsyncContextManager[None]:
        """Hold what is there beside its load, if anything."""
        if self.make_beside is None:
            return nullcontext()
        return self.make_beside(Clients(directory, program=program)).held(port)

    @property
    def title(self) -> str:
        """Which table it is."""
        workers = "1 worker" if self.stage.workers == 1 else f"{self.stage.workers} workers"
        return f"{self.name}, {self.threads} clients, {workers}"


def _sysbench(threads: int, *script: str) -> Callable[[Clients], SysbenchLoad]:
    return lambda clients: Sysbench(clients.directory, rows=ROWS, clients=threads).load(*script)


def _point_select(threads: int, workers: int = 1) -> Workload:
    return Workload(
        "point select, text",
        "sysbench oltp_point_select in the text protocol: one row by its key, one query after the other.",
        threads,
        _sysbench(threads, *POINT_SELECT),
        Stage(workers),
        AS_CHEAP if workers == 1 else (),
    )


def _range(rows: int) -> Workload:
    return Workload(
        f"result of {rows:,} rows",
        f"sysbench oltp_read_only reduced to its simple range of {rows:,} rows, in the text protocol, without"
        " transactions.",
        _RANGE_CLIENTS,
        _sysbench(_RANGE_CLIENTS, *simple_range(rows)),
        targets=AS_CHEAP,
    )


def _standard(name: str, script: str, event: str) -> Workload:
    return Workload(
        name,
        f"sysbench {script} as it comes, with prepared statements; the 95th percentile is that of {event}.",
        _CLIENTS,
        _sysbench(_CLIENTS, script),
    )


def _beside_idle(connections: int) -> Workload:
    alone = _sysbench(_CLIENTS, *POINT_SELECT)
    return Workload(
        f"point select beside {connections:,} idle connections",
        f"sysbench oltp_point_select in the text protocol, while {connections:,} other connections are logged"
        " in and do nothing; how they come and go is not measured. Next to each run is one without them.",
        _CLIENTS,
        alone,
        Stage(connections=connections),
        _IDLE,
        built=True,
        make_beside=lambda clients: Idle(clients.ours, connections),
        make_without=alone,
    )


def _beside_new(rate: int) -> Workload:
    alone = _sysbench(_CLIENTS, *POINT_SELECT)
    return Workload(
        f"point select beside {rate} new connections/s",
        "sysbench oltp_point_select in the text protocol, as fast as answers come, and beside it"
        f" {rate} new connections a second, each with a login and one statement; the figures are per query of"
        " sysbench's, and hold what the connections cost. Next to each run is one without them.",
        _CLIENTS,
        lambda clients: WithNewConnections(clients.ours, rate, alone(clients)),
        targets=_BUSY,
        built=True,
        make_without=alone,
    )


_TLS = Workload(
    "point select, TLS to clients",
    "One row by its key, in the text protocol and TLS; Tidevoy ends TLS as MySQL has it, HAProxy ends TLS"
    " that begins with the first byte since it does not know MySQL's handshake, and Envoy passes TLS on.",
    _CLIENTS,
    lambda clients: over_tls(
        clients.ours,
        first=clients.tls_first,
        connections=_CLIENTS,
        statement=f"SELECT c FROM {DATABASE}.sbtest1 WHERE id = {ROWS // 2}",
    ),
    Stage(tls=True),
    _NEARLY_AS_CHEAP,
    built=True,
)

# Those that write come last in their stage, so that the others find the table as it was made.
WORKLOADS: tuple[Workload, ...] = (
    *(_point_select(threads) for threads in (4, 16, 64)),
    _standard("point select, prepared", "oltp_point_select", "one query"),
    Workload(
        "point select, fixed rate",
        f"sysbench oltp_point_select in the text protocol, {_RATE:,} times a second however fast answers"
        " come; the 95th percentile includes the wait for a free client.",
        _CLIENTS,
        _sysbench(_CLIENTS, *POINT_SELECT, f"--rate={_RATE}"),
        targets=AS_CHEAP,
    ),
    *(_range(rows) for rows in (10, 100, 1_000, 10_000)),
    *(_beside_new(rate) for rate in (100, 200, 300)),
    _standard("read only", "oltp_read_only", "a transaction of 16 queries"),
    _standard("update index", "oltp_update_index", "one query"),
    _standard("update non-index", "oltp_update_non_index", "one query"),
    _standard("write only", "oltp_write_only", "a transaction of 6 queries"),
    _standard("read write", "oltp_read_write", "a transaction of 20 queries"),
    _beside_idle(5_000),
    _TLS,
    *(_point_select(threads, workers=2) for threads in (16, 64)),
)


def chosen(only: Sequence[str], workers: Sequence[int]) -> list[Workload]:
    """The workloads in whose names one of `only` stands, with so many workers; all without any.

    In our order, those of one stage together.
    """
    wanted = [
        workload
        for workload in WORKLOADS
        if (not only or any(part.lower() in workload.name.lower() for part in only))
        and (not workers or workload.stage.workers in workers)
    ]
    stages = list(dict.fromkeys(workload.stage for workload in wanted))
    return sorted(wanted, key=lambda workload: stages.index(workload.stage))
