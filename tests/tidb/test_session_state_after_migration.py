"""After a migration, a session answers queries about its earlier statements as if it had stayed."""

from __future__ import annotations

from functools import partial

from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from tests.support.tidb.node_operations import migration_counts, start_drain, wait_for_migrations
from tests.support.tidb.session_state_cases import CASES, compare_with_staying_sessions
from tests.support.tidb.sessions import TrackedSessions, connect_directly, query_rows, session_port
from tests.support.waiting import wait_until


async def test_migrated_session_answers_like_one_that_stayed(
    stack: LocalCluster, sessions: TrackedSessions, database: str
) -> None:
    node = stack.tidb[0]

    async def drain(migrations: int) -> None:
        await start_drain(stack, node)
        await wait_for_migrations(stack, node, migrations)

    actual, expected = await compare_with_staying_sessions(CASES, node, sessions, database, drain)
    assert actual == expected


PINNING_STATEMENTS = {
    "transaction": ("begin", "select 1", "commit"),
    "autocommit off": ("set autocommit = 0", "select * from t", "rollback"),
    "temporary table": ("create temporary table x (id int)", "insert into x values (1)", "drop table x"),
    "user lock": ("select get_lock('held', 1)", "select is_used_lock('held')", "select release_lock('held')"),
    "snapshot": ("set tidb_snapshot = now(6) - interval 1 second", "select 1", "set tidb_snapshot = ''"),
}
"""Three statements for each state that keeps a session on its node: they begin, use and end it."""


async def test_pinned_session_migrates_when_it_is_released(
    stack: LocalCluster, sessions: TrackedSessions
) -> None:
    node = stack.tidb[0]
    pinned = {}
    query_rows(sessions.direct(node), "create table t (id int)")
    for name, (begin, _, _) in PINNING_STATEMENTS.items():
        pinned[name] = sessions.on_node(node)
        query_rows(pinned[name], begin)
        query_rows(pinned[name], PINNING_STATEMENTS[name][1])
    moving = sessions.on_node(node)
    await start_drain(stack, node)
    await wait_for_migrations(stack, node, 1)
    assert session_port(moving) != node.port

    async def are_all_refused() -> bool:
        counts = await migration_counts(stack)
        pinned_now = (await stack.nodes())[node.address]["drain_progress"]["not_movable"]
        by_node = [counts.get((node.address, "stayed", reason), 0) for reason in ("refused", "states")]
        return by_node[0] >= 2 and by_node[1] >= 1 and pinned_now == {"transaction": 2}

    await stack.wait_until(are_all_refused, "three refused sessions and two transactions", 30.0)
    for name, (_, statement, _) in PINNING_STATEMENTS.items():
        query_rows(pinned[name], statement)
        assert session_port(pinned[name]) == node.port, name
    for name, (_, _, end) in PINNING_STATEMENTS.items():
        query_rows(pinned[name], end)
    await wait_for_migrations(stack, node, 1 + len(pinned))


async def test_migration_replaces_the_roles_of_a_session_by_its_default_roles(
    stack: LocalCluster, sessions: TrackedSessions
) -> None:
    """Documented in docs/concepts/session-migration.md: TiDB does not export roles."""
    node = stack.tidb[0]
    session, root = sessions.on_node(node), sessions.direct(node)

    def has_default_role(other: Tidb) -> bool:
        with connect_directly(other) as connection:
            return query_rows(connection, "select current_role()") == [("`reader`@`%`",)]

    try:
        query_rows(root, "create role reader, writer")
        query_rows(root, "grant reader, writer to root@'%'")
        query_rows(root, "set default role reader to root@'%'")
        query_rows(session, "set role writer")
        for other in stack.tidb:  # each server reloads its privileges independently
            await wait_until(partial(has_default_role, other))
        await start_drain(stack, node)
        await wait_for_migrations(stack, node, 1)
        assert query_rows(session, "select current_role()") == [("`reader`@`%`",)]
    finally:
        query_rows(root, "drop role if exists reader, writer")


async def test_session_stays_while_its_states_cannot_be_restored(
    stack: LocalCluster, sessions: TrackedSessions
) -> None:
    node = stack.tidb[0]
    session, other = sessions.on_node(node), sessions.on_node(node)
    query_rows(session, "set character_set_results = ascii")
    query_rows(session, "prepare s from 'select hex(''süß'')'")
    # TiDB exports the timestamp even after the transaction that it was for.
    query_rows(other, "set transaction read only as of timestamp now(6) - interval 1 second")
    query_rows(other, "select 1 from mysql.user limit 1")
    await start_drain(stack, node)

    async def has_stayed() -> bool:
        return (await migration_counts(stack)).get((node.address, "stayed", "states"), 0) >= 2

    await stack.wait_until(has_stayed, "two migrations that failed")
    assert query_rows(session, "execute s") == [("süß".encode().hex().upper(),)]
    assert session_port(session) == session_port(other) == node.port
    query_rows(session, "deallocate prepare s")
    query_rows(other, "set tx_read_ts = ''")
    await wait_until(lambda: node.port not in (session_port(session), session_port(other)), 60)
