"""Commands reach each Envoy process once."""

from __future__ import annotations

import asyncio
from typing import Any

from controlplane.model.sessions import SessionResult
from controlplane.sessions import commands_pb2
from controlplane.sessions.command_queue import CommandQueue
from tests.support.waiting import assert_never


def command(id_: int, instance: str = "") -> Any:
    return commands_pb2.Command(id=id_, instance=instance)


def ignore(_: SessionResult, __: Any) -> None:
    """Take no result."""


async def ids(queue: CommandQueue, instance: str, seconds: float = 0.0) -> list[int]:
    return [message.id for message in await queue.next_commands(instance, seconds)]


async def start_poll(queue: CommandQueue, instance: str) -> asyncio.Task[list[int]]:
    """Start a poll, and return when it waits for commands."""
    poll = asyncio.create_task(ids(queue, instance, 10.0))
    await asyncio.sleep(0)  # the task runs until it waits
    return poll


async def test_command_is_given_once_to_each_process() -> None:
    queue = CommandQueue()
    with queue.run(command(1), ignore), queue.run(command(2, "b"), ignore):
        assert [await ids(queue, name) for name in ("a", "a", "b", "b")] == [[1], [], [1, 2], []]
    assert await ids(queue, "c") == []


async def test_command_ends_a_wait() -> None:
    queue = CommandQueue()
    waiting = [await start_poll(queue, name) for name in ("a", "b")]
    with queue.run(command(1), ignore):
        assert await asyncio.gather(*waiting) == [[1], [1]]


async def test_wait_for_a_command_of_another_process_continues() -> None:
    queue = CommandQueue()
    waiting = await start_poll(queue, "a")
    with queue.run(command(1, "b"), ignore):
        await assert_never(waiting.done, 0.01)
        with queue.run(command(2), ignore):
            assert await waiting == [2]


async def test_newer_poll_ends_an_older_one_and_gets_the_commands() -> None:
    queue = CommandQueue()
    older, other, newer = [await start_poll(queue, name) for name in ("a", "b", "a")]
    async with asyncio.timeout(5):
        with queue.run(command(1), ignore):  # before the older poll has ended
            assert await older == []
            assert [await newer, await other] == [[1], [1]]


async def test_end_of_an_older_poll_leaves_the_newer_one() -> None:
    queue = CommandQueue()
    older, newer = [await start_poll(queue, "a") for _ in range(2)]
    older.cancel()
    await asyncio.wait({older})
    with queue.run(command(1), ignore):
        assert await newer == [1]


async def test_result_of_a_command_that_has_ended_is_ignored() -> None:
    queue, results = CommandQueue(), list[SessionResult]()
    result = SessionResult("envoy-1", "a", is_incomplete=False, sessions=(), total=0)
    with queue.run(command(1), lambda result, _: results.append(result)):
        queue.put_result(2, result, None)
        queue.put_result(1, result, None)
    queue.put_result(1, result, None)
    assert results == [result]


async def test_result_that_is_earlier_than_its_command_counts() -> None:
    queue = CommandQueue()
    results: list[SessionResult] = []
    early, other = (SessionResult(name, name, False, (), 0) for name in ("a", "b"))
    queue.put_result(1, early, None)
    queue.put_result(2, other, None)
    with queue.run(command(1), lambda result, _: results.append(result)):
        assert results == [early]
