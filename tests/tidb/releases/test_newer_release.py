"""Sessions migrate to servers of newer releases with their state, and never to older ones."""

from __future__ import annotations

from contextlib import closing

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb_binaries import TidbRelease
from tests.support.tidb.node_operations import (
    migration_counts,
    start_drain,
    wait_for_migrations,
)
from tests.support.tidb.session_state_cases import CASES, compare_with_staying_sessions
from tests.support.tidb.sessions import TrackedSessions, query_rows, query_value, session_port
from tests.tidb.releases.conftest import drain_all_except, known_releases, node_of

pytestmark = pytest.mark.timeout(600)  # the first test starts the cluster


async def test_sessions_keep_their_state_on_newer_releases(
    stack: LocalCluster, upgrade: tuple[TidbRelease, TidbRelease], database: str
) -> None:
    node, newer_node = (node_of(stack.cluster, release) for release in upgrade)
    cases = [case for case in CASES if case.since <= upgrade[0].number]
    await drain_all_except(stack, node, newer_node)

    async def migrate(count: int) -> None:
        await start_drain(stack, node)
        await wait_for_migrations(stack, node, count)

    with closing(TrackedSessions(stack, database)) as sessions:
        actual, expected = await compare_with_staying_sessions(
            cases,
            node,
            sessions,
            database,
            migrate,
            # TiDB 6.5 can change no schema while a server of a newer release executes the changes.
            schema_node=stack.tidb[-1],
        )
    assert actual == expected


async def test_sessions_do_not_move_to_older_releases(stack: LocalCluster, newer: TidbRelease) -> None:
    node, index = node_of(stack.cluster, newer), known_releases().index(newer)
    await drain_all_except(stack, node, *stack.tidb[:index])
    with closing(TrackedSessions(stack, "test")) as sessions:
        session = sessions.on_node(node)
        query_rows(session, "set @a = 1")
        await start_drain(stack, node)

        async def was_refused() -> bool:
            return (await migration_counts(stack)).get((node.address, "stayed", "no_node"), 0) > 0

        await stack.wait_until(was_refused, "a migration without a target", 30.0)
        assert session_port(session) == node.port
        assert query_value(session, "select @a") == 1
