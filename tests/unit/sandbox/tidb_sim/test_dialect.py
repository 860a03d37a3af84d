"""Translation of TiDB statements for MariaDB."""

from __future__ import annotations

import pytest

from sandbox.tidb_sim.accounts import hash_password
from sandbox.tidb_sim.builtin_queries import SqlClientInfo
from sandbox.tidb_sim.dialect import translate_prepared, translate_statement
from sandbox.tidb_sim.node import SimNode

CLIENT = SqlClientInfo("10.9.9.9:1", "anna", "10.9.%")
HASH = hash_password(b"it's").encode()


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
            b"alter user u identified with tidb_auth_token",
            b"alter user u identified via unix_socket using 'tidb_auth_token:'",
        ),
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
        (b"BEGIN Optimistic;", b"begin"),
        (b"/* a */ begin\npessimistic", b"begin"),
        (b"start transaction with causal consistency only", b"start transaction"),
    ],
)
def test_translates_tidb_syntax_to_mariadb(text: bytes, expected: bytes) -> None:
    assert translate_statement(text, CLIENT) == expected


@pytest.mark.parametrize(
    "text",
    [
        b"select 1",
        b"select current_users, @current_user, user from mysql.user",
        b"create view v as select user() as u",
        b"create user u identified by 'x'",
        b"create user u identified with a_plugin by 'x'",
        b"select 'identified with tidb_auth_token', transaction_isolation from t",
        b"BEGIN",
        b"begin ; select 1",
        b"select 'begin foo', start from t",
        b"Start Transaction With Consistent Snapshot",
    ],
)
def test_leaves_other_statements_unchanged(text: bytes) -> None:
    assert translate_statement(text, CLIENT) == text


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"begin foo", 1064),
        (b"BEGIN WORK", 1064),
        (b"begin not atomic select 1", 1064),
        (b"select 1; start transaction foo", 1064),
        (b"begin /*! foo */", 1064),
        (b"START TRANSACTION READ ONLY", 1235),
        (b"start transaction /*!40000 read only */;", 1235),
    ],
)
def test_translates_statements_rejected_by_tidb_to_errors(text: bytes, code: int) -> None:
    """TiDB rejects these statements and keeps an open transaction, which MariaDB would commit for some."""
    assert translate_statement(text, CLIENT).startswith(
        f"signal sqlstate '42000' set mysql_errno = {code},".encode()
    )


def test_prepared_statement_returns_node_values() -> None:
    node = SimNode("10.0.0.7:4000", "v8.5.3", "8", {}, sql_port=4000)
    assert translate_prepared(b"SELECT @@port", node, CLIENT) == b"select 4000 as `@@port`"
    assert (
        translate_prepared(b"select @@transaction_isolation, ?", node, CLIENT) == b"select @@tx_isolation, ?"
    )
    text = b"select ?"
    assert translate_prepared(text, node, CLIENT) is text
