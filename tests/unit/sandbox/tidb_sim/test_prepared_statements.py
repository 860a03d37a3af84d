"""Prepared statements of the simulated server: ids of TiDB and MariaDB, and TiDB's own behaviour."""

from __future__ import annotations

import struct

import pytest

from sandbox.tidb_sim.packets import AUTOCOMMIT, CURSOR_EXISTS, LAST_ROW_SENT, MySqlCommand
from sandbox.tidb_sim.prepared_statements import PreparedStatement, PreparedStatements

MALFORMED = b"\xff\x51\x04#HY000malform packet error"
TEXT = b"select ?, ?"
INT_AND_TEXT = b"\x03\0\xfd\0"


def request(command: MySqlCommand, number: int, rest: bytes = b"") -> bytes:
    return struct.pack("<BI", command, number) + rest


def execute(number: int, flags: int = 0, rest: bytes = b"") -> bytes:
    return request(MySqlCommand.STMT_EXECUTE, number, struct.pack("<BI", flags, 1) + rest)


@pytest.fixture
def statements() -> PreparedStatements:
    """Return prepared statements in which the client's id 1 is MariaDB's id 7."""
    prepared = PreparedStatements()
    assert prepared.add(PreparedStatement(TEXT, "shop", 7, 2)) == 1
    return prepared


def test_translates_own_ids_to_mariadb_ids(statements: PreparedStatements) -> None:
    assert statements.add(PreparedStatement(b"select 1", "shop", 9)) == 2
    assert statements.translate(execute(1)) == (execute(7), None)
    assert statements.translate(execute(2)) == (execute(9), None)
    for command, rest in (
        (MySqlCommand.STMT_SEND_LONG_DATA, b"\0\0abc"),
        (MySqlCommand.STMT_RESET, b""),
        (MySqlCommand.STMT_FETCH, b"\5\0\0\0"),
        (MySqlCommand.STMT_CLOSE, b""),
    ):
        assert statements.translate(request(command, 1, rest)) == (request(command, 7, rest), None)
    assert statements.add(PreparedStatement(b"select 2", "shop", 3)) == 3


def test_restored_statement_keeps_its_id() -> None:
    statements = PreparedStatements()
    statements.restore(41, PreparedStatement(TEXT, "", 1, 2))
    assert statements.translate(execute(41)) == (execute(1), None)
    assert statements.add(PreparedStatement(b"select 1", "", 2)) == 42
    statements.last_id = (1 << 32) - 1
    assert statements.add(PreparedStatement(b"select 2", "", 3)) == 0


def test_rejects_mariadb_id(statements: PreparedStatements) -> None:
    for command, rest, command_name in (
        (MySqlCommand.STMT_EXECUTE, bytes(5), b"stmt_execute"),
        (MySqlCommand.STMT_FETCH, bytes(4), b"stmt_fetch"),
        (MySqlCommand.STMT_RESET, b"", b"stmt_reset"),
        (MySqlCommand.STMT_SEND_LONG_DATA, bytes(2), b"stmt_send_longdata"),
    ):
        error = statements.translate(request(command, 7, rest))[1]
        text = b"Unknown prepared statement handler 7 given to " + command_name
        assert error == b"\xffQ\x04#HY000ERROR 1243 (HY000): " + text
    # MariaDB ignores the close of an unknown id.
    assert statements.translate(request(MySqlCommand.STMT_CLOSE, 7)) == (
        request(MySqlCommand.STMT_CLOSE, 0),
        None,
    )


def test_rejects_closed_statement(statements: PreparedStatements) -> None:
    statements.translate(request(MySqlCommand.STMT_CLOSE, 1))
    assert statements.translate(execute(1))[1] is not None


def test_named_statements_have_ids() -> None:
    statements = PreparedStatements()
    assert statements.add(PreparedStatement(b"select 1", "", name="s")) == 1
    assert statements.translate(execute(1))[1] is not None
    assert statements.find_named("s") is not None
    statements.drop_named("s")
    assert statements.find_named("s") is None
    assert not statements.by_id


def test_repeats_parameter_types_after_migration(statements: PreparedStatements) -> None:
    values = b"\x05\0\0\0\x03abc"
    statements.translate(execute(1, 0, b"\0\1" + INT_AND_TEXT + values))
    types = statements.by_id[1].parameter_types
    assert types == INT_AND_TEXT
    migrated = PreparedStatements()
    migrated.restore(1, PreparedStatement(TEXT, "", 3, 2, parameter_types=types, backend_knows_types=False))
    repeated = execute(1, 0, b"\0\0" + values)
    assert migrated.translate(repeated) == (execute(3, 0, b"\0\1" + INT_AND_TEXT + values), None)
    assert migrated.translate(repeated) == (execute(3, 0, b"\0\0" + values), None)


def test_types_sent_by_client_take_precedence() -> None:
    migrated = PreparedStatements()
    migrated.restore(
        1, PreparedStatement(TEXT, "", 3, 2, parameter_types=INT_AND_TEXT, backend_knows_types=False)
    )
    body = b"\3\1" + b"\x08\0\x08\0"
    assert migrated.translate(execute(1, 0, body)) == (execute(3, 0, body), None)
    assert migrated.by_id[1].parameter_types == b"\x08\0\x08\0"


def test_rejects_malformed_requests(statements: PreparedStatements) -> None:
    for payload in (
        execute(1)[:-1],
        request(MySqlCommand.STMT_SEND_LONG_DATA, 1, b"\0"),
        request(MySqlCommand.STMT_FETCH, 1, bytes(3)),
        request(MySqlCommand.STMT_RESET, 1)[:-1],
    ):
        assert statements.translate(payload)[1] == MALFORMED


def test_fetch_is_limited_to_1024_rows(statements: PreparedStatements) -> None:
    for requested, expected in ((5, 5), (100_000, 1024)):
        payload = request(MySqlCommand.STMT_FETCH, 1, struct.pack("<I", requested))
        translated = request(MySqlCommand.STMT_FETCH, 7, struct.pack("<I", expected))
        assert statements.translate(payload)[0] == translated


def test_long_data_blocks_migration_until_used(statements: PreparedStatements) -> None:
    data = request(MySqlCommand.STMT_SEND_LONG_DATA, 1, b"\0\0abc")
    statements.translate(data)
    assert statements.migration_blocker() == "prepared statements have bound params"
    statements.translate(execute(1))
    statements.on_response_end(AUTOCOMMIT, failed=True)
    assert statements.migration_blocker() is None
    statements.translate(data)
    statements.translate(request(MySqlCommand.STMT_RESET, 1))
    assert statements.migration_blocker() is None


def test_unfetched_rows_block_migration(statements: PreparedStatements) -> None:
    def blocker_after(payload: bytes, status: int, *, failed: bool = False) -> str | None:
        statements.translate(payload)
        statements.on_response_end(status, failed=failed)
        return statements.migration_blocker()

    pinned = "prepared statements have unfetched rows"
    fetch = request(MySqlCommand.STMT_FETCH, 1, bytes(4))
    assert blocker_after(execute(1, 1), AUTOCOMMIT | CURSOR_EXISTS) == pinned
    assert blocker_after(fetch, AUTOCOMMIT | CURSOR_EXISTS) == pinned
    assert blocker_after(fetch, AUTOCOMMIT, failed=True) == pinned
    assert blocker_after(fetch, AUTOCOMMIT | LAST_ROW_SENT) is None
    blocker_after(execute(1, 1), AUTOCOMMIT | CURSOR_EXISTS)
    assert blocker_after(request(MySqlCommand.STMT_RESET, 1), AUTOCOMMIT) is None
    blocker_after(execute(1, 1), AUTOCOMMIT | CURSOR_EXISTS)
    assert blocker_after(execute(1), AUTOCOMMIT) is None
