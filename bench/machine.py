"""The machine that a figure belongs to, how busy it was with other things, and what a process costs."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from sandbox.envoy import envoy_binary
from sandbox.etcd import PACKAGE
from sandbox.process import find_program

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_IDLE, _IOWAIT = 3, 4  # columns of the first line of /proc/stat (proc(5))


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
class Condition:
    """When something was measured, and what else the machine did then.

    `others_busy` is the share of all cores, from 0 to 1, that was not idle in the second before.
    """

    QUIET: ClassVar[float] = 0.10  # above this share figures are marked

    at: str
    load_average: float
    others_busy: float

    @classmethod
    async def now(cls) -> Condition:
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


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its threads so far."""
    return sum(user_and_system(pid))


def user_and_system(pid: int) -> tuple[float, float]:
    """The same apart. The kernel finds out at ticks what runs, so short times are far from exact."""
    fields = _stat_fields(_PROC / str(pid))
    return int(fields[11]) / _TICKS, int(fields[12]) / _TICKS


def on_cpu_seconds(pid: int) -> float:
    """Time that the threads of a process, those that live, have been on a CPU: exact, to the nanosecond.

    First field of `/proc/PID/task/TID/schedstat` (Linux, Documentation/scheduler/sched-stats.rst).
    """
    nanoseconds = 0
    for task in (_PROC / str(pid) / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended just now
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def machine_cpu_seconds() -> float:
    """Time that all cores of the machine were busy since its start, with whatever; exact to some ticks."""
    return _cpu_times()[0] / _TICKS


def session_members(leader: int) -> list[int]:
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


def forget_peak_memory(pid: int) -> None:
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
    return sum(columns) - columns[_IDLE] - columns[_IOWAIT], sum(columns)


def _cpu_model() -> str:
    for line in (_PROC / "cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def version_of(program: str, option: str = "--version") -> str:
    """The first three numbers with dots between them that a program tells about itself."""
    shown = subprocess.run([program, option], capture_output=True, text=True, check=True, timeout=10)
    found = _VERSION.search(shown.stdout)
    return found[0] if found else "of unknown version"
