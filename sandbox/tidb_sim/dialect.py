"""Translates statements that TiDB understands and MariaDB does not. No I/O.

This covers only what clients and tests use: accounts with TiDB's plugins, variables with other names in
MariaDB, the start of transactions, the default collation of MySQL 8 clients, KILL, and functions that return
the user (in MariaDB, all sessions belong to root).
"""

from __future__ import annotations

import re

from sandbox.tidb_sim.accounts import MARIADB_SUBSTITUTE_PLUGIN, AuthPlugin, hash_password
from sandbox.tidb_sim.builtin_queries import (
    MAX_STATEMENT_BYTES,
    SqlClientInfo,
    answer_builtin,
    normalize_statement,
    quote_literal,
    select_statement_for,
)
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.sql_lexer import split_statements

_KEYWORDS = (b"identified", b"transaction_", b"_0900_", b"user", b"begin", b"start")
"""If a statement, in lower case, contains none of these, it needs no translation."""

_QUOTED = rb"'((?:[^'\\]|'')*)'"
_IDENTIFIED_WITH = re.compile(
    rb"(?is)\bidentified\s+with\s+['\"`]?(\w+)['\"`]?(?:\s+by\s+" + _QUOTED + rb")?",
)
_ACCOUNT_STATEMENT = re.compile(rb"(?is)\s*(?:create|alter)\s+user\b")
_SELECT = re.compile(rb"(?is)\s*select\b")
_TRANSACTION_VARIABLE = re.compile(
    rb"(?i)(@@(?:session\.|global\.|local\.)?)transaction_(isolation|read_only)\b"
)
_USER_FUNCTION = re.compile(
    rb"""(?isx) '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | `[^`]*`  # literals stay unchanged
    | (?<![\w.@]) (current_user (?!\w) (?:\s*\(\s*\))? | (?:user|session_user|system_user) \s*\(\s*\))"""
)
_COLLATION = re.compile(rb"(?i)\butf8mb4_0900_(ai_ci|bin)\b")
_KILL = re.compile(rb"(?is)\s*kill\s+(?:(query|connection)\s+)?(\d+)\s*;?\s*")
_COLLATIONS = {b"ai_ci": b"utf8mb4_general_ci", b"bin": b"utf8mb4_bin"}

# Statements that start a transaction: `BeginTransactionStmt` in pkg/parser/parser.y of pingcap/tidb v8.5.3.
_STARTS_TRANSACTION = re.compile(rb"(?i)(?:begin|start)\b")
_EXECUTED_COMMENT = re.compile(rb"(?s)/\*!\d*(.*?)\*/")
_TRANSLATIONS = {
    b"begin": b"begin",
    b"begin optimistic": b"begin",
    b"begin pessimistic": b"begin",
    b"start transaction": b"start transaction",
    b"start transaction read write": b"start transaction read write",
    b"start transaction with consistent snapshot": b"start transaction with consistent snapshot",
    b"start transaction with causal consistency only": b"start transaction",
}
_READ_ONLY = b"start transaction read only"
_AS_OF = _READ_ONLY + b" as of timestamp "  # A historical read, which MariaDB does not support.
_READ_ONLY_NOOP_MESSAGE = (
    "function READ ONLY has only noop implementation in tidb now, use tidb_enable_noop_functions "
    "to enable these functions"
)
_SYNTAX_ERROR_MESSAGE = (
    "You have an error in your SQL syntax; check the manual that corresponds to your TiDB version for the "
    "right syntax to use"
)


def translate_statement(statement: bytes, client: SqlClientInfo) -> bytes:
    """Return the statement to send to MariaDB."""
    lower = statement.lower()
    if not any(hint in lower for hint in _KEYWORDS):
        return statement
    if b"begin" in lower or b"start" in lower:
        statement = _translate_begin(statement)
    if _ACCOUNT_STATEMENT.match(statement):
        return _IDENTIFIED_WITH.sub(_translate_auth_clause, statement)
    if _SELECT.match(statement):
        statement = _USER_FUNCTION.sub(lambda match: _resolve_user_function(match, client), statement)
    statement = _TRANSACTION_VARIABLE.sub(rb"\1tx_\2", statement)
    return _COLLATION.sub(lambda match: _COLLATIONS[match[1].lower()], statement)


def translate_prepared(statement: bytes, node: SimNode, client: SqlClientInfo) -> bytes:
    """Return the statement to prepare in MariaDB, so that each execution returns what TiDB would return."""
    builtin_row = (
        answer_builtin(normalize_statement(statement), node, client)
        if len(statement) <= MAX_STATEMENT_BYTES
        else None
    )
    return (
        translate_statement(statement, client) if builtin_row is None else select_statement_for(builtin_row)
    )


def _resolve_user_function(match: re.Match[bytes], client: SqlClientInfo) -> bytes:
    if match[1] is None:
        return match[0]
    current = match[1].lower().startswith(b"current")
    return quote_literal(client.account if current else client.identity).encode()


def translate_kill(text: bytes) -> str | None:
    """Return the statement for MariaDB, or None if `text` is no KILL.

    The caller must ignore the status flags in MariaDB's response. In TiDB, KILL of an unknown session
    succeeds (pingcap/tidb pkg/server/server.go, `Kill`).
    """
    match = _KILL.fullmatch(text)
    if match is None:
        return None
    statement = f"kill {(match[1] or b'').decode()} {match[2].decode()}"
    return f"begin not atomic declare continue handler for 1094 begin end; {statement}; end"


def _translate_auth_clause(match: re.Match[bytes]) -> bytes:
    plugin, password = match[1].decode().lower(), (match[2] or b"").replace(b"''", b"'")
    if plugin in (AuthPlugin.SHA2, AuthPlugin.TOKEN):
        hashed = hash_password(password) if password else ""
        return f"identified via {MARIADB_SUBSTITUTE_PLUGIN} using '{plugin}:{hashed}'".encode()
    return match[0]


def _translate_begin(text: bytes) -> bytes:
    """Return the text for MariaDB: `text`, unless it starts a transaction with syntax that MariaDB lacks."""
    statements = split_statements(_EXECUTED_COMMENT.sub(rb" \1 ", text))
    translations = [_translate_begin_statement(statement) for statement in statements]
    for translation in translations:
        # TiDB parses all statements before it executes any, so after a syntax error it executes none. Not
        # exact for READ ONLY, which TiDB rejects only when it executes the statement.
        if translation is not None and translation.startswith(b"signal"):
            return translation
    if len(statements) == 1 and translations[0] != _normalize(statements[0]):
        return translations[0] or text
    return text


def _translate_begin_statement(statement: bytes) -> bytes | None:
    """Translate one statement that starts a transaction; return None to leave a statement unchanged.

    While tidb_enable_noop_functions is off, `executeBegin` in pkg/executor/simple.go rejects READ ONLY before
    it commits the open transaction.
    """
    if not _STARTS_TRANSACTION.match(statement):
        return None
    normalised = _normalize(statement)
    if normalised == _READ_ONLY:
        return _signal_statement(1235, _READ_ONLY_NOOP_MESSAGE)
    if normalised.startswith(_AS_OF):
        return None
    return _TRANSLATIONS.get(normalised) or _signal_statement(1064, _SYNTAX_ERROR_MESSAGE)


def _normalize(statement: bytes) -> bytes:
    return b" ".join(statement.lower().split())


def _signal_statement(code: int, text: str) -> bytes:
    return f"signal sqlstate '42000' set mysql_errno = {code}, message_text = '{text[:128]}'".encode()
