"""While a session waits for its migration, the module answers statements that begin a transaction.

Its answers must equal those of a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from tests.support.migration.differential import keep_column_names
from tests.support.migration.fleet import run_fleet
from tests.support.migration.transaction_statements import (
    TRANSACTION_CASES,
    TransactionCase,
    find_differences,
    find_unexpected,
    run_cases,
    wait_until_greeted,
)

_TABLE = "begins.texts"


@pytest.mark.asyncio
async def test_begin_statements_are_answered_as_by_a_server(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as nodes:
        first, second = nodes.nodes
        admin = await nodes.connect_answer_client()
        await admin.query("create database if not exists begins")

        async def recreate_table() -> None:
            await admin.query(f"drop table if exists {_TABLE}")
            await admin.query(f"create table {_TABLE} (id int primary key)")

        async def stay(*_: Sequence[TransactionCase]) -> None:
            pass

        async def undrain_first() -> None:
            async with nodes.proxy.wait_applied():
                nodes.drain(second)

        async def drain_first(cases: Sequence[TransactionCase]) -> None:
            async with nodes.proxy.wait_applied():
                nodes.drain(first)
            await wait_until_greeted(second.node.sql_port, sum(case.is_pinned for case in cases))

        await recreate_table()
        expected = await run_cases(TRANSACTION_CASES, nodes.connect_answer_client, _TABLE, stay, stay)
        assert find_unexpected(expected, is_fake=True) == []
        await recreate_table()
        answers = await run_cases(
            TRANSACTION_CASES, nodes.connect_answer_client, _TABLE, drain_first, undrain_first
        )
        assert find_differences(expected, answers, keep_column_names) == []
        await admin.query("drop database begins")


@pytest.mark.asyncio
async def test_session_with_back_to_back_transactions_is_reported(tmp_path: Path, mariadb: MariaDb) -> None:
    """The session migrates only when a transaction ends and the next one does not begin at once."""
    async with run_fleet(tmp_path, mariadb, drained=[1]) as nodes:
        first, second = nodes.nodes
        client = await nodes.connect_answer_client()
        await client.query("begin")
        await nodes.wait_pinned("transaction")
        nodes.drain(first)
        await wait_until_greeted(second.node.sql_port, 1)
        await client.query("begin")
        await nodes.wait_pinned("endless_transactions")
        await client.query("start transaction with consistent snapshot")
        await client.query("select 1")
        assert nodes.sessions == [1, 0]
        await client.query("commit")
        await nodes.wait_session_counts(0, 1)
        await nodes.proxy.wait_for_metrics(
            {("sessions_pinned", first.sql_address, "endless_transactions"): 0}
        )
