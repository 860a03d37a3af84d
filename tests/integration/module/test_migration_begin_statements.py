"""A session that is to move answers any text that begins a transaction as a server does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from tests.support.migration.differential import untyped
from tests.support.migration.fleet import fleet
from tests.support.migration.transaction_statements import CASES, Case, all_reach, different, run, unexpected

_TABLE = "begins.texts"


@pytest.mark.asyncio
async def test_texts_that_begin_a_transaction_are_answered_as_by_a_server(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with fleet(tmp_path, mariadb) as nodes:
        first, second = nodes.nodes
        admin = await nodes.wire()
        await admin.query("create database if not exists begins")

        async def empty() -> None:
            await admin.query(f"drop table if exists {_TABLE}")
            await admin.query(f"create table {_TABLE} (id int primary key)")

        async def at_first() -> None:
            nodes.drain(second)

        async def nothing(_: Sequence[Case]) -> None:
            pass

        async def drained(cases: Sequence[Case]) -> None:
            nodes.drain(first)
            await all_reach(second.node.sql_port, sum(case.is_pinned for case in cases))

        await empty()
        expected = await run(CASES, nodes.wire, _TABLE, nothing, at_first)
        assert unexpected(expected, stand_in=True) == []
        await empty()
        answers = await run(CASES, nodes.wire, _TABLE, drained, at_first)
        assert different(expected, answers, untyped) == []
        await admin.query("drop database begins")


@pytest.mark.asyncio
async def test_a_session_whose_transactions_never_end_is_reported(tmp_path: Path, mariadb: MariaDb) -> None:
    """It moves when one of them ends otherwise than by the next BEGIN."""
    async with fleet(tmp_path, mariadb, drained=[1]) as nodes:
        first, second = nodes.nodes
        wire = await nodes.wire()
        await wire.query("begin")
        await nodes.pinned("transaction")
        nodes.drain(first)
        await all_reach(second.node.sql_port, 1)
        await wire.query("begin")
        await nodes.pinned("endless_transactions")
        await wire.query("start transaction with consistent snapshot")
        await wire.query("select 1")
        assert nodes.sessions == [1, 0]
        await wire.query("commit")
        await nodes.settled(0, 1)
        await nodes.proxy.reports({("sessions_pinned", first.sql_address, "endless_transactions"): 0})
