"""What takes minutes to make, and nobody's attention, is made beside the tests that do without it.

A test marked `ahead(NAME)` needs what `python -m NAME` makes. That is started with the first test of a run,
takes only the time that nobody else wants, and ends with its standard input; the marked tests come last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from sandbox.child_process import ProcessFailed, describe_exit

PREBUILD_MARK = "ahead"
_ROOT = Path(__file__).parents[2]
_STOP_TIMEOUT_SECONDS = 150.0
IDLE_NICENESS, NORMAL_NICENESS = 19, 0
"""How little a process is favoured: a niceness."""
_MAX_LOG_CHARACTERS = 6000


class Prebuild:
    """`python -m MODULE`, for as long as what it makes is needed. The log is in `directory`."""

    def __init__(self, module: str, directory: Path) -> None:
        self.module = module
        self._log = directory / f"{module}.log"
        self._ready_line = b""
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", module],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        # One that has ended is nobody's child any more, also while no test has asked for it yet.
        threading.Thread(target=self._child.wait, daemon=True).start()

    def wait_ready(self) -> str:
        """Wait until it is made; the line that told so. ProcessFailed when the maker ended without."""
        if not self._ready_line:
            assert self._child.stdout is not None
            self._ready_line = self._child.stdout.readline()
        if not self._ready_line:
            raise ProcessFailed(self.module, describe_exit(self._child.wait()), self.log())
        return self._ready_line.decode().strip()

    def log(self) -> str:
        """What it has complained of."""
        return self._log.read_text(errors="replace")[-_MAX_LOG_CHARACTERS:]

    def stop(self) -> int:
        """Close its standard input, and wait until all is undone; its exit code, negative for a signal."""
        assert self._child.stdout is not None
        if not self._child.stdout.closed:
            try:
                self._child.communicate(timeout=_STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.communicate()
        return self._child.returncode


@contextmanager
def start_prebuilds(items: Iterable[pytest.Item], directory: Path) -> Iterator[dict[str, Prebuild]]:
    """Those that the tests `items` need, by the names of their modules."""
    names = dict.fromkeys(mark.args[0] for item in items for mark in item.iter_markers(PREBUILD_MARK))
    with ExitStack() as running:
        started = {}
        for name in names:
            started[name] = Prebuild(name, directory)
            running.callback(started[name].stop)
        yield started


def sort_prebuild_tests_last(items: list[pytest.Item]) -> None:
    """Put the tests that need a maker behind all others, and leave the order as it is otherwise."""
    items.sort(key=lambda item: item.get_closest_marker(PREBUILD_MARK) is not None)


def lower_own_priority() -> None:
    """For a maker: it runs only when nobody else wants to, and so does what it starts in its session."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    set_autogroup_niceness(os.getpid(), IDLE_NICENESS)


def set_autogroup_niceness(process: int, niceness: int) -> None:
    """How much time the session of a process gets beside others, where the kernel shares it out by sessions.

    There the niceness of a process counts only within its session: sched(7), "The autogroup feature".
    """
    with suppress(OSError):  # not in this kernel; not ours
        Path(f"/proc/{process}/autogroup").write_text(str(niceness))


def exit_when_stdin_closes() -> None:
    """For a maker that leaves nothing to be undone: it is killed, with its children, when its input ends."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
