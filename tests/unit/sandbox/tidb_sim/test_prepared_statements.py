"""Prepared statements at a stand-in: TiDB's numbers and MariaDB's, and what TiDB does its own way."""

from __future__ import annotations

import struct

import pytest

from sandbox.tidb_sim.packets import AUTOCOMMIT, CURSOR_EXISTS, LAST_ROW_SENT, Command
from sandbox.tidb_sim.prepared_statements import Statement, Statements

MALFORMED = b"\xff\x51\x04#HY000malform packet error"
TEXT = b"select ?, ?"
INT_AND_TEXT = b"\x03\0\xfd\0"


def request(command: Command, number: int, rest: bytes = b"") -> bytes:
    return struct.pack("<BI", command, number) + rest


def execute(number: int, flags: int = 0, rest: bytes = b"") -> bytes:
    return request(Command.STMT_EXECUTE, number, struct.pack("<BI", flags, 1) + rest)


@pytest.fixture
def statements() -> Statements:
    """Number 1 of ours is number 7 of MariaDB's."""
    made = Statements()
    assert made.add(Statement(TEXT, "shop", 7, 2)) == 1
    return made


def test_numbers_of_ours_count_on_and_become_those_of_mariadb(statements: Statements) -> None:
    assert statements.add(Statement(b"select 1", "shop", 9)) == 2
    assert statements.judge(execute(1)) == (execute(7), None)
    assert statements.judge(execute(2)) == (execute(9), None)
    for command, rest in (
        (Command.STMT_SEND_LONG_DATA, b"\0\0abc"),
        (Command.STMT_RESET, b""),
        (Command.STMT_FETCH, b"\5\0\0\0"),
        (Command.STMT_CLOSE, b""),
    ):
        assert statements.judge(request(command, 1, rest)) == (request(command, 7, rest), None)
    assert statements.add(Statement(b"select 2", "shop", 3)) == 3


def test_a_restored_statement_keeps_its_number_and_new_ones_come_behind() -> None:
    statements = Statements()
    statements.restore(41, Statement(TEXT, "", 1, 2))
    assert statements.judge(execute(41)) == (execute(1), None)
    assert statements.add(Statement(b"select 1", "", 2)) == 42
    statements.last = (1 << 32) - 1
    assert statements.add(Statement(b"select 2", "", 3)) == 0


def test_a_number_of_mariadb_is_no_number_of_ours(statements: Statements) -> None:
    for command, rest, told in (
        (Command.STMT_EXECUTE, bytes(5), b"stmt_execute"),
        (Command.STMT_FETCH, bytes(4), b"stmt_fetch"),
        (Command.STMT_RESET, b"", b"stmt_reset"),
        (Command.STMT_SEND_LONG_DATA, bytes(2), b"stmt_send_longdata"),
    ):
        refusal = statements.judge(request(command, 7, rest))[1]
        text = b"Unknown prepared statement handler 7 given to " + told
        assert refusal == b"\xffQ\x04#HY000ERROR 1243 (HY000): " + text
    # MariaDB ignores this one.
    assert statements.judge(request(Command.STMT_CLOSE, 7)) == (request(Command.STMT_CLOSE, 0), None)


def test_what_is_closed_is_unknown(statements: Statements) -> None:
    statements.judge(request(Command.STMT_CLOSE, 1))
    assert statements.judge(execute(1))[1] is not None


def test_statements_that_sql_has_prepared_have_numbers_too() -> None:
    statements = Statements()
    assert statements.add(Statement(b"select 1", "", name="s")) == 1
    assert statements.judge(execute(1))[1] is not None
    assert statements.named("s") is not None
    statements.drop_named("s")
    assert statements.named("s") is None
    assert not statements.all


def test_types_are_learnt_and_told_once_more_by_us(statements: Statements) -> None:
    values = b"\x05\0\0\0\x03abc"
    statements.judge(execute(1, 0, b"\0\1" + INT_AND_TEXT + values))
    learnt = statements.all[1].types
    assert learnt == INT_AND_TEXT
    moved = Statements()
    moved.restore(1, Statement(TEXT, "", 3, 2, types=learnt, typed=False))
    assert moved.needed(execute(1)) is None
    again = execute(1, 0, b"\0\0" + values)
    assert moved.judge(again) == (execute(3, 0, b"\0\1" + INT_AND_TEXT + values), None)
    assert moved.judge(again) == (execute(3, 0, b"\0\0" + values), None)


def test_types_of_the_client_come_first() -> None:
    moved = Statements()
    moved.restore(1, Statement(TEXT, "", 3, 2, types=INT_AND_TEXT, typed=False))
    body = b"\3\1" + b"\x08\0\x08\0"
    assert moved.judge(execute(1, 0, body)) == (execute(3, 0, body), None)
    assert moved.all[1].types == b"\x08\0\x08\0"


def test_how_much_of_a_long_request_must_be_there(statements: Statements) -> None:
    assert statements.needed(request(Command.STMT_SEND_LONG_DATA, 1)) == 7
    assert statements.needed(execute(1)) == 10 + 1 + 1 + 4
    assert statements.needed(execute(1)[:3]) == 10
    assert statements.needed(execute(99)) == 10


def test_malformed_requests_are_refused(statements: Statements) -> None:
    for payload in (
        execute(1)[:-1],
        request(Command.STMT_SEND_LONG_DATA, 1, b"\0"),
        request(Command.STMT_FETCH, 1, bytes(3)),
        request(Command.STMT_RESET, 1)[:-1],
    ):
        assert statements.judge(payload)[1] == MALFORMED


def test_only_cursors_to_read_from_are_opened(statements: Statements) -> None:
    assert statements.judge(execute(1, 1))[1] is None
    assert (statements.judge(execute(1, 2))[1] or b"").endswith(b"unsupported flag: CursorTypeForUpdate")
    assert (statements.judge(execute(1, 4))[1] or b"").endswith(b"unsupported flag: CursorTypeScrollable")


def test_a_fetch_gets_1024_rows_at_most(statements: Statements) -> None:
    for asked, got in ((5, 5), (100_000, 1024)):
        wanted = request(Command.STMT_FETCH, 1, struct.pack("<I", asked))
        assert statements.judge(wanted)[0] == request(Command.STMT_FETCH, 7, struct.pack("<I", got))


def test_long_data_pins_the_session_until_it_is_used(statements: Statements) -> None:
    data = request(Command.STMT_SEND_LONG_DATA, 1, b"\0\0abc")
    statements.judge(data)
    assert statements.obstacle() == "prepared statements have bound params"
    statements.judge(execute(1))
    statements.answered(AUTOCOMMIT, failed=True)
    assert statements.obstacle() is None
    statements.judge(data)
    statements.judge(request(Command.STMT_RESET, 1))
    assert statements.obstacle() is None


def test_rows_that_are_not_fetched_pin_the_session(statements: Statements) -> None:
    def ask(payload: bytes, status: int, *, failed: bool = False) -> str | None:
        statements.judge(payload)
        statements.answered(status, failed=failed)
        return statements.obstacle()

    pinned = "prepared statements have unfetched rows"
    fetch = request(Command.STMT_FETCH, 1, bytes(4))
    assert ask(execute(1, 1), AUTOCOMMIT | CURSOR_EXISTS) == pinned
    assert ask(fetch, AUTOCOMMIT | CURSOR_EXISTS) == pinned
    assert ask(fetch, AUTOCOMMIT, failed=True) == pinned
    assert ask(fetch, AUTOCOMMIT | LAST_ROW_SENT) is None
    ask(execute(1, 1), AUTOCOMMIT | CURSOR_EXISTS)
    assert ask(request(Command.STMT_RESET, 1), AUTOCOMMIT) is None
    ask(execute(1, 1), AUTOCOMMIT | CURSOR_EXISTS)
    assert ask(execute(1), AUTOCOMMIT) is None
