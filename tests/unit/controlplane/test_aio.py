"""Work that runs to its end, whoever gives up on it."""

from __future__ import annotations

import asyncio

import pytest

from controlplane.aio import run_to_completion


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
            raise OSError

    caller = asyncio.create_task(run_to_completion(work()))
    await begun.wait()
    for _ in range(3):  # however often
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    go_on.set()
    await asyncio.wait({caller})
    assert caller.cancelled()
    assert done
