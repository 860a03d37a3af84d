"""What a stand-in changes on the way to MariaDB: words, and requests of prepared statements."""

from __future__ import annotations

import struct

import pytest

from sandbox.tidb_sim.accounts import hashed
from sandbox.tidb_sim.answers import Client
from sandbox.tidb_sim.dialect import translated
from sandbox.tidb_sim.packets import Command
from sandbox.tidb_sim.statements import Statements

CLIENT = Client("10.9.9.9:1", "anna", "10.9.%")
HASH = hashed(b"it's").encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            b"CREATE USER 'u'@'%' IDENTIFIED WITH 'caching_sha2_password' BY 'it''s' REQUIRE SSL",
            b"CREATE USER 'u'@'%' identified via unix_socket using 'caching_sha2_password:"
            + HASH
            + b"' REQUIRE SSL",
        ),
        (
            b"alter user u identified with tidb_sm3_password",
            b"alter user u identified via unix_socket using 'tidb_sm3_password:'",
        ),
        (
            b"create user u identified with mysql_native_password by 'it''s'",
            b"create user u identified via mysql_native_password using '" + HASH + b"'",
        ),
        (b"create user u identified with auth_socket", b"create user u identified via unix_socket"),
        (
            b"SELECT @@session.transaction_isolation, @@Transaction_Read_Only AS r",
            b"SELECT @@session.tx_isolation, @@tx_Read_Only AS r",
        ),
        (
            b"select substring_index(CURRENT_USER (), '@', 1), user(), a.user, 'user()', \"'user()\"",
            b"select substring_index('anna@10.9.%', '@', 1), 'anna@10.9.9.9', a.user, 'user()', \"'user()\"",
        ),
        (
            b"SET NAMES 'utf8mb4' COLLATE 'utf8mb4_0900_ai_ci'",
            b"SET NAMES 'utf8mb4' COLLATE 'utf8mb4_general_ci'",
        ),
    ],
)
def test_tidbs_words_become_mariadbs(text: bytes, expected: bytes) -> None:
    assert translated(text, CLIENT) == expected


@pytest.mark.parametrize(
    "text",
    [
        b"select 1",
        b"select current_users, @current_user, user from mysql.user",
        b"create view v as select user() as u",
        b"create user u identified by 'x'",
        b"create user u identified with a_plugin by 'x'",
        b"select 'identified with auth_socket', transaction_isolation from t",
    ],
)
def test_everything_else_stays_as_it_is(text: bytes) -> None:
    assert translated(text, CLIENT) == text


def execute(statement: int, flags: int) -> bytes:
    return struct.pack("<BIBI", Command.STMT_EXECUTE, statement, flags, 1)


def test_long_data_for_an_unknown_statement_is_answered() -> None:
    statements = Statements()
    statements.add(7)
    head = struct.pack("<BIH", Command.STMT_SEND_LONG_DATA, 7, 0)
    assert statements.judge(head) == (head, None)
    assert statements.judge(head[:-1])[1] == b"\xff\x51\x04#HY000malform packet error"
    statements.judge(struct.pack("<BI", Command.STMT_CLOSE, 7))
    text = b"Unknown prepared statement handler (7) given to stmt_send_longdata"
    assert statements.judge(head)[1] == b"\xff\xdb\x04#HY000" + text


def test_only_cursors_to_read_from_are_opened() -> None:
    statements = Statements()
    statements.add(7)
    assert statements.judge(execute(7, 1))[1] is None
    assert (statements.judge(execute(7, 2))[1] or b"").endswith(b"unsupported flag: CursorTypeForUpdate")
    assert (statements.judge(execute(7, 4))[1] or b"").endswith(b"unsupported flag: CursorTypeScrollable")
    assert statements.judge(execute(8, 2))[1] is None  # MariaDB says that it does not know it
    statements.judge(bytes((Command.RESET_CONNECTION,)))
    assert statements.judge(execute(7, 2))[1] is None


def test_a_fetch_gets_1024_rows_at_most() -> None:
    def fetch(rows: int) -> bytes:
        return struct.pack("<BII", Command.STMT_FETCH, 7, rows)

    statements = Statements()
    assert statements.judge(fetch(5)) == (fetch(5), None)
    assert statements.judge(fetch(100_000)) == (fetch(1024), None)
    assert statements.judge(fetch(5)[:-1])[1] == b"\xff\x51\x04#HY000malform packet error"
