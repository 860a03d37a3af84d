"""What a process holds: memory, open files, and what its epoll descriptors watch."""

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
    """At one moment. `watched`: entries of all epoll descriptors (proc(5), `tfd` in /proc/PID/fdinfo)."""

    memory_mib: float
    open_files: int
    epoll_entries: int

    @classmethod
    def of_process(cls, pid: int) -> Self:
        """What this process holds now."""
        files = watched = 0
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed just now
                if str(file.readlink()) == _EPOLL_LINK:
                    watched += count_epoll_entries(Path(f"/proc/{pid}/fdinfo/{file.name}").read_text())
                files += 1
        return cls(memory_mib(pid), files, watched)


def count_epoll_entries(information: str) -> int:
    """The entries of an epoll descriptor, from its fdinfo."""
    return sum(line.startswith(_EPOLL_ENTRY_PREFIX) for line in information.splitlines())


def raise_file_limit() -> int:
    """How many files a child of ours may open: all that the hard limit allows, from now on also for us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
