"""Translates statements that start a transaction in TiDB for MariaDB, or returns TiDB's errors. No I/O.

Grammar: `BeginTransactionStmt` in pkg/parser/parser.y of pingcap/tidb v8.5.3. While
tidb_enable_noop_functions is off, `executeBegin` in pkg/executor/simple.go rejects READ ONLY before it
commits the open transaction.
"""

from __future__ import annotations

import re

from sandbox.tidb_sim.sql_lexer import split_statements

_BEGINS = re.compile(rb"(?i)(?:begin|start)\b")
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
_AS_OF = _READ_ONLY + b" as of timestamp "
"""A historical read, which MariaDB does not have."""
_READ_ONLY_NOOP_MESSAGE = (
    "function READ ONLY has only noop implementation in tidb now, use tidb_enable_noop_functions "
    "to enable these functions"
)
_SYNTAX_ERROR_MESSAGE = (
    "You have an error in your SQL syntax; check the manual that corresponds to your TiDB version for the "
    "right syntax to use"
)


def translate_begin(text: bytes) -> bytes:
    """Return the text for MariaDB; unchanged unless it starts a transaction in a way that MariaDB lacks."""
    statements = split_statements(_EXECUTED_COMMENT.sub(rb" \1 ", text))
    translations = [_translate(statement) for statement in statements]
    for translation in translations:
        # TiDB parses all statements before it executes the first one.
        if translation is not None and translation.startswith(b"signal"):
            return translation
    if len(statements) == 1 and translations[0] != _normalize(statements[0]):
        return translations[0] or text
    return text


def _translate(statement: bytes) -> bytes | None:
    """Translate one statement; None: it does not start a transaction, or is left to MariaDB."""
    if not _BEGINS.match(statement):
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
