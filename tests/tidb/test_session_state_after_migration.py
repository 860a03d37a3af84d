"""After a migration, a session answers queries about its earlier statements as if it had stayed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pymysql

from sandbox.local_cluster import LocalCluster
from tests.support.tidb.node_operations import migration_counts, start_drain
from tests.support.tidb.sessions import (
    Connection,
    TrackedSessions,
    connect_directly,
    query_rows,
    session_port,
)
from tests.support.waiting import wait_until


@dataclass(frozen=True, slots=True)
class Case:
    """Statements before the migration, and queries after it; {t} is a table of this case."""

    before: tuple[str, ...]
    after: tuple[str, ...]


CASES = (
    Case(("insert into {t} (v) values (10), (20)",), ("select last_insert_id(), row_count()",)),
    Case(("select last_insert_id(18446744073709551615)",), ("select last_insert_id(), @@identity",)),
    Case(("update {t} set v = v + 1",), ("select row_count(), found_rows()", "select row_count()")),
    Case(("select * from {t}",), ("select found_rows(), row_count()",)),
    Case(("select sql_calc_found_rows * from {t} limit 1",), ("select found_rows()",)),
    Case(("select cast('12x' as unsigned), 1 / 0",), ("show warnings", "show warnings")),
    Case(
        ("select cast('ü' as unsigned)",), ("select @@warning_count, @@error_count", "show count(*) warnings")
    ),
    Case(("set no_such_variable = 1",), ("show errors", "select @@error_count")),
    Case(("set @a = 7, @b = 1.50, @c = 'ü', @d = null, @e = 1e3",), ("select @a, @b, @c, @d, @e, @f",)),
    Case(("set @b = x'00ff27'",), ("select hex(@b), length(@b)",)),
    Case(("set sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'",), ("select @@sql_mode", "select '\\'")),
    Case(("set time_zone = '+05:30'", "set timestamp = 1000"), ("select now(), @@time_zone",)),
    Case(("set names gbk",), ("select @@character_set_client, @@collation_connection",)),
    # TiDB restores character sets and collations in random order.
    *[
        Case(
            (f"set names utf8mb4 collate utf8mb4_general_ci /* {number} */",),
            ("select 'a' = 'A', @@collation_connection, @@character_set_connection",),
        )
        for number in range(8)
    ],
    Case(
        ("set names utf8mb4 collate utf8mb4_general_ci", "prepare s from 'select ''a'' = ''A'''"),
        ("execute s",),
    ),
    Case(
        (
            "set sql_mode = 'ANSI_QUOTES,PIPES_AS_CONCAT'",
            "prepare s from 'select ''a'' || ''b'', \"v\" from {t}'",
        ),
        ("execute s", "select @@sql_mode"),
    ),
    Case(("set wait_timeout = 0",), ("select @@wait_timeout",)),
    Case(("set autocommit = 0",), ("select @@autocommit",)),
    Case(("set session transaction isolation level read committed",), ("select @@tx_isolation",)),
    Case(("set transaction isolation level read committed",), ("select @@tx_isolation_one_shot",)),
    Case(("use mysql",), ("select database()", "select count(*) > 0 from user")),
    Case(("prepare s from 'select ? + v from {t} order by v'", "set @p = 5"), ("execute s using @p",) * 2),
    Case(("prepare s from 'select 1'", "deallocate prepare s"), ("execute s",)),
    Case(
        ("set names utf8", "prepare s from 'select hex(?), ''süß?'''", "set @p = 5"),
        ("execute s using @p",),
    ),
    Case(
        ("create sequence {t}_s", "select nextval({t}_s)"), ("select lastval({t}_s)", "select lastval({t}_s)")
    ),
    Case(("set rand_seed1 = 11, rand_seed2 = 22", "select rand()"), ("select rand(), rand()",)),
    Case(("set sql_select_limit = 2",), ("select v from {t} order by v",)),
    Case(("set group_concat_max_len = 4",), ("select group_concat(v) from {t}",)),
    Case(
        ("set max_execution_time = 1234, tidb_mem_quota_query = 99999999",), ("select @@max_execution_time",)
    ),
    Case(
        ("create session binding for select v from {t} using select /*+ use_index({t}) */ v from {t}",),
        ("select v from {t} order by v", "select v from {t}", "select @@last_plan_from_binding"),
    ),
)


def run_statement(connection: Connection, statement: str) -> list[tuple[Any, ...]]:
    """Return the rows of a statement, or code and text of its error."""
    try:
        return query_rows(connection, statement)
    except pymysql.MySQLError as error:
        return [error.args]


async def test_migrated_session_answers_like_one_that_stayed(
    stack: LocalCluster, sessions: TrackedSessions, database: str
) -> None:
    node = stack.tidb[0]
    # Tables have the same names in both databases, so that error messages are equal.
    databases = [f"{database}_{kind}" for kind in ("migrated", "stayed")]
    with connect_directly(node) as root:
        for database_name in databases:
            query_rows(root, f"create database {database_name}")
            for number, case in enumerate(CASES):
                if "{t}" in "".join(case.before + case.after):
                    query_rows(
                        root,
                        f"create table {database_name}.t{number} (id int auto_increment primary key, v int)",
                    )
                    query_rows(root, f"insert into {database_name}.t{number} (v) values (1), (2), (3)")
    pairs = []
    for number, case in enumerate(CASES):
        migrating, staying = sessions.on_node(node), sessions.direct(node)
        # `on_node` has run this query in the migrating session, so run it in both sessions.
        assert session_port(staying) == node.port
        for session, database_name in zip((migrating, staying), databases, strict=True):
            query_rows(session, f"use {database_name}")
            for statement in case.before:
                with suppress(pymysql.MySQLError):
                    query_rows(session, statement.format(t=f"t{number}"))
        pairs.append((number, case, migrating, staying))
    await start_drain(stack, node)

    async def have_all_migrated() -> bool:
        return (await migration_counts(stack)).get((node.address, "moved", "ok"), 0) >= len(CASES)

    await stack.wait_until(have_all_migrated, f"{len(CASES)} migrations")
    actual, expected = {}, {}
    for number, case, migrating, staying in pairs:
        name = "; ".join(case.before)
        statements = [statement.format(t=f"t{number}") for statement in case.after]
        actual[name] = [run_statement(migrating, statement) for statement in statements]
        expected[name] = [run_statement(staying, statement) for statement in statements]
        assert session_port(migrating) != node.port
    assert actual == expected


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
