"""Statements that begin a transaction: what TiDB takes, in MariaDB's words, and what it refuses. Pure.

Grammar: `BeginTransactionStmt` in pkg/parser/parser.y of pingcap/tidb v8.5.3. READ ONLY: `executeBegin` in
pkg/executor/simple.go refuses it before it commits what is open, as long as tidb_enable_noop_functions is
off.
"""

from __future__ import annotations

import re

from sandbox.tidb_sim.sqltext import statements

_BEGINS = re.compile(rb"(?i)(?:begin|start)\b")
_EXECUTED_COMMENT = re.compile(rb"(?s)/\*!\d*(.*?)\*/")
_TAKEN = {
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
"""A read of the past, which MariaDB does not have."""
_NOOP = (
    "function READ ONLY has only noop implementation in tidb now, use tidb_enable_noop_functions "
    "to enable these functions"
)
_SYNTAX = (
    "You have an error in your SQL syntax; check the manual that corresponds to your TiDB version for the "
    "right syntax to use"
)


def begun(text: bytes) -> bytes:
    """The text for MariaDB; the same object when it is not about this, or means the same there."""
    found = statements(_EXECUTED_COMMENT.sub(rb" \1 ", text))
    worded = [_one(statement) for statement in found]
    if any(_is_error(one) for one in worded if one is not None):
        # TiDB reads all statements before it executes the first one.
        return next(one for one in worded if one is not None and _is_error(one))
    if len(worded) == 1 and worded[0] not in (None, _words(found[0])):
        return worded[0] or text
    return text


def _one(statement: bytes) -> bytes | None:
    """In MariaDB's words; None: it begins no transaction."""
    if not _BEGINS.match(statement):
        return None
    words = _words(statement)
    if words == _READ_ONLY:
        return _error(1235, _NOOP)
    if words.startswith(_AS_OF):
        return None
    return _TAKEN.get(words) or _error(1064, _SYNTAX)


def _words(statement: bytes) -> bytes:
    return b" ".join(statement.lower().split())


def _error(code: int, text: str) -> bytes:
    return f"signal sqlstate '42000' set mysql_errno = {code}, message_text = '{text[:128]}'".encode()


def _is_error(worded: bytes) -> bool:
    return worded.startswith(b"signal")
