"""Texts of statements for comparing digests: realistic statements, and random sequences of tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

_EXPRESSIONS = (
    "1",
    "-1",
    "+ 2.5",
    "1e-3",
    "0x1F",
    "x'1f'",
    "b'01'",
    "'text'",
    '"it""s"',
    "'a\\'b'",
    "N'national'",
    "_utf8mb4'text'",
    "null",
    "?",
    "id",
    "t.id",
    "`odd name`",
    "@variable",
    "@'quoted variable'",
    "@@sql_mode",
    "@@global.`time_zone`",
    "count(*)",
    "max(id)",
    "now()",
    "cast(a as char)",
    "doc->'$.a'",
    "doc->>'$.a'",
    "case when a then 1 else 2 end",
    "(select 1)",
    "row(1, 2)",
    "interval 1 day",
    "not a",
    "a || b",
    "a && -1",
)
_CONDITIONS = (
    "id = {0}",
    "id in ({0}, {1}, {0})",
    "(id, k) in (({0}, {1}), ({1}, {0}))",
    "id between {0} and {1}",
    "name like {0}",
    "a is not null and id <=> {0}",
)
_STATEMENTS = (
    "SELECT {0} FROM t WHERE {c}",
    "select /*+ use_index(t, k) */ {0}, {1} from t use index (k) where {c} order by 1, 2",
    "SELECT * FROM a STRAIGHT_JOIN b ON a.id = b.id WHERE {c} GROUP BY (1) HAVING {0} > 1 LIMIT 10, 20;",
    "insert into t (a, b) values ({0}, {1}), ({1}, {0}) on duplicate key update a = {0}",
    "INSERT INTO t SET a = {0}, b = {1}",
    "replace into `t` select {0} from `select`.`from`",
    "update t set a = {0}, b = b + {1} where {c} limit 1",
    "delete from t where {c} -- a comment",
    "with recursive x as (select {0} union all select {1}) select * from x where {c}",
    "/*!40101 SET @old = {0} */",
    "create table t (a int default {0} /*T![auto_rand] auto_random(5) */, key (a)) /*T![ttl] ttl = a */",
    "set @a = {0}, session sql_mode = {1}",
    "prepare s from 'select {0}'",
    "call p({0}, {1})",
    "load data local infile '/x' into table t fields terminated by ',' # comment",
    "explain analyze select {0} from t force index(a) where {c}; select {1}",
)
_TOKENS = (
    *_EXPRESSIONS,
    # Numbers and quotes that are broken or unusual.
    *("0xg", "0b2", "0B1", "9e", "9est", "07", "1.5e+3", ".5", "x'zz", "b'2'", "'unclosed"),
    *("`unclosed", "`a``b`"),
    # Operators.
    *(",", "(", ")", "(", ")", ",", ";", "=", "<=", "<=>", "!=", "<>", "<<", ">>", ":=", "->", "-"),
    *("+", "*", "/", "%", "!", "~", "^", "|", "&", "&^", ":", "{", "}", "[", "]", "\\", "\\N", "@"),
    *("@@", ".", "$", "\x01"),
    # Comments.
    *("/* c */", "/*! x */", "/*!40101 y */", "/*T! z */", "/*T![ttl] q */", "/*T![nope] q */"),
    *("/*+ h(a) */", "/**/", "/***/", "/*/", "/* a", "-- c\n", "--c", "# c\n"),
    # White space and letters beyond ASCII.
    *("\t", "\n", "\x0c", "é", "É", "日本", "İx", "\u017felect"),
    # Words with a meaning.
    *("select", "from", "order by", "group by", "in", "values", "is", "use index"),
    *("force index (a)", "index", "ignore index (')')", "_latin1", "_foo", "translate("),
    *("translate", "mid(", "N", "X", "B", "'*'", "'index'"),
)


def realistic_statements() -> Iterator[str]:
    """Yield every statement with every pair of neighboring expressions, in upper case too."""
    pairs = list(itertools.pairwise((*_EXPRESSIONS, _EXPRESSIONS[0])))
    for number, (statement, (one, other)) in enumerate(itertools.product(_STATEMENTS, pairs)):
        condition = _CONDITIONS[number % len(_CONDITIONS)].format(one, other)
        text = statement.format(one, other, c=condition)
        yield text
        yield text.upper()


def random_statements(seed: int) -> Iterator[str]:
    """Yield random sequences of tokens, without end. Most are no valid SQL; digests need only tokens."""
    generator = random.Random(seed)
    while True:
        tokens = generator.choices(_TOKENS, k=generator.randint(1, 12))
        yield "".join(token + generator.choice(("", " ", " ")) for token in tokens)
