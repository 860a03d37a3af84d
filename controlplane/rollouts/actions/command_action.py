"""Runs an action's command on this machine, in a process group that ends with the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import structlog

from controlplane.aio import run_to_completion

log = structlog.get_logger("tidevoy.rollouts")

_PROCESS_GUARD = Path(__file__).with_name("process_guard.py")
# Time between SIGTERM and SIGKILL for a command that exceeds its timeout.
_KILL_GRACE_SECONDS = 10.0
# How long to read output after the command's end: processes that it left running may hold the pipe open.
_OUTPUT_DRAIN_SECONDS = 0.2
_MAX_OUTPUT_BYTES = 16_384  # the end of the output is kept
_MAX_OUTPUT_LINE_CHARS = 200  # of the last output line in a message


async def run_command(argv: Sequence[str], environment: Mapping[str, str], timeout: float) -> str:
    """Run a command to its end. Return an empty string, or how it failed, such as "ended by SIGKILL".

    Cancellation kills the command and all its processes at once. If the command ends before the timeout,
    processes that it started in the background keep running.
    """
    if shutil.which(argv[0], path=environment.get("PATH")) is None:
        return f"cannot be run: {argv[0]} is not installed or not executable"
    try:
        child = subprocess.Popen(  # noqa: ASYNC220 - only the start blocks; the end is awaited
            [sys.executable, "-I", "-S", str(_PROCESS_GUARD), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout, _capture_output(child.stdout) as output:
        timed_out = False
        try:
            timed_out = not await _wait_ended(child, timeout)
            if timed_out:
                _signal_group(child, signal.SIGTERM)
                await _wait_ended(child, _KILL_GRACE_SECONDS)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_OUTPUT_DRAIN_SECONDS):
                        await output.ended.wait()
        finally:
            if timed_out or not _has_ended(child):
                _signal_group(child, signal.SIGKILL)
            await run_to_completion(_wait_ended(child, None))
            code = child.wait()
        output_text = output.tail.decode("utf-8", "replace")
    log.debug("a command has ended", program=argv[0], code=code, output=output_text)
    if timed_out:
        return f"did not end within {timeout:g} s and was killed{_last_line_suffix(output_text)}"
    return "" if code == 0 else f"ended {_describe_exit(code)}{_last_line_suffix(output_text)}"


class _Output:
    """The end of a command's output."""

    def __init__(self) -> None:
        self.tail = bytearray()
        self.ended = asyncio.Event()


@contextlib.contextmanager
def _capture_output(pipe: IO[bytes]) -> Iterator[_Output]:
    loop, output, descriptor = asyncio.get_running_loop(), _Output(), pipe.fileno()
    os.set_blocking(descriptor, False)

    def read() -> None:
        chunk = os.read(descriptor, _MAX_OUTPUT_BYTES)
        output.tail += chunk
        del output.tail[:-_MAX_OUTPUT_BYTES]
        if not chunk:
            loop.remove_reader(descriptor)
            output.ended.set()

    loop.add_reader(descriptor, read)
    try:
        yield output
    finally:
        loop.remove_reader(descriptor)


async def _wait_ended(child: subprocess.Popen[bytes], seconds: float | None) -> bool:
    """Return whether a child ends within `seconds`. It is not reaped, so its id is not reused."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(child.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return _has_ended(child)


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the whole group. Its id is the child's, which is not reused before the child is reaped."""
    # No process is left, or only processes that changed their user.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _describe_exit(code: int) -> str:
    number = -code if code < 0 else code - 128
    if number in {known.value for known in signal.Signals}:
        return f"by {signal.Signals(number).name}"
    return f"with exit code {code}"


def _last_line_suffix(output: str) -> str:
    """Return ": " and the last output line, printable and shortened; an empty string without output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return ""
    line = "".join(c if c.isprintable() else "?" for c in lines[-1])
    return f": {line[:_MAX_OUTPUT_LINE_CHARS]}"
