"""The machine of a measurement, its load from other programs, and the resource usage of processes."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import resource
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import psutil

from controlplane.errors import TidevoyError
from sandbox.child_process import find_program
from sandbox.envoy import envoy_binary
from sandbox.etcd import PACKAGE

_PROC = Path("/proc")
_VERSION_PATTERN = re.compile(r"\d+\.\d+\.\d+")
_CPUCLOCK_SCHED = 2  # CPUCLOCK_SCHED of the kernel
_EPOLL_LINK = "anon_inode:[eventpoll]"


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and software that the figures depend on, apart from Tidevoy."""

    cpu: str
    cores: int
    memory_mib: int
    kernel: str
    python: str
    envoy: str
    etcd: str

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine. Raises ProgramMissing if Envoy or etcd is not installed."""
        return cls(
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            memory_mib=psutil.virtual_memory().total // 2**20,
            kernel=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            envoy=version_of(str(envoy_binary())),
            etcd=version_of(find_program("etcd", PACKAGE)),
        )


@dataclass(frozen=True, slots=True)
class MachineCondition:
    """The time of a measurement, and the load from other programs just before it.

    `others_busy`: fraction of the CPU time of all cores that was used in the second before, from 0 to 1.
    """

    MAX_OTHERS_BUSY: ClassVar[float] = 0.10  # above it, figures get a warning

    at: str
    load_average: float
    others_busy: float

    @classmethod
    async def now(cls) -> MachineCondition:
        """Observe the machine for a second."""
        before = CpuUsage.now()
        await asyncio.sleep(1.0)
        usage = CpuUsage.now().since(before)
        at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        return cls(at, os.getloadavg()[0], usage.busy / usage.total)


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU seconds: `total`: of all cores; `busy`: the part that was not idle; `own`: of this benchmark."""

    total: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> CpuUsage:
        """Read the CPU seconds of the machine since its boot, and of the processes since their start."""
        current = psutil.Process()
        own = sum(cpu_seconds(process.pid) for process in (current, *current.children(recursive=True)))
        # The user time includes the time of guests, which must not count twice.
        times = psutil.cpu_times()._replace(guest=0.0, guest_nice=0.0)
        return cls(sum(times), sum(times) - times.idle - times.iowait, own)

    def since(self, before: CpuUsage) -> CpuUsage:
        """Return the CPU seconds since `before`. The benchmark's processes must be the same as then."""
        return CpuUsage(self.total - before.total, self.busy - before.busy, self.own - before.own)

    @property
    def others_share(self) -> float:
        """The fraction of the machine's CPU, from 0 to 1, that other programs or the host used."""
        return max(0.0, self.busy - self.own) / self.total


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all its threads, in nanosecond resolution; 0 if it has exited.

    The time is from the kernel's CPU clock of the process, see clock_getcpuclockid(3).
    """
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def cpu_wait_seconds(pid: int) -> float:
    """Return how long the main thread of a process has waited for a CPU (second field of `schedstat`)."""
    return int((_PROC / str(pid) / "schedstat").read_text().split()[1]) / 1e9


def processes_of_session(leader: int) -> list[int]:
    """Return the live processes of the session whose leader is process `leader`, including the leader."""
    return [pid for pid in psutil.pids() if _session(pid) == leader]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None  # the process has exited meanwhile


def memory_mib(pid: int) -> float:
    """Return the current resident memory of a process, in MiB."""
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def peak_memory_mib(pid: int) -> float:
    """Return the peak resident memory of a process since its start or `reset_peak_memory`, in MiB."""
    match = re.search(r"^VmHWM:\s+(\d+) kB", (_PROC / str(pid) / "status").read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"process {pid} has exited")
    return int(match[1]) / 1024


def reset_peak_memory(pid: int) -> None:
    """Reset the peak memory (proc(5), clear_refs). Raises PermissionError for another user's process."""
    (_PROC / str(pid) / "clear_refs").write_text("5")


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """One sample. `epoll_entries`: entries of all epoll descriptors (`tfd` lines of fdinfo, see proc(5))."""

    memory_mib: float
    open_files: int
    epoll_entries: int

    @classmethod
    def of_process(cls, pid: int) -> ResourceUsage:
        open_files = epoll_entries = 0
        for file in (_PROC / str(pid) / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if str(file.readlink()) == _EPOLL_LINK:
                    epoll_entries += count_epoll_entries((file.parents[1] / "fdinfo" / file.name).read_text())
                open_files += 1
        return cls(memory_mib(pid), open_files, epoll_entries)


def count_epoll_entries(fdinfo: str) -> int:
    """Return the number of entries of an epoll descriptor from its fdinfo."""
    return sum(line.startswith("tfd:") for line in fdinfo.splitlines())


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit and return it. Child processes inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _cpu_model() -> str:
    match = re.search(r"^model name\s*: (.*)", (_PROC / "cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def version_of(program: str, option: str = "--version") -> str:
    """Return the first version (three numbers with dots) in a program's version output."""
    result = subprocess.run([program, option], capture_output=True, text=True, check=True, timeout=10)
    match = _VERSION_PATTERN.search(result.stdout)
    return match[0] if match else "of unknown version"


class MachineBusy(TidevoyError):
    """Other programs used the machine during the measurement."""

    def __init__(self, share: float) -> None:
        super().__init__(
            f"the results are discarded: other programs used {share:.0%} of the machine; stop them first"
        )
