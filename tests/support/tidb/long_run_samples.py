"""Samples of a long run: what Envoy and the control plane use, in memory and in a CSV file."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from operator import itemgetter
from pathlib import Path

import httpx2
import psutil

from controlplane.aio import wait_at_most
from sandbox.child_process import ChildProcess
from sandbox.local_cluster import LocalCluster
from sandbox.server import http_client
from tests.support.tidb.long_run import Load
from tests.support.tidb.long_run_operations import FinishedOperation, Operations

ENVOY, CONTROL_PLANE = "envoy", "control_plane"
_CLIENT_SESSIONS = re.compile(r'^envoy_listener_downstream_cx_active\{.*"\} (\d+)$', re.MULTILINE)


_NODE = re.compile(r'node="[^"]*"')
_ALLOCATED = re.compile(r"^envoy_server_memory_allocated\{\} (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """One sample. Fields with the name of a process are None while it restarts.

    `operation` runs at this time; empty: none. `life`: how often the control plane had started. `..._memory`:
    resident bytes. `envoy_allocated`: bytes that Envoy and its module have allocated. `..._series`: number of
    Prometheus series, without `envoy_removed_series`: an Envoy keeps series about removed servers until it
    ends. `..._log`: size of the log file. `state`: bytes in the control plane's state directory.
    """

    seconds: float
    operation: str
    operations: int
    statements: int
    short_sessions: int
    errors: int
    life: int
    envoy_sessions: int | None
    envoy_memory: int | None
    envoy_allocated: int | None
    envoy_descriptors: int | None
    envoy_threads: int | None
    envoy_series: int | None
    envoy_removed_series: int | None
    envoy_log: int
    control_plane_memory: int | None
    control_plane_descriptors: int | None
    control_plane_threads: int | None
    control_plane_series: int | None
    control_plane_log: int
    state: int


class Sampler:
    """Takes samples into `samples` and `samples.csv`, and writes the operations to `operations.csv`.

    `first_seen` is when each series first appeared, and `last_series` those of the last sample, by process.
    """

    def __init__(
        self, stack: LocalCluster, load: Load, operations: Operations, directory: Path, interval: float
    ) -> None:
        self.samples: list[Sample] = []
        self.first_seen: dict[str, dict[str, float]] = {ENVOY: {}, CONTROL_PLANE: {}}
        self.last_series = {ENVOY: frozenset[str](), CONTROL_PLANE: frozenset[str]()}
        self._stack, self._load, self._operations = stack, load, operations
        self._directory, self._interval = directory, interval
        self._pids: list[int] = []

    async def run(self) -> None:
        """Take samples at equal intervals until the end of the load."""
        with (self._directory / "samples.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Sample)])
            writer.writeheader()
            while not self._load.stopping.is_set():
                due_at = (len(self.samples) + 1) * self._interval
                sample = await self.take()
                self.samples.append(sample)
                writer.writerow(asdict(sample))
                file.flush()
                write_operations(self._directory, self._operations.finished)
                await wait_at_most(self._load.stopping, due_at - self._operations.elapsed)

    def removed_series(self, process: str) -> list[str]:
        """Return the series of the last sample that are about removed servers."""
        labels = {f'node="{address}"' for address in self._operations.removed_addresses}
        return [name for name in self.last_series[process] if labels & set(_NODE.findall(name))]

    async def take(self) -> Sample:
        """Take one sample, without keeping it."""
        stack, operations = self._stack, self._operations
        seconds, operation = operations.elapsed, operations.current
        # The processes are measured first, because the requests below open connections to them.
        envoy, control_plane = _usage(stack.envoy.process), _usage(stack.control_plane.process)
        pid = stack.control_plane.process.pid
        if pid not in self._pids:
            self._pids.append(pid)
        envoy_page = await _fetch(stack.envoy.admin_url, "/stats/prometheus")
        control_plane_page = await _fetch(stack.control_plane.api_url, "/metrics")
        envoy_series = self._count_series(ENVOY, envoy_page, seconds)
        removed_series = len(self.removed_series(ENVOY))
        return Sample(
            seconds=round(seconds, 2),
            operation=operation,
            operations=len(operations.finished),
            statements=self._load.statements,
            short_sessions=self._load.short_sessions,
            errors=len(self._load.errors),
            life=len(self._pids),
            envoy_sessions=sum(map(int, _CLIENT_SESSIONS.findall(envoy_page))) if envoy_page else None,
            envoy_memory=envoy[0],
            envoy_allocated=sum(map(int, _ALLOCATED.findall(envoy_page))) or None,
            envoy_descriptors=envoy[1],
            envoy_threads=envoy[2],
            envoy_series=None if envoy_series is None else envoy_series - removed_series,
            envoy_removed_series=None if envoy_series is None else removed_series,
            envoy_log=stack.envoy.process.log.stat().st_size,
            control_plane_memory=control_plane[0],
            control_plane_descriptors=control_plane[1],
            control_plane_threads=control_plane[2],
            control_plane_series=self._count_series(CONTROL_PLANE, control_plane_page, seconds),
            control_plane_log=stack.control_plane.process.log.stat().st_size,
            state=sum(_file_sizes(stack.control_plane.parsed_settings().state_dir)),
        )

    def _count_series(self, process: str, page: str, seconds: float) -> int | None:
        names = frozenset(
            line.rpartition(" ")[0] for line in page.splitlines() if line and not line.startswith("#")
        )
        if not names:
            return None
        for name in names:
            self.first_seen[process].setdefault(name, seconds)
        self.last_series[process] = names
        return len(names)


def write_series(directory: Path, sampler: Sampler) -> None:
    """Write to `series.csv` when each series first appeared, and whether it exists in the last sample."""
    with (directory / "series.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("process", "first_seen", "in_last_sample", "series"))
        for process, first_seen in sampler.first_seen.items():
            for name, seconds in sorted(first_seen.items(), key=itemgetter(1)):
                writer.writerow((process, f"{seconds:.0f}", name in sampler.last_series[process], name))


def write_operations(directory: Path, finished: list[FinishedOperation]) -> None:
    """Write all finished operations to `operations.csv`."""
    with (directory / "operations.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(FinishedOperation)])
        writer.writerows(
            (operation.name, f"{operation.started_at:.2f}", f"{operation.ended_at:.2f}")
            for operation in finished
        )


def _usage(process: ChildProcess) -> tuple[int, int, int] | tuple[None, None, None]:
    """Return resident bytes, open descriptors and threads. None if the process has ended."""
    try:
        measured = psutil.Process(process.pid)
        with measured.oneshot():
            return measured.memory_info().rss, measured.num_fds(), measured.num_threads()
    except psutil.Error:
        return None, None, None


async def _fetch(url: str, path: str) -> str:
    """Get a page over a new connection. Empty if the process does not serve."""
    try:
        async with http_client(url) as client:
            return (await client.get(path)).raise_for_status().text
    except httpx2.HTTPError:
        return ""


def _file_sizes(directory: Path) -> Iterator[int]:
    for file in directory.rglob("*"):
        try:
            if file.is_file():
                yield file.stat().st_size
        except FileNotFoundError:  # a temporary file
            continue
