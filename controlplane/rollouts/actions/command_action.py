"""Runs an action's command on this machine, in a process group that ends with the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import structlog

from controlplane.aio import run_to_completion
from controlplane.rollouts.actions.guarded_process import GuardedProcess, describe_exit

log = structlog.get_logger("tidevoy.rollouts")

# Time between SIGTERM and SIGKILL for a command that exceeds its timeout.
_KILL_GRACE_SECONDS = 10.0
# How long to read output after the command has ended: its background processes may keep the pipe open.
_OUTPUT_DRAIN_SECONDS = 0.2
_MAX_OUTPUT_BYTES = 16_384  # the end of the output is kept
_MAX_OUTPUT_LINE_CHARS = 200  # of the last output line in a message


async def run_command(argv: Sequence[str], environment: Mapping[str, str], timeout: float) -> str:
    """Run a command to its end. Return an empty string, or how it failed, such as "was ended by SIGKILL".

    Cancellation kills the command and all its processes at once. If the command ends before the timeout,
    processes that it started in the background keep running.
    """
    if shutil.which(argv[0], path=environment.get("PATH")) is None:
        return f"cannot be run: {argv[0]} is not installed or not executable"
    try:
        command = GuardedProcess(argv, "group", output=subprocess.PIPE, env=environment)
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    output, timed_out = _Output(), False
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, command.stdout)
        with contextlib.closing(transport):
            timed_out = not await _ends_within(command.wait_ended(), timeout)
            if timed_out:
                command.signal_group(signal.SIGTERM)
                await _ends_within(command.wait_ended(), _KILL_GRACE_SECONDS)
            else:
                await _ends_within(output.ended.wait(), _OUTPUT_DRAIN_SECONDS)
    finally:
        if timed_out or not command.has_ended:
            command.signal_group(signal.SIGKILL)
        await run_to_completion(command.wait_ended())
        code = command.reap()
    output_text = output.tail.decode("utf-8", "replace")
    log.debug("a command has ended", program=argv[0], code=code, output=output_text)
    if timed_out:
        return f"did not end within {timeout:g} s and was killed{_last_line_suffix(output_text)}"
    return "" if code == 0 else f"{describe_exit(code)}{_last_line_suffix(output_text)}"


async def _ends_within(end: Coroutine[Any, Any, object], seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await end
            return True
    return False


class _Output(asyncio.Protocol):
    """Keeps the end of a command's output."""

    def __init__(self) -> None:
        self.tail = bytearray()
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.tail += data
        del self.tail[:-_MAX_OUTPUT_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


def _last_line_suffix(output: str) -> str:
    """Return ": " and the last output line, printable and shortened; an empty string without output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return ""
    line = "".join(c if c.isprintable() else "?" for c in lines[-1])
    return f": {line[:_MAX_OUTPUT_LINE_CHARS]}"
