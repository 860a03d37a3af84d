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


HOLDING_STATEMENTS = {
    "transaction": ("begin", "select 1", "commit"),
    "autocommit off": ("set autocommit = 0", "select * from t", "rollback"),
    "temporary table": ("create temporary table x (id int)", "insert into x values (1)", "drop table x"),
    "user lock": ("select get_lock('held', 1)", "select is_used_lock('held')", "select release_lock('held')"),
    "snapshot": ("set tidb_snapshot = now(6) - interval 1 second", "select 1", "set tidb_snapshot = ''"),
}
"""Statements that keep a session on its node: what begins, continues and ends it, by what it holds."""


async def test_session_migrates_when_it_holds_nothing_any_more(
    stack: LocalCluster, sessions: TrackedSessions
) -> None:
    node = stack.tidb[0]
    held = {}
    query_rows(sessions.direct(node), "create table t (id int)")
    for name, (begin, _, _) in HOLDING_STATEMENTS.items():
        held[name] = sessions.on_node(node)
        query_rows(held[name], begin)
        query_rows(held[name], HOLDING_STATEMENTS[name][1])
    moving = sessions.on_node(node)
    await start_drain(stack, node)
    await wait_for_migrations(stack, node, 1)
    assert session_port(moving) != node.port
    for name, (_, statement, _) in HOLDING_STATEMENTS.items():
        query_rows(held[name], statement)
        assert session_port(held[name]) == node.port, name
    for name, (_, _, end) in HOLDING_STATEMENTS.items():
        query_rows(held[name], end)
    await wait_for_migrations(stack, node, 1 + len(held))


async def test_migration_replaces_the_roles_of_a_session_by_its_default_roles(
    stack: LocalCluster, sessions: TrackedSessions
) -> None:
    """Documented in docs/concepts/session-migration.md: TiDB does not export roles."""
    node = stack.tidb[0]
    session = sessions.on_node(node)
    query_rows(session, "create role if not exists reader, writer")
    query_rows(session, "grant reader, writer to root@'%'")
    query_rows(session, "set default role reader to root@'%'")
    query_rows(session, "set role writer")

    def has_default_role(other: Tidb) -> bool:
        with connect_directly(other) as connection:
            return query_rows(connection, "select current_role()") == [("`reader`@`%`",)]

    try:
        for other in stack.tidb:  # each server reloads its privileges independently
            await wait_until(partial(has_default_role, other))
        await start_drain(stack, node)
        await wait_for_migrations(stack, node, 1)
        assert query_rows(session, "select current_role()") == [("`reader`@`%`",)]
    finally:
        query_rows(session, "drop role reader, writer")


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
