"""A child process in its own session and group that dies with its parent and logs to a file."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from controlplane.errors import TidevoyError

_PARENT_GUARD = Path(__file__).with_name("parent_guard.py")
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # Servers are installed there; a user's PATH often lacks it.


class ProgramMissing(TidevoyError):
    """A required program is not installed. `install_command` installs it."""

    def __init__(self, program: str, install_command: str) -> None:
        self.program, self.install_command = program, install_command
        super().__init__(f"{program} is not installed; install it with: {install_command}")


class ProcessFailed(TidevoyError):
    """A program failed to start or exited unexpectedly. `log` holds its last lines."""

    def __init__(self, name: str, reason: str, log: str) -> None:
        self.name, self.reason, self.log = name, reason, log
        super().__init__(f"{name} {reason}; its last lines:\n{log}" if log else f"{name} {reason}")


def find_program(program: str, package: str) -> str:
    """Return the absolute path of `program`.

    Raises ProgramMissing, naming the Debian package, if not found.
    """
    search_path = os.pathsep.join(filter(None, (os.environ.get("PATH"), _SYSTEM_PATH)))
    path = shutil.which(program, path=search_path)
    if path is None:
        raise ProgramMissing(program, f"apt-get install {package}")
    return os.path.abspath(path)


def describe_exit(code: int) -> str:
    """Describe the exit for a return code (negative: the signal), as the end of a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class ChildProcess:
    """One child process. Not bound to an event loop: each `wait` uses the running loop of its caller.

    Start it in the main thread: the kernel ties a child to the thread that started it (see parent_guard.py).
    """

    def __init__(self, name: str, child: subprocess.Popen[bytes], log: Path, log_start: int) -> None:
        self.name = name
        self.log = log
        self._child = child
        self._log_start = log_start

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        directory: Path,
        env: Mapping[str, str] | None = None,
        log_name: str | None = None,
    ) -> Self:
        """Start `command` (its first item an absolute path) in `directory`.

        Standard output and error are appended to `directory/<log_name or name>.log`.
        """
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / f"{log_name or name}.log"
        guarded_command = [sys.executable, "-I", "-S", str(_PARENT_GUARD), str(os.getpid()), *command]
        with log.open("ab") as output:
            log_start = output.tell()
            child = subprocess.Popen(
                guarded_command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        return cls(name, child, log, log_start)

    @property
    def pid(self) -> int:
        """Process id, also that of its group."""
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """None while the process runs; then its exit code, or the negated number of the fatal signal."""
        if self._child.returncode is None and self._has_exited():
            self._reap()
        return self._child.returncode

    def output(self) -> str:
        """Return everything this process has written so far."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of its output."""
        with self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - 16_384))
            written = log.read().decode(errors="replace")
        return "\n".join(written.splitlines()[-lines:])

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself (not to its group); does nothing if it has exited."""
        if self.returncode is None:
            self._child.send_signal(number)

    async def wait(self) -> int:
        """Wait for the exit and return the code as in `returncode`. Any number of tasks may wait."""
        code = self.returncode
        if code is not None:
            return code
        loop = asyncio.get_running_loop()
        exited = asyncio.Event()
        # The pid stays valid until we reap it, so this descriptor refers to our child even if it just exited.
        descriptor = os.pidfd_open(self.pid)
        try:
            loop.add_reader(descriptor, exited.set)
            await exited.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        code = self.returncode
        assert code is not None  # The descriptor was readable, so the process has exited.
        return code

    async def terminate(self, kill_after_seconds: float = 10.0) -> int:
        """Send SIGTERM, and SIGKILL to the whole group after `kill_after_seconds`; return the return code.

        If cancelled while waiting, it kills at once: the process has exited when this returns or raises.
        """
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(kill_after_seconds):
                return await self.wait()
        except TimeoutError:
            return await self.kill()
        except asyncio.CancelledError:
            await self.kill()
            raise

    async def kill(self) -> int:
        """Send SIGKILL to the whole group and return the return code."""
        if self.returncode is None:
            self._signal_group(signal.SIGKILL)
        return await self.wait()

    def _has_exited(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _reap(self) -> None:
        # While the leader is a zombie, its group id cannot be reused: kill the rest of the group now.
        self._signal_group(signal.SIGKILL)
        self._child.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # No process is left, or only processes that changed their user.
