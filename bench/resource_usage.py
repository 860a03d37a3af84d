"""What a process holds: memory, open files, and what its epoll descriptors watch."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench.machine import memory_mib

_EPOLL = "anon_inode:[eventpoll]"
_WATCHED = "tfd:"


@dataclass(frozen=True, slots=True)
class Held:
    """At one moment. `watched`: entries of all epoll descriptors (proc(5), `tfd` in /proc/PID/fdinfo)."""

    memory_mib: float
    files: int
    watched: int

    @classmethod
    def by(cls, pid: int) -> Self:
        """What this process holds now."""
        files = watched = 0
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed just now
                if str(file.readlink()) == _EPOLL:
                    watched += watching(Path(f"/proc/{pid}/fdinfo/{file.name}").read_text())
                files += 1
        return cls(memory_mib(pid), files, watched)


def watching(information: str) -> int:
    """The entries of an epoll descriptor, from its fdinfo."""
    return sum(line.startswith(_WATCHED) for line in information.splitlines())


def most_files() -> int:
    """How many files a child of ours may open: all that the hard limit allows, from now on also for us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
