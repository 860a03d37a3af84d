"""State survives a migration: answers equal those of a MariaDB session that does not migrate."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import pymysql
import pytest

from sandbox.mariadb import MariaDb
from tests.support.clients.server import PemFiles
from tests.support.migration.differential import keep_column_names
from tests.support.migration.fleet import MigratingFleet, mariadb_session, run_fleet
from tests.support.migration.sql_client import Answer, AnswerClient
from tests.support.waiting import assert_nothing_received

# All tests share one Envoy, because it starts slowly.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class StateCase:
    """Statements that change a session's state, and queries that read it, all encoded in `codec`.

    `{db}` is replaced by an existing database. Statements may fail.
    """

    name: str
    statements: tuple[str, ...]
    queries: tuple[str, ...]
    codec: str = "utf-8"

    async def run(self, client: AnswerClient, database: str) -> None:
        for statement in self.statements:
            await client.query(statement.replace("{db}", database).encode(self.codec))

    async def read(self, client: AnswerClient, database: str) -> list[Answer]:
        texts = (query.replace("{db}", database).encode(self.codec) for query in self.queries)
        return [await client.query(query) for query in texts]


SETTING_CASES = (
    StateCase(
        "user variables",
        (
            "set @a = -5, @b = 18446744073709551615, @c = 1.50, @d = -1e100, @e = 'süß', @f = x'ff0041'",
            "set @g = null, @h = _latin1 x'e4' collate latin1_german1_ci, @i = '', @j = '\U0001f600'",
            "set @`o``d d ü` = 'it''s \\\\ \\\\\\\\ \\\" \\n \\0 \\Z'",
            "set @k = '\\\\u0041 \\u2028', @l = '\\'\\''",
        ),
        (
            *(f"select hex(@{name}), collation(@{name}), @{name}" for name in "abcdefghijkl"),
            "select @`o``d d ü`, hex(@`o``d d ü`)",
            "select @b + 0, @a + 0, @c + 1",
        ),
    ),
    StateCase(
        "user variables named like keys of the states",
        ("set @`sys-vars` = '{\"sql_mode\":\"\"}', @`current-db` = 'mysql', @`'` = '\\'', @`\\` = '\\\\'",),
        ("select @`sys-vars`, @`current-db`, @`'`, @`\\`, database(), @@sql_mode",),
    ),
    StateCase(
        "a user variable of megabytes",
        ("set @a = repeat('tidevoy!', 250000)",),
        ("select length(@a), md5(@a)",),
    ),
    StateCase(
        "system variables",
        (
            "set lc_time_names = 'de_DE', group_concat_max_len = 77777, sql_select_limit = 3",
            "set wait_timeout = 1234, max_statement_time = 55.5, div_precision_increment = 7",
            "set foreign_key_checks = 0, unique_checks = off, big_tables = 1, lock_wait_timeout = 3",
            "set innodb_lock_wait_timeout = 7, auto_increment_increment = 10, optimizer_switch='mrr=on'",
        ),
        (
            "select @@lc_time_names, @@group_concat_max_len, @@sql_select_limit, @@wait_timeout",
            "select @@max_statement_time, @@div_precision_increment, 1 / 3, @@foreign_key_checks",
            "select @@unique_checks, @@big_tables, @@lock_wait_timeout, @@innodb_lock_wait_timeout",
            "select @@auto_increment_increment, @@optimizer_switch like '%mrr=on%', monthname('2026-03-01')",
            "select seq from mysql.seq_1_to_9",
        ),
    ),
    StateCase(
        "time zone",
        ("set time_zone = '+03:45'",),
        ("select @@time_zone, from_unixtime(0), unix_timestamp('2026-01-01')",),
    ),
    StateCase("current database by USE", ("use {db}",), ("select database()", "show tables")),
    StateCase("no database", ("select 1",), ("select database()", "show tables")),
    StateCase("a database after another", ("use {db}", "use mysql"), ("select database()",)),
    StateCase(
        "a database with an odd name",
        ("create database if not exists `o'd\"d \\ ü`", "use `o'd\"d \\ ü`"),
        ("select database()",),
    ),
    StateCase(
        "sql_mode with NO_BACKSLASH_ESCAPES",
        (
            "set @a = 'it''s \\\\ \"', sql_mode = 'NO_BACKSLASH_ESCAPES'",
            "set @b = '\\n\\', @c = 'it''s \\ \"'",
        ),
        ("select @@sql_mode, '\\', length('\\n'), @a, @b, @c",),
    ),
    StateCase(
        "sql_mode with ANSI_QUOTES",
        ("set @a = 'it''s \"q\"', sql_mode = 'ANSI_QUOTES,PIPES_AS_CONCAT'", 'set @"b" = \'"\''),
        ("select @@sql_mode, 'a' || 'b', 1 as \"a b\", @a, @b", 'select "no column"'),
    ),
    StateCase(
        "sql_mode with both, not strict",
        ("set sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,IGNORE_SPACE'", "set @a = '\\', @b = '''\"'"),
        ("select @@sql_mode, @a, @b, '\\' as \"\\\", count (*)",),
    ),
    StateCase("an empty sql_mode", ("set sql_mode = ''",), ("select @@sql_mode, 1 || 0",)),
    StateCase(
        "different character sets",
        (
            "set names utf8mb4 collate utf8mb4_unicode_ci",
            "set character_set_connection = latin1, character_set_results = NULL",
        ),
        (
            "select @@character_set_client, @@character_set_results, @@character_set_connection",
            "select @@collation_connection, 'ü', hex('ü'), charset('x')",
        ),
    ),
    StateCase(
        "gbk",
        ("set names gbk", "set @n = 1, @a = '中運'"),
        (
            "select '中', hex('中'), charset('中'), @@character_set_results",
            "select '\\\\', '運', @a, hex(@a)",
        ),
        "gbk",
    ),
    StateCase(
        "latin1",
        ("set names latin1", "set @n = 1, @a = 'süß'"),
        ("select 'süß', hex('süß'), collation('ü'), @@character_set_client, @a, hex(@a)",),
        "latin-1",
    ),
    StateCase(
        "autocommit=0",
        ("set autocommit = 0",),
        ("select @@autocommit", "select count(*) from {db}.t", "rollback"),
    ),
    StateCase(
        "isolation level and read only",
        ("set session transaction isolation level serializable", "set session transaction read only"),
        ("select @@tx_isolation, @@tx_read_only", "insert into {db}.nothing values (1)"),
    ),
    StateCase(
        "named prepared statements",
        (
            "use {db}",
            "create table if not exists named (id int primary key)",
            "replace into named values (7)",
            "prepare One from 'select id + ? as \\'it\\'\\'s\\' from named'",
            "set @text = 'select ''from a variable: ü \\\\\\\\''', @by = 3",
            "prepare two from @text",
            "prepare three from 'select 3'",
            "deallocate prepare three",
            "use mysql",
        ),
        ("execute one using @by", "execute TWO", "execute three", "select database(), @text"),
    ),
)

DIAGNOSTICS_CASES = (
    StateCase("ROW_COUNT", ("replace into {db}.t values (1), (2), (3)",), ("select row_count()",)),
    StateCase("ROW_COUNT after a result", ("select 1",), ("select row_count()",)),
    StateCase("ROW_COUNT after an error", ("insert into nowhere values (1)",), ("select row_count()",)),
    StateCase(
        "FOUND_ROWS",
        ("select sql_calc_found_rows seq from mysql.seq_1_to_77 limit 3",),
        ("select found_rows()",),
    ),
    StateCase(
        "FOUND_ROWS and ROW_COUNT",
        ("select seq from mysql.seq_1_to_9", "replace into {db}.t values (1), (2)"),
        ("select found_rows(), row_count()", "select found_rows(), row_count()"),
    ),
    StateCase(
        "LAST_INSERT_ID",
        ("insert into {db}.auto (v) values (1), (2)", "insert into {db}.auto (v) values (3)"),
        ("select last_insert_id() - min(id) from {db}.auto", "select last_insert_id() is null"),
    ),
    StateCase(
        "LAST_INSERT_ID of 64 bits",
        ("select last_insert_id(18446744073709551615)",),
        ("select last_insert_id()", "select last_insert_id()"),
    ),
    StateCase(
        "warnings",
        ("select cast('12x' as unsigned) + cast('ü\"\\'\\\\' as unsigned)",),
        ("show warnings", "show count(*) warnings", "select @@warning_count", "show errors"),
    ),
    StateCase(
        "warnings of a statement that changes rows",
        ("insert ignore into {db}.t values (1), ('x'), (1)",),
        ("show warnings", "select count(*) from mysql.seq_1_to_2", "show warnings"),
    ),
    StateCase(
        "an error",
        ("select * from {db}.nowhere",),
        ("show errors", "show warnings", "select @@error_count", "show count(*) errors"),
    ),
    StateCase("no warnings", ("select 1",), ("show warnings", "select @@warning_count")),
)


@pytest.fixture
def tables(mariadb: MariaDb, database: str) -> str:
    """Create the tables of the `StateCase`s. Return the database's name."""
    with pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True) as connection:
        connection.query(f"create table {database}.t (id int primary key)")
        connection.query(f"create table {database}.auto (id int auto_increment primary key, v int)")
    return database


@pytest.mark.parametrize("case", SETTING_CASES, ids=lambda case: case.name)
async def test_settings_survive_migrations(
    nodes: MigratingFleet, mariadb: MariaDb, tables: str, case: StateCase
) -> None:
    async with mariadb_session(mariadb) as reference:
        await case.run(reference, tables)
        expected = await case.read(reference, tables)
    client = await nodes.connect_answer_client()
    await case.run(client, tables)
    assert await case.read(client, tables) == expected
    for _ in range(2):
        await nodes.migrate_all()
        assert await case.read(client, tables) == expected


async def test_large_states_survive_migrations_with_tls(
    tmp_path: Path, mariadb: MariaDb, tables: str
) -> None:
    """Client, Envoy and nodes use TLS. More than 1 MiB of states arrives in many TLS records."""
    case = StateCase("", ("use {db}", "set @a = repeat('tidevoy!', 200000)"), ("select md5(@a), database()",))
    async with mariadb_session(mariadb) as reference:
        await case.run(reference, tables)
        expected = await case.read(reference, tables)
    async with run_fleet(tmp_path, mariadb, tls=PemFiles.create(tmp_path / "certificates")) as nodes:
        client = await nodes.connect_answer_client()
        await case.run(client, tables)
        for _ in range(2):
            await nodes.migrate_all()
            assert await case.read(client, tables) == expected


async def test_migration_does_not_restart_wait_timeout(nodes: MigratingFleet) -> None:
    """wait_timeout starts at the last statement, not at the last migration."""
    client = await nodes.connect_answer_client()
    await client.query("set wait_timeout = 4")
    started = time.monotonic()
    for _ in range(2):
        await assert_nothing_received(client.reader, 0.7)
        await nodes.migrate_all()
    migrated = time.monotonic()
    async with asyncio.timeout(6):
        await client.reader.read()
    ended = time.monotonic()
    assert ended - started > 3.9
    assert ended - migrated < 3.3


@pytest.mark.parametrize("case", DIAGNOSTICS_CASES, ids=lambda case: case.name)
async def test_diagnostics_of_the_last_statement_survive_migrations(
    nodes: MigratingFleet, mariadb: MariaDb, tables: str, case: StateCase
) -> None:
    """Each query runs only once, because it changes ROW_COUNT() and the other diagnostics."""
    async with mariadb_session(mariadb) as reference:
        await case.run(reference, tables)
        expected = [keep_column_names(answer) for answer in await case.read(reference, tables)]
        await reference.query(f"truncate {tables}.t")
        await reference.query(f"truncate {tables}.auto")
    client = await nodes.connect_answer_client()
    await case.run(client, tables)
    for _ in range(2):
        await nodes.migrate_all()
    assert [keep_column_names(answer) for answer in await case.read(client, tables)] == expected
