"""A move that fails after the export: the session stays on its node, unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox.local_cluster import Stack
from sandbox.tidb_cluster import TidbCluster
from tests.support.e2e.cluster import client
from tests.support.tidb.node_operations import admits, moves, start_drain, until_admitted
from tests.support.tidb.sessions import direct, rows

USER = "leaving"


@pytest.fixture
def account(cluster: TidbCluster) -> Iterator[str]:
    """A user who may log in at first."""
    with direct(cluster.tidb[0]) as root:
        rows(root, f"create user {USER}")
        rows(root, f"grant all on *.* to {USER}")
        yield USER
        rows(root, f"drop user {USER}")


async def test_prepared_statements_keep_their_numbers(
    stack: Stack, cluster: TidbCluster, account: str
) -> None:
    await until_admitted(cluster.tidb, account)
    async with client(stack.sql_port) as session:
        assert (await session.enter(account))[0] == 0x00
        first = await session.prepare(b"select 'first'")
        ((port,),) = await session.rows("select @@port")
        (node,) = [one for one in cluster.tidb if str(one.port) == port]
        with direct(cluster.tidb[0]) as root:
            rows(root, f"alter user {account} account lock")
        # Each node reloads its privileges at its own time.
        await stack.wait_until(lambda: not any(admits(one, account) for one in cluster.tidb), "the lock")
        await start_drain(stack, node)

        async def failed() -> bool:
            return bool(await moves(stack))

        await stack.wait_until(failed, "a move that failed")
        assert set(await moves(stack)) == {(node.address, "stayed", "denied")}
        assert await session.rows("select @@port") == [(port,)]
        second = await session.prepare(b"select 'second'")
        assert second != first
        assert [row[-5:] for row in await session.execute(first)] == [b"first"]
