"""Child processes of the sandbox exit with their process group and with their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from sandbox.child_process import ChildProcess, ProgramMissing, describe_exit, find_program

RunPython = Callable[..., ChildProcess]

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(100)
"""
WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""
PARENT = """
import sys, time
from pathlib import Path
from sandbox.child_process import ChildProcess
command = [sys.executable, "-c", "import time; time.sleep(100)"]
child = ChildProcess("child", command, directory=Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(100)
"""


async def _first_line(process: ChildProcess) -> str:
    async with asyncio.timeout(20):
        while "\n" not in process.output():
            assert process.returncode is None, process.output()
            await asyncio.sleep(0.02)
    return process.output().splitlines()[0]


def _has_exited(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def _wait_exited(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not _has_exited(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        await asyncio.sleep(0.02)


@pytest.fixture
async def python(tmp_path: Path) -> AsyncIterator[RunPython]:
    """Yield a function that starts `python -c CODE ARGUMENT...`. After the test, kill the processes."""
    started: list[ChildProcess] = []

    def run(code: str, *arguments: str) -> ChildProcess:
        process = ChildProcess("program", [sys.executable, "-c", code, *arguments], directory=tmp_path)
        started.append(process)
        return process

    yield run
    for process in started:
        await process.kill()


async def test_reports_exit_code_and_output_to_all_waiters(python: RunPython) -> None:
    process = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    codes = await asyncio.gather(process.wait(), process.wait(), process.wait())
    assert set(codes) == {3}
    assert await process.wait() == process.returncode == 3
    assert sorted(process.tail().splitlines()) == ["err", "out"]
    assert await process.terminate() == 3


async def test_keeps_log_of_earlier_run_but_excludes_it_from_tail(python: RunPython) -> None:
    await python("print('first')").wait()
    second = python("print('second')")
    await second.wait()
    assert second.tail() == "second"
    assert second.log.read_text() == "first\nsecond\n"


async def test_terminate_sends_sigterm_first(python: RunPython) -> None:
    process = python("import time; print('up', flush=True); time.sleep(100)")
    await _first_line(process)
    assert await process.terminate() == -signal.SIGTERM


async def test_terminate_kills_process_that_ignores_sigterm(python: RunPython) -> None:
    process = python(STUBBORN)
    await _first_line(process)
    assert await process.terminate(kill_after_seconds=0.2) == -signal.SIGKILL


async def test_cancelled_terminate_kills_process(python: RunPython) -> None:
    process = python(STUBBORN)
    await _first_line(process)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await process.terminate(kill_after_seconds=60)
    assert process.returncode == -signal.SIGKILL


async def test_cancelled_wait_removes_reader(python: RunPython) -> None:
    process = python("import time; print('up', flush=True); time.sleep(100)")
    await _first_line(process)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await process.wait()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_kill_kills_whole_group(python: RunPython) -> None:
    process = python(WITH_CHILD, "100")
    grandchild = int(await _first_line(process))
    assert await process.kill() == -signal.SIGKILL
    await _wait_exited(grandchild)


async def test_group_is_killed_when_leader_exits(python: RunPython) -> None:
    process = python(WITH_CHILD, "0.1")
    grandchild = int(await _first_line(process))
    assert await process.wait() == 0
    await _wait_exited(grandchild)


async def test_child_dies_with_killed_parent(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert not _has_exited(child)
    parent.kill()
    await parent.communicate()
    await _wait_exited(child)


async def test_child_has_default_signal_handlers(tmp_path: Path) -> None:
    process = ChildProcess("sh", ["/bin/sh", "-c", "grep SigIgn /proc/self/status"], directory=tmp_path)
    await process.wait()
    ignored = int(process.tail().split()[1], 16)
    assert not ignored & 1 << (signal.SIGPIPE - 1)


async def test_reports_program_that_cannot_run(tmp_path: Path) -> None:
    process = ChildProcess("none", ["/nonexistent/program"], directory=tmp_path)
    assert await process.wait() == 127  # as in a shell
    assert process.tail() == "/nonexistent/program: No such file or directory"


def test_missing_program_error_names_package() -> None:
    with pytest.raises(
        ProgramMissing, match=r"^no-such-etcd is not installed; .*apt-get install etcd-server$"
    ):
        find_program("no-such-etcd", "etcd-server")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (0, "ended with exit code 0"),
        (-9, "was ended by SIGKILL"),
        (-64, "was ended by SIGRTMAX"),
        (-63, "was ended by signal 63"),
    ],
)
def test_describes_exit_as_sentence(code: int, sentence: str) -> None:
    assert describe_exit(code) == sentence
