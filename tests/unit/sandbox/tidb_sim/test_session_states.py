"""Session states: their JSON, the SQL literal around it, and the results of the last statement."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.tidb_sim.charsets import decode_statement, mariadb_codec, tidb_codec
from sandbox.tidb_sim.last_statement_state import LastStatementState
from sandbox.tidb_sim.packets import AUTOCOMMIT
from sandbox.tidb_sim.restore_states import variable_expression
from sandbox.tidb_sim.session_states import (
    InvalidSessionStates,
    PreparedStatementState,
    SessionStates,
    SqlWarning,
    UserVariable,
)
from sandbox.tidb_sim.sql_lexer import parse_string_literal, split_statements

STATES = SessionStates(
    user_variables={
        "a": UserVariable("INT", b"-5"),
        "ü`": UserVariable("VARCHAR utf8mb4_bin", "süß".encode()),
        "big": UserVariable("INT UNSIGNED", b"18446744073709551615"),
        "nothing": UserVariable("DOUBLE", None),
    },
    system_variables={"sql_mode": "", "time_zone": "+02:00"},
    statements={
        3: PreparedStatementState("select ?", "shop", "", b"\x03\0"),
        4: PreparedStatementState("select 'ü'", "", "s"),
    },
    last_statement_id=9,
    status=2,
    database="shop",
    found_rows=(1 << 64) - 1,
    affected_rows=-1,
    last_insert_id=(1 << 63) + 1,
    warnings=(SqlWarning("Warning", 1292, "Truncated incorrect DOUBLE value: 'x'"),),
)


def test_states_round_trip() -> None:
    text = STATES.encode()
    assert SessionStates.parse(text) == STATES
    stored = json.loads(text)
    assert stored["found-rows"] == 18446744073709551615
    assert stored["last-insert-id"] == 9223372036854775809
    assert stored["prepared-stmts"]["3"] == {"text": "select ?", "db": "shop", "types": "AwA="}
    assert stored["prepared-stmts"]["4"] == {"text": "select 'ü'", "name": "s"}
    assert "ü" in text


def test_encode_omits_empty_values() -> None:
    states = SessionStates(
        user_variables={}, system_variables={"a": ""}, statements={}, database="", found_rows=0, warnings=()
    )
    assert json.loads(states.encode()) == {"sys-vars": {"a": ""}}


def test_parses_partial_states() -> None:
    states = SessionStates.parse('{"affected-rows": 3, "found-rows": 7, "rs-group": "default"}')
    assert states == SessionStates(affected_rows=3, found_rows=7)
    assert not states.is_complete
    assert SessionStates.parse('{"sys-vars": {"sql_mode": ""}}').is_complete
    assert not SessionStates.parse('{"sys-vars": {"collation_connection": "utf8mb4_bin"}}').is_complete
    assert SessionStates.parse('{"prepared-stmts": {}}').is_complete


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"sys-vars": []}',
        '{"sys-vars": {"a": 1}}',
        '{"current-db": 1}',
        '{"found-rows": "7"}',
        '{"found-rows": 7.5}',
        '{"found-rows": -1}',
        '{"found-rows": 18446744073709551616}',
        '{"status": true}',
        '{"prepared-stmts": {"x": {"text": "select 1"}}}',
        '{"prepared-stmts": {"1": "select 1"}}',
        '{"prepared-stmts": {"1": {"text": "select 1", "types": "?"}}}',
        '{"user-var-values": {"a": "35"}, "user-var-types": {"a": "POINT"}}',
        '{"user-var-values": {"a": "35"}}',
        '{"user-var-values": {"a": "zz"}, "user-var-types": {"a": "INT"}}',
        '{"user-var-values": {"a": "3b"}, "user-var-types": {"a": "INT"}}',
        '{"warnings": [1]}',
        "[" * 100_000,
        '{"prepared-stmts": {"4294967296": {"text": "select 1"}}}',
        '{"prepared-stmts": {"\u0663": {"text": "select 1"}}}',
        '{"sys-vars": {"a": "\\ud800"}}',
        '{"prepared-stmts": {"1": {"text": "\\udfff"}}}',
        '{"user-var-values": {"\\ud800": "35"}, "user-var-types": {"\\ud800": "INT"}}',
    ],
)
def test_rejects_invalid_states(text: str) -> None:
    with pytest.raises(InvalidSessionStates):
        SessionStates.parse(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)
_KEYS = st.sampled_from(sorted(json.loads(STATES.encode())))


@given(st.dictionaries(_KEYS, _JSON | st.dictionaries(st.sampled_from("123"), _JSON)))
def test_parses_or_rejects_any_json(stored: dict[str, Any]) -> None:
    try:
        states = SessionStates.parse(json.dumps(stored))
    except InvalidSessionStates:
        return
    states.encode().encode()


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (UserVariable("INT", b"-5"), "-5"),
        (UserVariable("INT UNSIGNED", b"5"), "CAST(5 AS UNSIGNED)"),
        (UserVariable("DOUBLE", b"5"), "5e0"),
        (UserVariable("DOUBLE", b"1e100"), "1e100"),
        (UserVariable("DECIMAL", b"1.50"), "1.50"),
        (UserVariable("DECIMAL", b"5"), "5."),
        (UserVariable("VARCHAR binary", b"\xff'"), "x'ff27'"),
        (UserVariable("VARCHAR latin1_swedish_ci", b"\xe4"), "_latin1 x'e4' COLLATE latin1_swedish_ci"),
        (UserVariable("VARCHAR utf8mb4_bin", None), "NULL"),
    ],
)
def test_user_variables_keep_their_types(variable: UserVariable, expected: str) -> None:
    assert variable_expression(variable) == expected


# Literals.


@pytest.mark.parametrize(
    ("text", "backslash", "expected"),
    [
        ("'it''s'", True, ("it's", "")),
        (r"'it\'s' ;", True, ("it's", " ;")),
        (r"'a\\b\"c\n\0\%'", True, ('a\\b"c\n\0\\%', "")),
        (r"'a\\b'", False, (r"a\\b", "")),
        (r"'a\' b'", False, ("a\\", " b'")),
        ("'it''s'", False, ("it's", "")),
        ('"a""b\'c"', True, ("a\"b'c", "")),
        ('"a""b"', False, ('a"b', "")),
        ("'open", True, None),
        (r"'open\'", True, None),
        ("@a", True, None),
        ("", True, None),
    ],
)
def test_parses_literal_according_to_sql_mode(
    text: str, backslash: bool, expected: tuple[str, str] | None
) -> None:
    assert parse_string_literal(text, backslash_escapes=backslash) == expected


def test_double_quotes_may_quote_names() -> None:
    assert parse_string_literal('"a"', backslash_escapes=True, double_quotes=False) is None


@given(st.text(max_size=60))
def test_escaped_literals_round_trip(value: str) -> None:
    doubled = value.replace("\\", "\\\\").replace("'", "''")
    slashed = value.replace("\\", "\\\\").replace("'", "\\'")
    for text in (doubled, slashed):
        assert parse_string_literal(f"'{text}' x", backslash_escapes=True) == (value, " x")
    assert parse_string_literal("'" + value.replace("'", "''") + "' x", backslash_escapes=False) == (
        value,
        " x",
    )


def test_parses_literal_of_megabytes() -> None:
    value = 'x"\\' * 1_000_000
    text = "'" + value.replace("\\", "\\\\") + "'"
    assert parse_string_literal(text, backslash_escapes=True) == (value, "")


def test_splits_statements() -> None:
    text = b'select \';\' ; -- a; b\n /* ; */ use `a;b`; # end;\n select "\\";"; ;\0'
    assert split_statements(text) == [b"select ';'", b"use `a;b`", b'select "\\";"']


def test_maps_character_sets_to_codecs() -> None:
    assert "süß".encode(mariadb_codec("latin1")) == b"s\xfc\xdf"
    assert tidb_codec("latin1") == tidb_codec("utf8mb4") == "utf-8"
    assert tidb_codec("GBK") == "gbk"
    assert decode_statement("ü".encode(), "latin1") == "ü"
    assert decode_statement(b"\xfc", "latin1") == "ü"


# Results of the last statement.

WARNINGS = (SqlWarning("Warning", 1292, "w"), SqlWarning("Error", 1064, "e"))
LAST_STATEMENT = LastStatementState(3, 7, WARNINGS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"select row_count()", b"select 3 as `row_count()`"),
        (
            b"SELECT FOUND_ROWS ( ), ROW_COUNT() AS r;",
            b"SELECT 7 as `FOUND_ROWS ( )`, 3 AS r;",
        ),
        (b"select @@warning_count", b"select 2 as `@@warning_count`"),
        (b"select @@session.error_count", b"select 1 as `@@session.error_count`"),
        (b"select concat(1, row_count(), 2)", b"select concat(1, 3, 2)"),
        (b"insert into t values (row_count(), 'row_count()')", b"insert into t values (3, 'row_count()')"),
        (b"set @a = found_rows()", b"set @a = 7"),
        (
            b"insert into t values (';', row_count()); select row_count()",
            b"insert into t values (';', 3); select row_count()",
        ),
        (b"select 1 -- don't; \n, row_count()", b"select 1 -- don't; \n, 3 as `row_count()`"),
        (b"select 1 # row_count()", None),
        (b"select `row_count()`, a.row_count(), my_row_count()", None),
        (b"select 1", None),
    ],
)
def test_substitutes_results_of_last_statement(text: bytes, expected: bytes | None) -> None:
    assert LAST_STATEMENT.substitute(text) == (text if expected is None else expected)


def test_substitutes_only_known_results() -> None:
    assert LastStatementState(row_count=-1).substitute(
        b"select row_count(), found_rows(), @@warning_count"
    ) == (b"select (-1) as `row_count()`, found_rows(), @@warning_count")


@pytest.mark.parametrize(
    ("text", "remaining"),
    [
        (b"select 1", None),
        (b"select * from t", None),
        (b"set @a = 1", LastStatementState(found_rows=7)),
        (b" INSERT into t values (1)", LastStatementState(found_rows=7)),
        (b"select @@warning_count", LastStatementState(warnings=WARNINGS)),
        (b"set @a = 1; select 1", None),
        (b"select @@warning_count; select 1", None),
        (b"set @a = ';' ; ", LastStatementState(found_rows=7)),
    ],
)
def test_next_statement_clears_results(text: bytes, remaining: LastStatementState | None) -> None:
    assert LAST_STATEMENT.after_statement(text) == remaining


def test_answers_show_warnings() -> None:
    def listed(statement: str, last_statement: LastStatementState = LAST_STATEMENT) -> list[bytes] | None:
        return last_statement.answer_show_warnings(statement, AUTOCOMMIT, deprecate_eof=True)

    assert (listed("show warnings") or [])[4:-1] == [b"\x07Warning\x041292\x01w", b"\x05Error\x041064\x01e"]
    assert (listed("show errors") or [])[4:-1] == [b"\x05Error\x041064\x01e"]
    assert (listed("show count(*) warnings") or [])[2:-1] == [b"\x012"]
    assert (listed("show warnings", LastStatementState(warnings=())) or [])[4:-1] == []
    assert listed("show warnings", LastStatementState(3, 7)) is None
    assert listed("show tables") is None
    assert listed("select warnings") is None
