"""The resources that every comparison needs: a server, the load client, CPU cores, and running proxies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from bench.load_client import LoadClient, SliceRunner
from bench.proxies.backends import start_mariadb, start_tidb
from bench.proxies.contenders import Contender, ProxySite, RunningProxy
from bench.proxies.workloads import ROWS, Encryption, ProxyWorkload
from cli.output import print_note
from sandbox.ports import Ports
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_binaries import TidbBinaries

_MIN_CORES = 4


@dataclass(frozen=True, slots=True)
class CpuPinning:
    """The cores for the proxies (of which one works at a time), the load client, and the servers."""

    proxies: frozenset[int]
    clients: frozenset[int]
    servers: frozenset[int]

    @classmethod
    def of(cls, cores: Iterable[int]) -> Self:
        """Assign separate cores, or all cores to each if there are fewer than four.

        With so few cores, the kernel schedules better without pinning.
        """
        ordered = sorted(cores)
        if len(ordered) < _MIN_CORES:
            return cls(*[frozenset(ordered)] * 3)
        return cls(frozenset(ordered[-1:]), frozenset(ordered[-2:-1]), frozenset(ordered[:-2]))


@dataclass(frozen=True, slots=True)
class ProxyBenchSetup:
    """The resources of every comparison: the inputs of the proxies, the load client, and the CPU cores."""

    site: ProxySite
    client: LoadClient
    pinning: CpuPinning

    @asynccontextmanager
    async def connect(
        self, workload: ProxyWorkload, proxies: Iterable[RunningProxy]
    ) -> AsyncIterator[SliceRunner]:
        """Start one load client, pinned to its CPUs, with the workload's connections to each proxy."""
        async with self.client.slices(
            [proxy.target for proxy in proxies],
            connections=workload.clients,
            statement=workload.statement,
            max_number=workload.highest_id,
        ) as slices:
            _pin(slices.pid, self.pinning.clients)
            yield slices

    @asynccontextmanager
    async def run(
        self, contenders: Sequence[Contender], encryption: Encryption = Encryption.NONE
    ) -> AsyncIterator[dict[str, RunningProxy]]:
        """Run contenders, pinned to the cores for proxies; yield them by name."""
        async with AsyncExitStack() as stack:
            proxies = {}
            for contender in contenders:
                site = replace(self.site, encryption=encryption).for_proxy(contender.name)
                proxies[contender.name] = proxy = await stack.enter_async_context(contender.start(site))
                for pid in proxy.processes():
                    _pin(pid, self.pinning.proxies)
            yield proxies


@asynccontextmanager
async def prepare_setup(binaries: TidbBinaries | None = None) -> AsyncIterator[ProxyBenchSetup]:
    """Build the load client and run the server: MariaDB, or TiDB with `binaries`. Raises ProcessFailed."""
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as temporary_directory:
        directory = Path(temporary_directory)
        certificate = SessionCertificate.load_or_create(directory, rsa=True)
        client = await LoadClient.create(directory)
        pinning = CpuPinning.of(os.sched_getaffinity(0))
        # Pin this process and its future children, which are the servers; clients and proxies are pinned
        # later.
        os.sched_setaffinity(0, pinning.servers)
        print_note(f"starting {'MariaDB' if binaries is None else 'TiDB'} with a table of {ROWS:,} rows")
        backend = (
            start_mariadb(directory, certificate) if binaries is None else start_tidb(directory, binaries)
        )
        async with backend as server:
            yield ProxyBenchSetup(ProxySite(directory, ports, server, certificate), client, pinning)


def _pin(pid: int, cores: Iterable[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has exited
            os.sched_setaffinity(int(task.name), cores)
