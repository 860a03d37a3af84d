"""The machine that a figure belongs to, how busy it was with other things, and what a process costs."""

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
    """What figures depend on beside the code."""

    cpu: str
    cores: int
    memory_mib: int
    kernel: str
    python: str
    envoy: str
    etcd: str

    @classmethod
    def here(cls) -> Machine:
        """This machine. ProgramMissing when Envoy or etcd is not installed."""
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
    """When something was measured, and what else the machine did then.

    `others_busy` is the share of all cores, from 0 to 1, that was not idle in the second before.
    """

    MAX_OTHERS_BUSY: ClassVar[float] = 0.10  # above this share figures are marked

    at: str
    load_average: float
    others_busy: float

    @classmethod
    async def now(cls) -> MachineCondition:
        """Look at the machine for a second."""
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
        """Since the machine's start, for processes since theirs."""
        this = psutil.Process()
        own = sum(cpu_seconds(process.pid) for process in (this, *this.children(recursive=True)))
        busy, total = _cpu_times()
        return cls(total / _TICKS_PER_SECOND, busy / _TICKS_PER_SECOND, own)

    def since(self, before: CpuUsage) -> CpuUsage:
        """What was used in between, while the benchmark's processes stayed the same."""
        return CpuUsage(self.total - before.total, self.busy - before.busy, self.own - before.own)

    @property
    def others_share(self) -> float:
        """The share of the machine, from 0 to 1, that other programs used, or that its host took away."""
        return max(0.0, self.busy - self.own) / self.total


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all its threads so far, from the kernel's scheduler, to the nanosecond.

    0 when it has ended. Each process has such a clock, see clock_getcpuclockid(3).
    """
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def cpu_wait_seconds(pid: int) -> float:
    """Time that the main thread of a process has waited for a CPU so far (second field of `schedstat`)."""
    return int((_PROC / str(pid) / "schedstat").read_text().split()[1]) / 1e9


def processes_of_session(leader: int) -> list[int]:
    """The processes of the session that process `leader` leads, itself included, while they live."""
    return [
        int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and _in_session(entry, leader)
    ]


def _in_session(process: Path, leader: int) -> bool:
    try:
        return int(_stat_fields(process)[3]) == leader
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended meanwhile


def peak_memory_mib(pid: int) -> float:
    """The most resident memory that a process has had since its start or `forget_peak_memory`, in MiB."""
    return _status_kib(pid, "VmHWM") / 1024


def reset_peak_memory(pid: int) -> None:
    """Let `peak_memory_mib` begin anew (proc(5), clear_refs). PermissionError for another user's process."""
    (_PROC / str(pid) / "clear_refs").write_text("5")


def memory_mib(pid: int) -> float:
    """The resident memory of a process now, in MiB."""
    return _status_kib(pid, "VmRSS") / 1024


def _stat_fields(process: Path) -> list[str]:
    # The name, in brackets, may hold spaces: fields are counted from behind it (proc(5)).
    return (process / "stat").read_text().rpartition(")")[2].split()


def _status_kib(pid: int, key: str) -> int:
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    raise ValueError(f"process {pid} has no {key}: it has ended")


def _cpu_times() -> tuple[int, int]:
    """Ticks of all cores since start: busy, and in total."""
    columns = [int(field) for field in (_PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    return sum(columns) - columns[_IDLE_COLUMN] - columns[_IOWAIT_COLUMN], sum(columns)


def _cpu_model() -> str:
    for line in (_PROC / "cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def version_of(program: str, option: str = "--version") -> str:
    """The first three numbers with dots between them that a program tells about itself."""
    shown = subprocess.run([program, option], capture_output=True, text=True, check=True, timeout=10)
    found = _VERSION_PATTERN.search(shown.stdout)
    return found[0] if found else "of unknown version"


class MachineBusy(TidevoyError):
    """Something else used the machine while it was measured."""

    def __init__(self, share: float) -> None:
        super().__init__(
            f"the results are not kept: other programs used {share:.0%} of the machine; end them first"
        )
