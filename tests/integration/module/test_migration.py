"""Sessions that move from one node to another, and clients that do not notice."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandbox.mariadb import MariaDb
from tests.support.migration.fleet import query_rows, run_fleet
from tests.support.waiting import wait_until


async def test_an_idle_session_leaves_a_node_that_is_drained(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb) as all_:
        client = await all_.connect_driver()
        await query_rows(client, "set @a = 7")
        for _ in range(3):
            await all_.migrate_all()
            assert await query_rows(client, "select @a, 1 + 1") == [(7, 2)]
        await client.ensure_closed()


async def test_sessions_that_work_move_between_two_statements(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb) as all_:
        over = asyncio.Event()

        async def work(number: int) -> int:
            client, count = await all_.connect_driver(), 0
            await query_rows(client, f"set @count = 0, @own = {number}")
            while not over.is_set():
                await query_rows(client, "set @count = @count + 1")
                count += 1
                if number % 2:
                    await query_rows(client, "begin")
                    await query_rows(client, "select 1")
                    await query_rows(client, "commit")
                assert await query_rows(client, "select @count, @own") == [(count, number)]
            await client.ensure_closed()
            return count

        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work(number)) for number in range(16)]
            for turn in range(10):
                await wait_until(lambda: sum(all_.sessions) >= 16)
                all_.drain(all_.nodes[turn % 2])
                await wait_until(lambda turn=turn: all_.sessions[turn % 2] == 0)  # type: ignore[misc]
            over.set()
        print([worker.result() for worker in workers])
