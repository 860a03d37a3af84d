"""Sessions migrate from one node to another, and their clients do not notice."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandbox.mariadb import MariaDb
from tests.support.migration.fleet import run_fleet
from tests.support.tidb_sim_clients import query_rows
from tests.support.waiting import wait_until


async def test_busy_sessions_migrate_between_two_statements(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb) as fleet:
        stop = asyncio.Event()

        async def work(number: int) -> int:
            client, count = await fleet.connect_driver(), 0
            await query_rows(client, f"set @count = 0, @own = {number}")
            while not stop.is_set():
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
            for round_number in range(10):
                await wait_until(lambda: sum(fleet.sessions) >= 16)
                fleet.drain(fleet.nodes[round_number % 2])
                await wait_until(lambda round_number=round_number: fleet.sessions[round_number % 2] == 0)  # type: ignore[misc]
            stop.set()
        print([worker.result() for worker in workers])
