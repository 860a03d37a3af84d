"""What a load costs the proxy that carries it: CPU, memory, and calls into the kernel."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.machine import (
    forget_peak_memory,
    machine_cpu_seconds,
    memory_mib,
    on_cpu_seconds,
    peak_memory_mib,
    session_members,
    user_and_system,
)
from bench.sysbench import Outcome
from controlplane.errors import TidevoyError
from sandbox.process import Process, find_program

PERF_PACKAGE = "linux-perf"
_EVENT = "raw_syscalls:sys_enter"
_PATIENCE = 10.0  # seconds for perf to begin, and to end
_MICRO = 1e6
_KB_PER_MIB = 1024 * 1024 / 1000


class CannotCount(TidevoyError):
    """The kernel lets us count no system calls of another process."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"system calls are not counted: perf {reason}; run as root, or set the kernel's"
            " perf_event_paranoid to -1"
        )


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy: where clients reach it, and the process that leads its session, if there is one.

    `tls_first`: clients who use TLS begin with it, and speak MySQL inside; else TLS begins within MySQL's
    handshake.
    """

    port: int
    leader: int | None = None
    tls_first: bool = False

    def processes(self) -> list[int]:
        """All of its processes; each worker may be one."""
        return [] if self.leader is None else session_members(self.leader)


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU so far, in seconds: of a proxy's processes (`user` and `system` by ticks), and of the machine."""

    on_cpu: float
    user: float
    system: float
    machine: float

    @classmethod
    def of(cls, processes: Sequence[int]) -> Usage:
        """Now."""
        split = [user_and_system(pid) for pid in processes]
        return cls(
            on_cpu=sum(on_cpu_seconds(pid) for pid in processes),
            user=sum(user for user, _ in split),
            system=sum(system for _, system in split),
            machine=machine_cpu_seconds(),
        )

    def since(self, before: Usage) -> Usage:
        """What was used in between."""
        return Usage(
            self.on_cpu - before.on_cpu,
            self.user - before.user,
            self.system - before.system,
            self.machine - before.machine,
        )


class Watch:
    """What a proxy used while it was watched. Read it behind the `with` of `watching`."""

    used: Usage
    resident_mib: float | None = None


@contextmanager
def watching(proxy: Proxy) -> Iterator[Watch]:
    """Watch a proxy while a load runs. Its processes must be there all the time, its threads nearly so."""
    watch, processes = Watch(), proxy.processes()
    for pid in processes:
        forget_peak_memory(pid)
    before = Usage.of(processes)
    yield watch
    watch.used = Usage.of(processes).since(before)
    if processes:
        watch.resident_mib = sum(peak_memory_mib(pid) for pid in processes)


def figures(outcome: Outcome, used: Usage, resident_mib: float | None) -> dict[str, float]:
    """One run as the figures of a result document, without those that it does not have.

    The kernel tells user and system time apart by ticks; only how they share the exact time is taken from it.
    """
    per_query = _MICRO / outcome.queries
    found = {"qps": outcome.per_second, "p95_ms": outcome.p95, "machine_us": used.machine * per_query}
    if resident_mib is None:
        return found
    found |= {"cpu_us": used.on_cpu * per_query, "resident_mib": resident_mib}
    if ticked := used.user + used.system:
        found["user_us"] = found["cpu_us"] * used.user / ticked
        found["system_us"] = found["cpu_us"] * used.system / ticked
    return found


def resident_kb(proxy: Proxy) -> float:
    """The resident memory of its processes now, in 1,000 bytes; 0 when there is none."""
    return sum(memory_mib(pid) for pid in proxy.processes()) * _KB_PER_MIB


def per_connection(before: float, after: float, connections: int) -> dict[str, list[float]]:
    """The one sample of memory per connection, in 1,000 bytes; none without connections or a proxy."""
    return {"connection_kb": [(after - before) / connections]} if connections and after else {}


class SystemCalls:
    """Counts the system calls of processes with perf: `async with SystemCalls(...) as calls`.

    `calls.count` is right behind that. CannotCount when perf may not. Counting takes time itself, so nothing
    is timed meanwhile.
    """

    def __init__(self, processes: Sequence[int], directory: Path) -> None:
        self.count = 0
        self._processes = processes
        self._directory = directory
        self._perf: Process | None = None

    async def __aenter__(self) -> SystemCalls:
        # It begins when told so, and answers: from then on nothing is missed.
        control, answer = (self._pipe(name) for name in ("perf.control", "perf.answer"))
        self._perf = perf = Process.start("perf", self._command(control, answer), directory=self._directory)
        try:
            await _begun(perf, control, answer)
        except BaseException:
            await perf.kill()
            raise
        finally:
            control.unlink()
            answer.unlink()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._perf is not None
        try:
            if kind is not None:
                return
            self._perf.send(signal.SIGINT)
            async with asyncio.timeout(_PATIENCE):
                await self._perf.wait()
        finally:
            await self._perf.kill()  # nothing, when it has ended
        count = counted(self._perf.output())
        if count is None:
            raise CannotCount(f"says {self._perf.tail(1)!r}")
        self.count = count

    def _pipe(self, name: str) -> Path:
        path = self._directory / name
        os.mkfifo(path)
        return path

    def _command(self, control: Path, answer: Path) -> list[str]:
        return [
            find_program("perf", PERF_PACKAGE),
            *("stat", "-x,", "-e", _EVENT, "-p", ",".join(str(pid) for pid in self._processes)),
            *("--delay=-1", f"--control=fifo:{control},{answer}"),
        ]


async def _begun(perf: Process, control: Path, answer: Path) -> None:
    """Return when perf counts. CannotCount when it ends instead, or says nothing in time."""
    # For reading and writing, which never waits for the other side to open it.
    told, heard = (os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in (control, answer))
    acknowledged = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(heard, acknowledged.set)
    ended = asyncio.ensure_future(perf.wait())
    waits = [ended, asyncio.ensure_future(acknowledged.wait())]
    try:
        os.write(told, b"enable\n")
        await asyncio.wait(waits, timeout=_PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        loop.remove_reader(heard)
        os.close(told)
        os.close(heard)
    if not acknowledged.is_set():
        raise CannotCount(f"says {perf.tail(1)!r}")


def counted(output: str) -> int | None:
    """The count in what `perf stat -x,` prints; None when there is none."""
    for line in output.splitlines():
        count, _, rest = line.partition(",")
        if _EVENT in rest and count.isdigit():
            return int(count)
    return None
