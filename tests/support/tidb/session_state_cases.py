"""Statements that give a session some state, and queries that show this state, for tests of migrations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pymysql

from sandbox.tidb import Tidb
from tests.support.tidb.sessions import (
    Connection,
    TrackedSessions,
    connect_directly,
    query_rows,
    session_port,
)

ERROR = "error"


@dataclass(frozen=True, slots=True)
class Case:
    """Statements before the migration, and queries after it; {t} is a table of this case.

    `has_errors`: whether some of them are meant to fail. `since`: the first release that knows them,
    and whose answers have the same types as those of newer ones.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    has_errors: bool = False
    since: tuple[int, int] = (0, 0)


CASES = (
    Case(("insert into {t} (v) values (10), (20)",), ("select last_insert_id(), row_count()",)),
    Case(
        ("select last_insert_id(18446744073709551615)",),
        ("select last_insert_id(), @@identity",),
        since=(7, 5),
    ),
    Case(("update {t} set v = v + 1",), ("select row_count(), found_rows()", "select row_count()")),
    Case(("select * from {t}",), ("select found_rows(), row_count()",)),
    Case(
        ("set tidb_enable_noop_functions = 1", "select sql_calc_found_rows * from {t} limit 1"),
        ("select found_rows()",),
    ),
    Case(("select cast('12x' as unsigned), 1 / 0",), ("show warnings", "show warnings")),
    Case(
        ("select cast('ü' as unsigned)",), ("select @@warning_count, @@error_count", "show count(*) warnings")
    ),
    Case(("set no_such_variable = 1",), ("show errors", "select @@error_count"), has_errors=True),
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
    Case(("prepare s from 'select 1'", "deallocate prepare s"), ("execute s",), has_errors=True),
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
        (
            "create resource group if not exists {t}_group ru_per_sec = 1000000",
            "set resource group {t}_group",
        ),
        ("select current_resource_group()",),
        since=(7, 1),
    ),
    Case(
        ("set tidb_snapshot = now(6) - interval 1 second", "set tidb_snapshot = ''"),
        ("select count(*) from {t}",),
    ),
    Case(("set @@foreign_key_checks = 0, @@unique_checks = 0",), ("select @@foreign_key_checks",)),
    Case(
        ("set @@tidb_isolation_read_engines = 'tikv,tidb'", "set @@tidb_opt_agg_push_down = 1"),
        ("select @@tidb_isolation_read_engines, @@tidb_opt_agg_push_down",),
    ),
    Case(("create temporary table x (id int)", "drop table x"), ("show tables like 'x'",)),
    Case(
        ("select get_lock('{t}', 0)", "select release_lock('{t}')"),
        ("select is_used_lock('{t}')",),
        since=(7, 5),
    ),
    Case(
        ("create session binding for select v from {t} using select /*+ use_index({t}) */ v from {t}",),
        ("select v from {t} order by v", "select v from {t}", "select @@last_plan_from_binding"),
    ),
    Case(
        ("create index h type hypo on {t} (v)",),
        ("explain format = 'brief' select v from {t} where v = 1",),
        since=(7, 5),
    ),
    Case(
        ("alter table {t} set hypo tiflash replica 1",),
        ("explain format = 'brief' select /*+ read_from_storage(tiflash[{t}]) */ v from {t}",),
        since=(7, 5),
    ),
)


def run_statement(connection: Connection, statement: str) -> list[tuple[Any, ...]]:
    """Return the rows of a statement, a plan without its numbers of rows, or ERROR, code and text."""
    try:
        rows = query_rows(connection, statement)
    except pymysql.MySQLError as error:
        return [(ERROR, *error.args)]
    if statement.startswith("explain"):
        # Each server estimates the numbers of rows from its own statistics, which change in the background.
        return [(operator, *others) for operator, _, *others in rows]
    return rows


def is_error(answer: list[tuple[Any, ...]]) -> bool:
    """Return whether an answer of `run_statement` is an error."""
    return len(answer) == 1 and len(answer[0]) == 3 and answer[0][0] == ERROR


Answers = Mapping[str, list[list[tuple[Any, ...]]]]
"""The answers to the queries of each case, by the statements before the migration."""


async def compare_with_staying_sessions(
    cases: Sequence[Case],
    node: Tidb,
    sessions: TrackedSessions,
    database: str,
    migrate: Callable[[int], Awaitable[None]],
    *,
    schema_node: Tidb | None = None,
) -> tuple[Answers, Answers]:
    """Return the answers of sessions that migrate away from `node`, and of sessions that stay there.

    `migrate` gets the number of sessions, and returns when all of them have migrated. `schema_node` creates
    the tables; by default, that is `node`.
    """
    # Tables have the same names in both databases, so that error messages are equal.
    databases = [f"{database}_{kind}" for kind in ("migrated", "stayed")]
    with connect_directly(schema_node or node) as root:
        for database_name in databases:
            query_rows(root, f"create database {database_name}")
            for number, case in enumerate(cases):
                if "{t}" in "".join(case.before + case.after):
                    query_rows(
                        root,
                        f"create table {database_name}.t{number} (id int auto_increment primary key, v int)",
                    )
                    query_rows(root, f"insert into {database_name}.t{number} (v) values (1), (2), (3)")
    pairs = []
    for number, case in enumerate(cases):
        migrating, staying = sessions.on_node(node), sessions.direct(node)
        # `on_node` has run this query in the migrating session, so run it in both sessions.
        assert session_port(staying) == node.port
        for session, database_name in zip((migrating, staying), databases, strict=True):
            query_rows(session, f"use {database_name}")
            for statement in case.before:
                try:
                    query_rows(session, statement.format(t=f"t{number}"))
                except pymysql.MySQLError:
                    if not case.has_errors:
                        raise
        pairs.append((number, case, migrating, staying))
    await migrate(len(pairs))
    actual, expected = {}, {}
    for number, case, migrating, staying in pairs:
        name = "; ".join(case.before)
        statements = [statement.format(t=f"t{number}") for statement in case.after]
        actual[name] = [run_statement(migrating, statement) for statement in statements]
        expected[name] = [run_statement(staying, statement) for statement in statements]
        assert case.has_errors or not any(map(is_error, expected[name])), expected[name]
        assert session_port(migrating) != node.port
    return actual, expected
