"""What clients do at random in sessions that move."""

from __future__ import annotations

from random import Random

from sandbox.tidb_sim.packets import FULL, Command
from tests.support.migration.differential import Asked, Deed, Pair, text
from tests.support.migration.sql_client import Sent, fetched, long_data

TEXTS = ("", "a", "it''s", "süß", "中文", "\\\\ \\n \\'", "\U0001f600", "x" * 300)
FAULTY = (
    "select * from {db}.nowhere",
    "selec 1",
    "insert into t (id, v) values (1, 'first'), (1, 'twice')",
    "select 1 +",
    "set nothing_known = 1",
    "select (select v from t union select 'another')",
)


def size(dice: Random) -> int:
    """Of a value, in bytes: mostly small, at most a MiB."""
    return int(2 ** (dice.random() ** 2 * 20))


def anything(dice: Random) -> str:
    """A statement that can stand anywhere."""
    number, word = dice.randrange(1, 40), dice.choice(TEXTS)
    return dice.choice(
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
            f"select repeat('{number}', {size(dice)}), {number}",
            f"select seq, repeat('x', seq) from mysql.seq_1_to_{size(dice) % 1500 + 1}",
            "select database(), @@autocommit, @@sql_mode, @@time_zone",
            "do 1",
            dice.choice(FAULTY),
        )
    )


async def one_statement(pair: Pair) -> None:
    await pair.run(anything(pair.dice))


async def sent_ahead(pair: Pair) -> None:
    await pair.ask(*(text(anything(pair.dice)) for _ in range(pair.dice.choice((2, 2, 2, 3, 5)))))


async def several_in_one(pair: Pair) -> None:
    await pair.run("; ".join(anything(pair.dice) for _ in range(pair.dice.randrange(2, 6))))


async def long_statement(pair: Pair) -> None:
    value = pair.dice.choice("xyz") * size(pair.dice)
    await pair.run(f"select length('{value}'), md5('{value}')", f"select '{value}' as v")


async def long_rows(pair: Pair) -> None:
    count = pair.dice.randrange(1, 12)
    await pair.run(f"select seq, repeat(char(96 + seq), 100000) from mysql.seq_1_to_{count}")


async def very_long(pair: Pair) -> None:
    """Rows, and a statement, that take more than one packet."""
    size = FULL + pair.dice.randrange(1 << 20)
    await pair.run(f"select seq, repeat(seq, {size}) from mysql.seq_1_to_2", "select 1")
    await pair.run(f"select length('{'w' * size}')", "select 2")


async def transaction(pair: Pair) -> None:
    begin = pair.dice.choice(("begin", "start transaction", "set autocommit = 0"))
    await pair.run(begin, *(anything(pair.dice) for _ in range(pair.dice.randrange(5))))
    await pair.run(pair.dice.choice(("commit", "rollback", "begin", "create or replace table u (id int)")))
    await pair.run("rollback", "set autocommit = 1")


async def temporary_table(pair: Pair) -> None:
    await pair.run("create temporary table x (id int primary key, v text)")
    for number in range(pair.dice.randrange(3)):
        await pair.run(f"insert into x values ({number}, 'x')", anything(pair.dice))
    await pair.run("select * from x order by id", "drop temporary table x")


async def loaded(pair: Pair) -> None:
    lines = [
        b"%d\t" % (100 + line) + b"l" * size(pair.dice) + b"\n" for line in range(pair.dice.randrange(4))
    ]
    pair.moving.wire.file = pair.still.wire.file = lines
    await pair.run("load data local infile 'any' replace into table t (id, v)")


async def named_lock(pair: Pair) -> None:
    await pair.run("select get_lock('{db}', 0)", anything(pair.dice), "select release_lock('{db}')")


LEFT_BEHIND = (
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
"""Statements, and what can be asked for behind them."""
QUESTIONS = {
    "warnings": "show warnings",
    "errors": "show errors",
    "row_count": "select row_count()",
    "found_rows": "select found_rows()",
    "last_id": "select last_insert_id()",
}


async def left_behind(pair: Pair) -> None:
    """What is asked for first counts: asking may change the rest, and not in TiDB as in MariaDB."""
    statement, questions = pair.dice.choice(LEFT_BEHIND)
    await pair.run(statement)
    await pair.ask(Asked(Command.QUERY, QUESTIONS[pair.dice.choice(questions)].encode(), typed=False))
    await pair.run("select count(*) from t")


async def settings(pair: Pair) -> None:
    changed, back = pair.dice.choice(
        (
            ("time_zone = '+05:30'", "time_zone = default"),
            ("sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'", "sql_mode = default"),
            ("sql_mode = ''", "sql_mode = default"),
            ("group_concat_max_len = 4096", "group_concat_max_len = default"),
            ("transaction isolation level serializable", "transaction isolation level repeatable read"),
        )
    )
    session = "session " if changed.startswith("transaction") else ""
    await pair.run(f"set {session}{changed}", anything(pair.dice), "select from_unixtime(0), '\\\\'")
    await pair.run(f"select group_concat(seq) from mysql.seq_1_to_{size(pair.dice) % 600 + 1}")
    await pair.run(f"set {session}{back}")


async def character_sets(pair: Pair) -> None:
    charset, codec, word = pair.dice.choice(
        (("gbk", "gbk", "中文運"), ("latin1", "latin-1", "süß"), ("utf8mb3", "utf-8", "süß中"))
    )
    await pair.run(
        f"set names {charset}", f"select '{word}', hex('{word}')", f"set @c = '{word}'", codec=codec
    )
    await pair.run("select @c, hex(@c), @a", "set names utf8mb4", "select @c")


async def named_statement(pair: Pair) -> None:
    await pair.run("prepare p from 'select ?, ''in it'', count(*) from t'", "set @p = 5")
    await pair.run(anything(pair.dice), "execute p using @p", anything(pair.dice), "execute p using @n")
    await pair.run("deallocate prepare p", "execute p using @p")


async def prepared(pair: Pair) -> None:
    dice = pair.dice
    if len(pair.moving.numbers) < 6:
        name = await pair.prepare("select ?, ?, concat('<', ?, '>')")
        await pair.execute(name, 1, b"x", None)
    name = dice.choice(list(pair.moving.numbers))
    for _ in range(dice.randrange(4)):
        values = (dice.randrange(1 << 40), dice.choice(TEXTS).encode(), b"z" * size(dice))
        await pair.execute(name, *values, types=dice.random() < 0.3)
    if dice.random() < 0.2:
        for piece in (b"long", b"er" * size(dice)):
            await pair.ask(
                pair.of_statement(Command.STMT_SEND_LONG_DATA, name, long_data(0, 2, piece)),
                Asked(Command.PING),
            )
        await pair.execute(name, 1, b"2", Sent.LONG_DATA)
    if dice.random() < 0.3:
        await pair.ask(pair.of_statement(Command.STMT_RESET, name))
    if dice.random() < 0.2:
        await pair.ask(pair.of_statement(Command.STMT_CLOSE, name), text(anything(dice)))
        await pair.execute(name, 1, b"x", None)
        for side in (pair.moving, pair.still):
            del side.numbers[name]


async def cursor(pair: Pair) -> None:
    name = await pair.prepare(
        f"select seq, repeat('c', seq) from mysql.seq_1_to_{pair.dice.randrange(1, 50)}"
    )
    await pair.execute(name, flags=1)
    for _ in range(pair.dice.randrange(5)):
        fetch = pair.of_statement(Command.STMT_FETCH, name, fetched(0, 15))
        await pair.ask(fetch)
    # Else it is left as it is.
    await pair.ask(pair.of_statement(Command.STMT_CLOSE, name), Asked(Command.PING))
    for side in (pair.moving, pair.still):
        del side.numbers[name]


async def other_command(pair: Pair) -> None:
    await pair.ask(
        pair.dice.choice(
            (
                Asked(Command.PING),
                Asked(Command.INIT_DB, b"{db}"),
                Asked(Command.INIT_DB, b"nowhere_at_all"),
                Asked(Command.SET_OPTION, b"\0\0"),
                Asked(Command.SET_OPTION, b"\x09\0"),
            )
        )
    )


async def no_several_in_one(pair: Pair) -> None:
    await pair.ask(Asked(Command.SET_OPTION, b"\1\0"))
    await pair.run("select 1; select 2", anything(pair.dice))
    await pair.ask(Asked(Command.SET_OPTION, b"\0\0"))
    await pair.run("select 1; select 2")


async def begun_anew(pair: Pair) -> None:
    if pair.dice.random() < 0.5:
        await pair.ask(Asked(Command.RESET_CONNECTION))
        pair.forget_statements()
    else:
        await pair.change_user()
    await pair.run("select @a, database()", "execute p")


DEEDS: dict[Deed, int] = {
    one_statement: 30,
    sent_ahead: 15,
    several_in_one: 10,
    long_statement: 5,
    long_rows: 3,
    transaction: 8,
    temporary_table: 3,
    named_lock: 2,
    loaded: 3,
    left_behind: 8,
    settings: 5,
    character_sets: 5,
    named_statement: 4,
    prepared: 15,
    cursor: 4,
    other_command: 10,
    no_several_in_one: 2,
    begun_anew: 1,
}
"""What clients do, and how often."""
