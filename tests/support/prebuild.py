"""Builds slow artifacts in the background, during tests that do not need them.

A test marked `prebuild(NAME)` needs what `python -m NAME` builds. That process starts with the first test of
a run, uses only idle CPU time, and exits when its standard input closes; the marked tests run last.
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

PREBUILD_MARK = "prebuild"
_ROOT = Path(__file__).parents[2]
_STOP_TIMEOUT_SECONDS = 150.0
IDLE_NICENESS, NORMAL_NICENESS = 19, 0
"""Niceness of a process."""
_MAX_LOG_CHARACTERS = 6000


class Prebuild:
    """A running `python -m MODULE`, until its artifact is no longer needed. The log is in `directory`."""

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
        # Reap it when it exits, even if no test has waited for it yet.
        threading.Thread(target=self._child.wait, daemon=True).start()

    def wait_ready(self) -> str:
        """Wait for the artifact; return the line that reports it.

        Raises ProcessFailed if the process exits.
        """
        if not self._ready_line:
            assert self._child.stdout is not None
            self._ready_line = self._child.stdout.readline()
        if not self._ready_line:
            raise ProcessFailed(self.module, describe_exit(self._child.wait()), self.log())
        return self._ready_line.decode().strip()

    def log(self) -> str:
        """Return the end of its standard error."""
        return self._log.read_text(errors="replace")[-_MAX_LOG_CHARACTERS:]

    def stop(self) -> int:
        """Close its standard input and wait for its cleanup; return its exit code, negative for a signal."""
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
    """Start the prebuilds that the tests `items` need; yield them by module name."""
    names = dict.fromkeys(mark.args[0] for item in items for mark in item.iter_markers(PREBUILD_MARK))
    with ExitStack() as exit_stack:
        started = {}
        for name in names:
            started[name] = Prebuild(name, directory)
            exit_stack.callback(started[name].stop)
        yield started


def sort_prebuild_tests_last(items: list[pytest.Item]) -> None:
    """Move the tests that need a prebuild to the end, keeping the order otherwise."""
    items.sort(key=lambda item: item.get_closest_marker(PREBUILD_MARK) is not None)


def lower_own_priority() -> None:
    """Run this process, and its children, only on idle CPU time (called by a prebuild)."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    set_autogroup_niceness(os.getpid(), IDLE_NICENESS)


def set_autogroup_niceness(process: int, niceness: int) -> None:
    """Set the CPU share of a process's session, where the kernel shares time between sessions.

    There the niceness of a process counts only within its session: sched(7), "The autogroup feature".
    """
    with suppress(OSError):  # Not supported by this kernel, or not permitted.
        Path(f"/proc/{process}/autogroup").write_text(str(niceness))


def exit_when_stdin_closes() -> None:
    """Kill this process and its children when standard input closes (for a prebuild without cleanup)."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
