"""An action that is a command on this machine: a group of processes that ends with us."""

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
# Seconds between SIGTERM and SIGKILL for a command that outlasts its time.
_KILL_GRACE_SECONDS = 10.0
# Seconds that output may take to come after the end of the command: what it left running may hold the pipe.
_OUTPUT_DRAIN_SECONDS = 0.2
_MAX_OUTPUT_BYTES = 16_384  # bytes, the last ones
_MAX_OUTPUT_LINE_CHARS = 200  # characters of what it said last


async def run_command(argv: Sequence[str], environment: Mapping[str, str], timeout: float) -> str:
    """Run a command to its end; how it failed, to be put after its name, or nothing when it did not.

    `variables` are its environment. Cancelled, it kills the command and all that it started at once. What a
    command that ended in time left running goes on.
    """
    if shutil.which(argv[0], path=environment.get("PATH")) is None:
        return f"cannot be run: {argv[0]} is not installed, or is no program"
    try:
        child = subprocess.Popen(  # noqa: ASYNC220 - it is only begun here; its end is awaited
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
        return f"had not ended after {timeout:g} s, and was ended by us{_last_line(output_text)}"
    return "" if code == 0 else f"ended {_describe_exit(code)}{_last_line(output_text)}"


class _Output:
    """The end of what a command says."""

    def __init__(self) -> None:
        self.tail = bytearray()
        self.ended = asyncio.Event()


@contextlib.contextmanager
def _capture_output(pipe: IO[bytes]) -> Iterator[_Output]:
    loop, output, descriptor = asyncio.get_running_loop(), _Output(), pipe.fileno()
    os.set_blocking(descriptor, False)

    def read() -> None:
        part = os.read(descriptor, _MAX_OUTPUT_BYTES)
        output.tail += part
        del output.tail[:-_MAX_OUTPUT_BYTES]
        if not part:
            loop.remove_reader(descriptor)
            output.ended.set()

    loop.add_reader(descriptor, read)
    try:
        yield output
    finally:
        loop.remove_reader(descriptor)


async def _wait_ended(child: subprocess.Popen[bytes], seconds: float | None) -> bool:
    """Whether a child ends within so many seconds. It is not reaped, so that its id stays its own."""
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
    """To the whole group, whose id is the child's: it is nobody else's until the child is reaped."""
    with contextlib.suppress(
        ProcessLookupError, PermissionError
    ):  # nobody left, or only what changed its user
        os.killpg(child.pid, number)


def _describe_exit(code: int) -> str:
    number = -code if code < 0 else code - 128
    if number in {each.value for each in signal.Signals}:
        return f"by {signal.Signals(number).name}"
    return f"with exit code {code}"


def _last_line(output: str) -> str:
    """What it said last, fit for an event: one line, printable, bounded."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return ""
    line = "".join(c if c.isprintable() else "?" for c in lines[-1])
    return f": {line[:_MAX_OUTPUT_LINE_CHARS]}"
