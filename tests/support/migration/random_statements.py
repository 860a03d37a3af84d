"""Random activities of clients in sessions that migrate."""

from __future__ import annotations

from random import Random

from sandbox.tidb_sim.packets import MAX_PACKET_PAYLOAD, MySqlCommand
from tests.support.migration.differential import Activity, SentCommand, SessionPair, query_command
from tests.support.migration.sql_client import ParameterSource, fetch_body, long_data_body

TEXTS = ("", "a", "it''s", "süß", "中文", "\\\\ \\n \\'", "\U0001f600", "x" * 300)
FAILING_STATEMENTS = (
    "select * from {db}.nowhere",
    "selec 1",
    "insert into t (id, v) values (1, 'first'), (1, 'twice')",
    "select 1 +",
    "set nothing_known = 1",
    "select (select v from t union select 'another')",
)


def random_size(rng: Random) -> int:
    """Return the size of a value in bytes: mostly small, at most 1 MiB."""
    return int(2 ** (rng.random() ** 2 * 20))


def random_statement(pair: SessionPair) -> str:
    """Return a statement that can be executed at any point, possibly with an error."""
    rng = pair.rng
    number, word = rng.randrange(1, 40), rng.choice(TEXTS)
    return rng.choice(
        (
            f"select {number}, '{word}', null",
            f"select id, v from t where id <= {number} order by id",
            "select count(*), max(id) from t",
            f"insert into t (v) values ('{word}'), ('{number}')",
            f"update t set v = concat(left(v, 5), '{number}') where id % 7 = {number % 7}",
            f"delete from t where id = {number}",
            f"replace into t (id, v) values ({number}, '{word}')",
            f"set @a = '{word}', @n = {number}",
            "select @a, @n, hex(@a)",
            f"select repeat('{number}', {random_size(rng)}), {number}",
            f"select seq, repeat('x', seq) from {pair.sequence(random_size(rng) % 1500 + 1)}",
            "select database(), @@autocommit, @@sql_mode, @@time_zone",
            "do 1",
            rng.choice(FAILING_STATEMENTS),
        )
    )


async def one_statement(pair: SessionPair) -> None:
    await pair.run(random_statement(pair))


async def pipelined(pair: SessionPair) -> None:
    await pair.send(*(query_command(random_statement(pair)) for _ in range(pair.rng.choice((2, 2, 2, 3, 5)))))


async def multi_statement(pair: SessionPair) -> None:
    await pair.run("; ".join(random_statement(pair) for _ in range(pair.rng.randrange(2, 6))))


async def long_statement(pair: SessionPair) -> None:
    value = pair.rng.choice("xyz") * random_size(pair.rng)
    await pair.run(f"select length('{value}'), md5('{value}')", f"select '{value}' as v")


async def long_rows(pair: SessionPair) -> None:
    count = pair.rng.randrange(1, 12)
    await pair.run(f"select seq, repeat(char(96 + seq), 100000) from {pair.sequence(count)}")


async def multi_packet_values(pair: SessionPair) -> None:
    """Read rows and send a statement that each take more than one packet."""
    size = MAX_PACKET_PAYLOAD + pair.rng.randrange(1 << 20)
    await pair.run(f"select seq, repeat(seq, {size}) from {pair.sequence(2)}", "select 1")
    await pair.run(f"select length('{'w' * size}')", "select 2")


async def transaction(pair: SessionPair) -> None:
    begin = pair.rng.choice(("begin", "start transaction", "set autocommit = 0"))
    await pair.run(begin, *(random_statement(pair) for _ in range(pair.rng.randrange(5))))
    await pair.run(pair.rng.choice(("commit", "rollback", "begin", "create or replace table u (id int)")))
    await pair.run("rollback", "set autocommit = 1")


async def temporary_table(pair: SessionPair) -> None:
    await pair.run("create temporary table x (id int primary key, v text)")
    for number in range(pair.rng.randrange(3)):
        await pair.run(f"insert into x values ({number}, 'x')", random_statement(pair))
    await pair.run("select * from x order by id", "drop temporary table x")


async def load_data(pair: SessionPair) -> None:
    lines = [
        b"%d\t" % (100 + line) + b"l" * random_size(pair.rng) + b"\n" for line in range(pair.rng.randrange(4))
    ]
    pair.migrating.client.load_data_packets = pair.control.client.load_data_packets = lines
    await pair.run("load data local infile 'any' replace into table t (id, v)")


async def named_lock(pair: SessionPair) -> None:
    await pair.run("select get_lock('{db}', 0)", random_statement(pair), "select release_lock('{db}')")


LAST_STATEMENT_CASES = (
    (
        "insert ignore into t (id, v) values (1, 'a'), (2, 'b'), ('x', 'c')",
        ("warnings", "row_count", "last_id"),
    ),
    ("select sql_calc_found_rows id from t order by id limit 2", ("found_rows", "row_count", "last_id")),
    ("select cast('12x' as unsigned) + count(*) from t", ("warnings", "found_rows")),
    ("update t set v = 'same' where id < 5", ("row_count", "last_id")),
    ("insert into t (v) values ('one'), ('more')", ("row_count", "last_id")),
    ("select * from {db}.nowhere", ("warnings", "errors", "last_id")),
)
"""Statements, and the keys in RESULT_QUERIES of the results that can be queried after them."""
RESULT_QUERIES = {
    "warnings": "show warnings",
    "errors": "show errors",
    "row_count": "select row_count()",
    "found_rows": "select found_rows()",
    "last_id": "select last_insert_id()",
}


async def last_statement_results(pair: SessionPair) -> None:
    """Query one result of a statement. The query may change other results differently in TiDB and MariaDB."""
    statement, questions = pair.rng.choice(LAST_STATEMENT_CASES)
    await pair.run(statement)
    await pair.send(
        SentCommand(
            MySqlCommand.QUERY, RESULT_QUERIES[pair.rng.choice(questions)].encode(), compares_types=False
        )
    )
    await pair.run("select count(*) from t")


async def session_variables(pair: SessionPair) -> None:
    setting, reset = pair.rng.choice(
        (
            ("time_zone = '+05:30'", "time_zone = default"),
            ("sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'", "sql_mode = default"),
            ("sql_mode = ''", "sql_mode = default"),
            ("group_concat_max_len = 4096", "group_concat_max_len = default"),
            ("transaction isolation level serializable", "transaction isolation level repeatable read"),
        )
    )
    session = "session " if setting.startswith("transaction") else ""
    await pair.run(f"set {session}{setting}", random_statement(pair), "select from_unixtime(0), '\\\\'")
    await pair.run(f"select group_concat(seq) from {pair.sequence(random_size(pair.rng) % 600 + 1)}")
    await pair.run(f"set {session}{reset}")


async def character_sets(pair: SessionPair) -> None:
    charset, codec, word = pair.rng.choice(
        (("gbk", "gbk", "中文運"), ("latin1", "latin-1", "süß"), ("utf8mb3", "utf-8", "süß中"))
    )
    await pair.run(
        f"set names {charset}", f"select '{word}', hex('{word}')", f"set @c = '{word}'", codec=codec
    )
    await pair.run("select @c, hex(@c), @a", "set names utf8mb4", "select @c")


async def named_statement(pair: SessionPair) -> None:
    await pair.run("prepare p from 'select ?, ''in it'', count(*) from t'", "set @p = 5")
    await pair.run(random_statement(pair), "execute p using @p", random_statement(pair), "execute p using @n")
    await pair.run("deallocate prepare p", "execute p using @p")


async def prepared(pair: SessionPair) -> None:
    rng = pair.rng
    if len(pair.migrating.statement_ids) < 6:
        name = await pair.prepare("select ?, ?, concat('<', ?, '>')")
        await pair.execute(name, 1, b"x", None)
    name = rng.choice(list(pair.migrating.statement_ids))
    for _ in range(rng.randrange(4)):
        values = (rng.randrange(1 << 40), rng.choice(TEXTS).encode(), b"z" * random_size(rng))
        await pair.execute(name, *values, types=rng.random() < 0.3)
    if rng.random() < 0.2:
        for piece in (b"long", b"er" * random_size(rng)):
            await pair.send(
                pair.statement_command(MySqlCommand.STMT_SEND_LONG_DATA, name, long_data_body(0, 2, piece)),
                SentCommand(MySqlCommand.PING),
            )
        await pair.execute(name, 1, b"2", ParameterSource.LONG_DATA)
    if rng.random() < 0.3:
        await pair.send(pair.statement_command(MySqlCommand.STMT_RESET, name))
    if rng.random() < 0.2:
        await pair.send(
            pair.statement_command(MySqlCommand.STMT_CLOSE, name), query_command(random_statement(pair))
        )
        await pair.execute(name, 1, b"x", None)
        for side in (pair.migrating, pair.control):
            del side.statement_ids[name]


async def cursor(pair: SessionPair) -> None:
    name = await pair.prepare(f"select seq, repeat('c', seq) from {pair.sequence(pair.rng.randrange(1, 50))}")
    await pair.execute(name, flags=1)
    for _ in range(pair.rng.randrange(5)):
        fetch = pair.statement_command(MySqlCommand.STMT_FETCH, name, fetch_body(0, 15))
        await pair.send(fetch)
    # If the cursor is still open, closing the statement closes it.
    await pair.send(pair.statement_command(MySqlCommand.STMT_CLOSE, name), SentCommand(MySqlCommand.PING))
    for side in (pair.migrating, pair.control):
        del side.statement_ids[name]


async def other_command(pair: SessionPair) -> None:
    await pair.send(
        pair.rng.choice(
            (
                SentCommand(MySqlCommand.PING),
                SentCommand(MySqlCommand.INIT_DB, b"{db}"),
                SentCommand(MySqlCommand.INIT_DB, b"nowhere_at_all"),
                SentCommand(MySqlCommand.SET_OPTION, b"\0\0"),
                SentCommand(MySqlCommand.SET_OPTION, b"\x09\0"),
            )
        )
    )


async def multi_statements_off(pair: SessionPair) -> None:
    await pair.send(SentCommand(MySqlCommand.SET_OPTION, b"\1\0"))
    await pair.run("select 1; select 2", random_statement(pair))
    await pair.send(SentCommand(MySqlCommand.SET_OPTION, b"\0\0"))
    await pair.run("select 1; select 2")


async def reset_session(pair: SessionPair) -> None:
    if pair.rng.random() < 0.5:
        await pair.send(SentCommand(MySqlCommand.RESET_CONNECTION))
        pair.forget_statements()
    else:
        await pair.change_user()
    await pair.run("select @a, database()", "execute p")


ACTIVITIES: dict[Activity, int] = {
    one_statement: 30,
    pipelined: 15,
    multi_statement: 10,
    long_statement: 5,
    long_rows: 3,
    transaction: 8,
    temporary_table: 3,
    named_lock: 2,
    load_data: 3,
    last_statement_results: 8,
    session_variables: 5,
    character_sets: 5,
    named_statement: 4,
    prepared: 15,
    cursor: 4,
    other_command: 10,
    multi_statements_off: 2,
    reset_session: 1,
}
"""The activities and their weights."""
