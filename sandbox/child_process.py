"""Child processes of the sandbox, their log files, and their errors."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from controlplane.errors import TidevoyError
from controlplane.rollouts.actions.guarded_process import GuardedProcess
from controlplane.rollouts.actions.guarded_process import describe_exit as describe_exit

_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # Servers are installed there; a user's PATH often lacks it.


class ProgramMissing(TidevoyError):
    """A required program is not installed. `install_command` is the shell command that installs it."""

    def __init__(self, program: str, install_command: str) -> None:
        self.program, self.install_command = program, install_command
        super().__init__(f"{program} is not installed; install it with: {install_command}")


class ProcessFailed(TidevoyError):
    """A program failed to start or exited unexpectedly. `log` contains the last lines of its output."""

    def __init__(self, name: str, reason: str, log: str) -> None:
        self.name, self.reason, self.log = name, reason, log
        super().__init__(f"{name} {reason}; its last lines:\n{log}" if log else f"{name} {reason}")


def find_program(program: str, package: str) -> str:
    """Return the absolute path of `program`. Raises ProgramMissing, which names the Debian package."""
    search_path = os.pathsep.join(filter(None, (os.environ.get("PATH"), _SYSTEM_PATH)))
    path = shutil.which(program, path=search_path)
    if path is None:
        raise ProgramMissing(program, f"apt-get install {package}")
    return os.path.abspath(path)


class ChildProcess(GuardedProcess):
    """One child process of the sandbox. After its exit, `returncode` kills the rest of its process group."""

    def __init__(
        self, name: str, command: Sequence[str], *, directory: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Start `command` in `directory` and append its output to `directory/<name>.log`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = directory / f"{name}.log"
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            super().__init__(command, "process", output=output, env=env, directory=directory)

    @property
    def returncode(self) -> int | None:
        """None while the process runs, then the exit code; -N if signal N has ended the process."""
        if not self.has_ended:
            return None
        # Kill the rest of the group before its leader is reaped: after that, another group may get this id.
        self.signal_group(signal.SIGKILL)
        return self.reap()

    def output(self) -> str:
        """Return everything this process has written so far."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of the output."""
        return "\n".join(self.output().splitlines()[-lines:])

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, but not to its group. No effect if the process has exited."""
        if self.returncode is None:
            os.kill(self.pid, number)

    async def wait(self) -> int:
        """Wait for the exit and return `returncode`. Several tasks may wait at the same time."""
        await self.wait_ended()
        code = self.returncode
        assert code is not None
        return code

    async def terminate(self, kill_after_seconds: float = 10.0) -> int:
        """Send SIGTERM, wait up to `kill_after_seconds`, then kill the group. Return `returncode`.

        A cancellation ends the wait early. The process has exited when this method returns or raises.
        """
        self.send_signal(signal.SIGTERM)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(kill_after_seconds):
                    await self.wait()
        finally:
            code = await self.kill()
        return code

    async def kill(self) -> int:
        """Send SIGKILL to the whole group and return `returncode`."""
        self.signal_group(signal.SIGKILL)
        return await self.wait()
