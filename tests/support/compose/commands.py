"""Runs a program to its end and reports its output if it fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from controlplane.errors import TidevoyError

_MAX_OUTPUT_CHARACTERS = 6000


class CommandFailed(TidevoyError):
    """A command exited with a code other than 0, or took too long."""

    def __init__(self, command: tuple[str, ...], reason: str, output: str) -> None:
        self.output = output
        super().__init__(f"{' '.join(command)}: {reason}; its output:\n{output[-_MAX_OUTPUT_CHARACTERS:]}")


async def run_command(
    *command: str,
    timeout: float,
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> str:
    """Return the standard output of `command`. Raises CommandFailed after `timeout` seconds or if it fails.

    `env` is added to this process's environment. After the timeout, the command's process group is killed.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
        cwd=directory,
        process_group=0,
    )
    try:
        async with asyncio.timeout(timeout):
            output, errors = await process.communicate()
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if isinstance(error, TimeoutError):
            raise CommandFailed(command, f"took more than {timeout:.0f} s", "") from None
        raise
    if process.returncode != 0:
        written = (output + errors).decode(errors="replace")
        raise CommandFailed(command, f"exit code {process.returncode}", written)
    return output.decode(errors="replace")
