"""Child processes of the sandbox: how they end, with their groups and with their parent."""

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
print("deaf", flush=True)
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
from sandbox.child_process import Process
command = [sys.executable, "-c", "import time; time.sleep(100)"]
child = Process.start("child", command, directory=Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(100)
"""


async def _first_line(process: ChildProcess) -> str:
    async with asyncio.timeout(20):
        while "\n" not in process.output():
            assert process.returncode is None, process.output()
            await asyncio.sleep(0.02)
    return process.output().splitlines()[0]


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def _until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not _is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        await asyncio.sleep(0.02)


@pytest.fixture
async def python(tmp_path: Path) -> AsyncIterator[RunPython]:
    """Starts `python -c code argument...`; what still runs is killed after the test."""
    started: list[ChildProcess] = []

    def run(code: str, *arguments: str) -> ChildProcess:
        process = ChildProcess.start("program", [sys.executable, "-c", code, *arguments], directory=tmp_path)
        started.append(process)
        return process

    yield run
    for process in started:
        await process.kill()


async def test_exit_code_and_output_are_reported_to_all_who_wait(python: RunPython) -> None:
    process = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    codes = await asyncio.gather(process.wait(), process.wait(), process.wait())
    assert set(codes) == {3}
    assert await process.wait() == process.returncode == 3
    assert sorted(process.tail().splitlines()) == ["err", "out"]
    assert await process.terminate() == 3


async def test_log_of_an_earlier_run_is_kept_and_not_shown_as_this_one_s(python: RunPython) -> None:
    await python("print('first')").wait()
    second = python("print('second')")
    await second.wait()
    assert second.tail() == "second"
    assert second.log.read_text() == "first\nsecond\n"


async def test_terminate_is_polite_first(python: RunPython) -> None:
    process = python("import time; print('up', flush=True); time.sleep(100)")
    await _first_line(process)
    assert await process.terminate() == -signal.SIGTERM


async def test_terminate_kills_what_is_deaf(python: RunPython) -> None:
    process = python(STUBBORN)
    await _first_line(process)
    assert await process.terminate(kill_after_seconds=0.2) == -signal.SIGKILL


async def test_terminate_cancelled_still_ends_the_process(python: RunPython) -> None:
    process = python(STUBBORN)
    await _first_line(process)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await process.terminate(kill_after_seconds=60)
    assert process.returncode == -signal.SIGKILL


async def test_cancelled_wait_leaves_no_reader_behind(python: RunPython) -> None:
    process = python("import time; print('up', flush=True); time.sleep(100)")
    await _first_line(process)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await process.wait()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_kill_takes_the_whole_group(python: RunPython) -> None:
    process = python(WITH_CHILD, "100")
    grandchild = int(await _first_line(process))
    assert await process.kill() == -signal.SIGKILL
    await _until_gone(grandchild)


async def test_group_is_ended_when_its_leader_ends_by_itself(python: RunPython) -> None:
    process = python(WITH_CHILD, "0.1")
    grandchild = int(await _first_line(process))
    assert await process.wait() == 0
    await _until_gone(grandchild)


async def test_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert not _is_gone(child)
    parent.kill()
    await parent.communicate()
    await _until_gone(child)


async def test_child_gets_default_signals_back(tmp_path: Path) -> None:
    process = ChildProcess.start("sh", ["/bin/sh", "-c", "grep SigIgn /proc/self/status"], directory=tmp_path)
    await process.wait()
    ignored = int(process.tail().split()[1], 16)
    assert not ignored & 1 << (signal.SIGPIPE - 1)


async def test_program_that_cannot_be_run_says_so(tmp_path: Path) -> None:
    process = ChildProcess.start("none", ["/nonexistent/program"], directory=tmp_path)
    assert await process.wait() == 1
    assert process.tail() == "/nonexistent/program: No such file or directory"


def test_missing_program_names_the_package() -> None:
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
def test_exit_reads_as_a_sentence(code: int, sentence: str) -> None:
    assert describe_exit(code) == sentence
