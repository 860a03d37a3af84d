"""Pin proxies, clients and servers to separate CPU cores if the machine has enough of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_MIN_CORES = 4


@dataclass(frozen=True, slots=True)
class CpuPinning:
    """One core for the proxies, of which one works at a time, one for the clients, the rest for servers."""

    proxy_core: int
    client_core: int
    server_cores: frozenset[int]

    @classmethod
    def of(cls, cores: Iterable[int]) -> Self | None:
        """Assign the cores; None with fewer than four: then the kernel distributes them better."""
        ordered = sorted(cores)
        if len(ordered) < _MIN_CORES:
            return None
        return cls(ordered[-1], ordered[-2], frozenset(ordered[:-2]))

    def pin_proxies(self, processes: Sequence[int]) -> None:
        """Pin all threads of these processes."""
        for pid in processes:
            _pin(pid, {self.proxy_core})

    def pin_clients(self, pid: int) -> None:
        """Pin all threads of the load client."""
        _pin(pid, {self.client_core})

    def pin_servers(self) -> None:
        """Pin this process and its future children, until they are pinned to other cores."""
        os.sched_setaffinity(0, self.server_cores)


def _pin(pid: int, cores: Iterable[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has exited
            os.sched_setaffinity(int(task.name), cores)
