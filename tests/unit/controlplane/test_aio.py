"""Work that runs to its end although its caller is cancelled; tasks by key; threads for blocking calls."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
from structlog.testing import capture_logs

from controlplane.aio import KeyedTasks, ThreadPool, run_to_completion
from tests.support.waiting import wait_until


async def test_the_result_and_the_error_come_through() -> None:
    async def result() -> int:
        return 7

    async def error() -> None:
        raise OSError("full")

    assert await run_to_completion(result()) == 7
    with pytest.raises(OSError, match="full"):
        await run_to_completion(error())


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_caller_ends_after_the_work_and_not_before(fails: bool) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    done = False

    async def work() -> None:
        nonlocal done
        begun.set()
        await go_on.wait()
        done = True
        if fails:
            raise OSError("the disk is full")

    caller = asyncio.create_task(run_to_completion(work()))
    await begun.wait()
    for _ in range(3):  # cancelling again does not end the wait either
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    go_on.set()
    with capture_logs() as logs:
        await asyncio.wait({caller})
    assert caller.cancelled()
    assert done
    assert [entry["error"] for entry in logs] == (["the disk is full"] if fails else [])


async def test_keyed_task_can_be_cancelled_before_it_begins() -> None:
    tasks, begun = KeyedTasks[str]("test"), list[str]()

    async def work() -> None:
        begun.append("begun")

    run = asyncio.create_task(tasks.run(lambda: None))
    await wait_until(lambda: tasks.is_running)
    tasks.start("a", work)
    tasks.cancel("a")
    run.cancel()
    await asyncio.wait({run})
    assert not begun


async def test_keyed_tasks_run_once_per_key_while_run_runs_and_their_errors_end_it() -> None:
    tasks, started, fail = KeyedTasks[str]("test"), list[str](), asyncio.Event()

    async def work(name: str) -> None:
        started.append(name)
        await fail.wait()
        raise OSError("full")

    tasks.start("a", work, "too early")
    run = asyncio.create_task(tasks.run(lambda: tasks.start("a", work, "first")))
    await wait_until(lambda: started == ["first"])
    tasks.start("a", work, "second")
    tasks.cancel("a")
    tasks.start("a", work, "third")
    tasks.start("b", work, "other")
    await wait_until(lambda: started == ["first", "third", "other"])
    assert (tasks.is_running, tasks.running_keys()) == (True, frozenset("ab"))
    fail.set()
    with pytest.raises(BaseExceptionGroup, match="unhandled errors"):
        await run
    assert (tasks.is_running, tasks.running_keys()) == (False, frozenset())


@pytest.mark.parametrize("delay", range(6))
async def test_no_keyed_task_starts_after_another_has_failed(delay: int) -> None:
    """`delay`: iterations of the event loop between the failure and the attempt to start another task."""
    tasks, fail, late_starts = KeyedTasks[str]("test"), asyncio.Event(), list[str]()

    async def work() -> None:
        await fail.wait()
        raise OSError("full")

    async def work_late() -> None:
        late_starts.append("started")

    run = asyncio.create_task(tasks.run(lambda: tasks.start("a", work)))
    await wait_until(lambda: tasks.is_running)
    fail.set()
    await asyncio.sleep(0)  # let `work` run into its error
    for _ in range(delay):
        await asyncio.sleep(0)
    tasks.start("b", work_late)
    with pytest.raises(BaseExceptionGroup) as raised:
        await run
    assert raised.group_contains(OSError)
    assert not late_starts


async def test_thread_pool_is_bounded_and_passes_results_and_errors() -> None:
    pool, release, running = ThreadPool("test", 2), threading.Event(), list[int]()

    def block(number: int) -> int:
        running.append(number)
        release.wait()
        return 1 // number

    tasks = [asyncio.create_task(pool.run(block, number)) for number in (1, 1, 2, 0)]
    await wait_until(lambda: len(running) == 2)
    tasks[2].cancel()  # it waits in the queue, so it never starts
    await asyncio.wait({tasks[2]})
    release.set()
    assert await asyncio.gather(*tasks[:2]) == [1, 1]
    with pytest.raises(ZeroDivisionError):
        await tasks[3]
    assert running == [1, 1, 0]


def test_process_does_not_wait_for_hanging_calls_at_its_end() -> None:
    program = """
import asyncio, threading
from controlplane.aio import ThreadPool

async def main() -> None:
    pool, begun = ThreadPool("test", 1), threading.Event()
    hang = lambda: begun.set() or threading.Event().wait()
    hanging = [asyncio.create_task(pool.run(hang)) for _ in range(9)]
    while not begun.is_set():
        await asyncio.sleep(0.001)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=20, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
