"""A child process in its own session and process group that dies with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

_PROCESS_GUARD = Path(__file__).with_name("process_guard.py")


class GuardedProcess:
    """One child process without a terminal. It is not bound to an event loop.

    `scope` says what dies when the parent ends: only the program (`process`), or its whole process group
    (`group`). With the scope `process`, create it in the main thread: the program dies with the thread that
    started it (see process_guard.py).
    """

    def __init__(
        self,
        command: Sequence[str],
        scope: Literal["process", "group"],
        *,
        output: int | IO[bytes],
        env: Mapping[str, str] | None,
        directory: Path | None = None,
    ) -> None:
        """Start `command`; `output` gets its standard output and error.

        If the command cannot be run, the exit code is 127.
        """
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROCESS_GUARD), str(os.getpid()), scope, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=None if env is None else dict(env),
            start_new_session=True,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        return self._child.pid

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe of its output, if it was started with `output=PIPE`."""
        assert self._child.stdout is not None
        return self._child.stdout

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended. Reading this does not reap it, so its id is not reused."""
        if self._child.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    async def wait_ended(self) -> None:
        """Wait until the process has ended, without reaping it. Any number of tasks may wait."""
        if self.has_ended:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        # The pid stays valid until we reap it, so this descriptor refers to our child even if it just ended.
        descriptor = os.pidfd_open(self.pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def reap(self) -> int:
        """Return the return code of a process that has ended: its exit code, or the negated signal."""
        return self._child.wait()

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the whole group, unless the process has been reaped, because then its id may be reused."""
        # The errors mean that no process is left, or only processes that changed their user.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._child.returncode is None:
                os.killpg(self.pid, number)


def describe_exit(code: int) -> str:
    """Describe an exit as the end of a sentence. A negative `code` is a signal number."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
