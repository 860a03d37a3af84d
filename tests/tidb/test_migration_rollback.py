"""A migration fails after the export: the session stays on its node, unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb_cluster import TidbCluster
from tests.support.e2e.cluster import counting_client
from tests.support.tidb.node_operations import (
    can_log_in,
    migration_counts,
    start_drain,
    wait_until_can_log_in,
)
from tests.support.tidb.sessions import connect_directly, query_rows

USER = "leaving"


@pytest.fixture
def account(cluster: TidbCluster) -> Iterator[str]:
    """Create a user who can log in until the test locks the account."""
    with connect_directly(cluster.tidb[0]) as root:
        query_rows(root, f"create user {USER}")
        query_rows(root, f"grant all on *.* to {USER}")
        yield USER
        query_rows(root, f"drop user {USER}")


async def test_prepared_statements_keep_their_ids(
    stack: LocalCluster, cluster: TidbCluster, account: str
) -> None:
    await wait_until_can_log_in(cluster.tidb, account)
    async with counting_client(stack.sql_port) as session:
        assert (await session.log_in(account))[0] == 0x00
        first = await session.prepare(b"select 'first'")
        ((port,),) = await session.rows("select @@port")
        (node,) = [candidate for candidate in cluster.tidb if str(candidate.port) == port]
        with connect_directly(cluster.tidb[0]) as root:
            query_rows(root, f"alter user {account} account lock")
        # Each node reloads its privileges independently.
        await stack.wait_until(
            lambda: not any(can_log_in(candidate, account) for candidate in cluster.tidb), "the lock"
        )
        await start_drain(stack, node)

        async def has_failed() -> bool:
            return bool(await migration_counts(stack))

        await stack.wait_until(has_failed, "a failed migration")
        assert set(await migration_counts(stack)) == {(node.address, "stayed", "denied")}
        assert await session.rows("select @@port") == [(port,)]
        second = await session.prepare(b"select 'second'")
        assert second != first
        assert [row[-5:] for row in await session.execute(first)] == [b"first"]
