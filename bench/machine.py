"""The machine of a measurement, its load from other programs, and the resource usage of processes."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import subprocess
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import psutil

from controlplane.errors import TidevoyError
from sandbox.child_process import find_program
from sandbox.envoy import envoy_binary
from sandbox.etcd import PACKAGE

_PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_VERSION_PATTERN = re.compile(r"\d+\.\d+\.\d+")
_CPUCLOCK_SCHED = 2  # CPUCLOCK_SCHED of the kernel
_IDLE_COLUMN, _IOWAIT_COLUMN = 3, 4  # columns of the first line of /proc/stat (proc(5))


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and software that figures depend on besides the code."""

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
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
        return cls(
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            memory_mib=memory,
            kernel=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            envoy=version_of(str(envoy_binary())),
            etcd=version_of(find_program("etcd", PACKAGE)),
        )

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MachineCondition:
    """The time of a measurement, and the load from other programs at that time.

    `others_busy` is the share of all cores, from 0 to 1, that was busy in the second before.
    """

    MAX_OTHERS_BUSY: ClassVar[float] = 0.10  # above this share, figures get a warning

    at: str
    load_average: float
    others_busy: float

    @classmethod
    async def now(cls) -> MachineCondition:
        """Observe the machine for a second."""
        busy, total = _cpu_times()
        await asyncio.sleep(1.0)
        later_busy, later_total = _cpu_times()
        share = (later_busy - busy) / max(1, later_total - total)
        at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        return cls(at, os.getloadavg()[0], share)

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU seconds: of all cores, of all that were busy, and of this benchmark's processes."""

    total: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> CpuUsage:
        """Read the CPU seconds since the machine's start, and since the start of each process."""
        current = psutil.Process()
        own = sum(cpu_seconds(process.pid) for process in (current, *current.children(recursive=True)))
        busy, total = _cpu_times()
        return cls(total / _TICKS_PER_SECOND, busy / _TICKS_PER_SECOND, own)

    def since(self, before: CpuUsage) -> CpuUsage:
        """Return the CPU seconds used since `before`. The benchmark's processes must be the same."""
        return CpuUsage(self.total - before.total, self.busy - before.busy, self.own - before.own)

    @property
    def others_share(self) -> float:
        """The share of the machine, from 0 to 1, that other programs or its host used."""
        return max(0.0, self.busy - self.own) / self.total


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its threads so far, from the kernel's scheduler, in nanosecond
    resolution.

    Returns 0 if it has exited. Each process has such a clock, see clock_getcpuclockid(3).
    """
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def cpu_wait_seconds(pid: int) -> float:
    """Return how long a process's main thread has waited for a CPU so far (second field of `schedstat`)."""
    return int((_PROC / str(pid) / "schedstat").read_text().split()[1]) / 1e9


def processes_of_session(leader: int) -> list[int]:
    """Return the live processes of the session led by process `leader`, including itself."""
    return [
        int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and _in_session(entry, leader)
    ]


def _in_session(process: Path, leader: int) -> bool:
    try:
        return int(_stat_fields(process)[3]) == leader
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has exited meanwhile


def peak_memory_mib(pid: int) -> float:
    """Return the peak resident memory of a process since its start or `reset_peak_memory`, in MiB."""
    return _status_kib(pid, "VmHWM") / 1024


def reset_peak_memory(pid: int) -> None:
    """Reset `peak_memory_mib` (proc(5), clear_refs). Raises PermissionError for another user's process."""
    (_PROC / str(pid) / "clear_refs").write_text("5")


def memory_mib(pid: int) -> float:
    """Return the current resident memory of a process, in MiB."""
    return _status_kib(pid, "VmRSS") / 1024


def _stat_fields(process: Path) -> list[str]:
    # The name in brackets may contain spaces, so fields are counted after it (proc(5)).
    return (process / "stat").read_text().rpartition(")")[2].split()


def _status_kib(pid: int, key: str) -> int:
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    raise ValueError(f"process {pid} has no {key}: it has exited")


def _cpu_times() -> tuple[int, int]:
    """Return the ticks of all cores since the machine's start: busy ones and all."""
    columns = [int(field) for field in (_PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    return sum(columns) - columns[_IDLE_COLUMN] - columns[_IOWAIT_COLUMN], sum(columns)


def _cpu_model() -> str:
    for line in (_PROC / "cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


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
