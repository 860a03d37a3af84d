"""The resources of a process: memory, open files and epoll entries."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench.machine import memory_mib

_EPOLL_LINK = "anon_inode:[eventpoll]"
_EPOLL_ENTRY_PREFIX = "tfd:"


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """One sample. `epoll_entries`: of all epoll descriptors (proc(5), `tfd` in /proc/PID/fdinfo)."""

    memory_mib: float
    open_files: int
    epoll_entries: int

    @classmethod
    def of_process(cls, pid: int) -> Self:
        """Sample a process."""
        open_files = epoll_entries = 0
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if str(file.readlink()) == _EPOLL_LINK:
                    fdinfo = Path(f"/proc/{pid}/fdinfo/{file.name}").read_text()
                    epoll_entries += count_epoll_entries(fdinfo)
                open_files += 1
        return cls(memory_mib(pid), open_files, epoll_entries)


def count_epoll_entries(fdinfo: str) -> int:
    """Return the number of entries of an epoll descriptor from its fdinfo."""
    return sum(line.startswith(_EPOLL_ENTRY_PREFIX) for line in fdinfo.splitlines())


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit, which child processes inherit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
