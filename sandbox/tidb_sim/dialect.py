"""Translates statements that TiDB understands and MariaDB does not. No I/O.

Only what clients and tests use: accounts with TiDB's plugins, variables with other names in MariaDB, the
start of transactions, the collation that MySQL 8 clients request, KILL, and functions that return the
user, since all sessions in MariaDB belong to root.
"""

from __future__ import annotations

import re

from sandbox.tidb_sim.accounts import CARRIER_PLUGIN, AuthPlugin, hash_password
from sandbox.tidb_sim.builtin_queries import (
    MAX_STATEMENT_BYTES,
    SqlClientInfo,
    answer_builtin,
    as_select,
    normalize_statement,
    quote_literal,
)
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.transactions import translate_begin

_KEYWORDS = (b"identified", b"transaction_", b"_0900_", b"user", b"begin", b"start")
"""A statement without any of these, in lower case, needs no translation."""

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
_KILL = re.compile(rb"(?is)\s*kill\s+(?:tidb\s+)?(?:(query|connection)\s+)?(\d+)\s*;?\s*")
_COLLATIONS = {b"ai_ci": b"utf8mb4_general_ci", b"bin": b"utf8mb4_bin"}
_CARRIED_PLUGINS = {
    plugin.value for plugin in (AuthPlugin.SHA2, AuthPlugin.SM3, AuthPlugin.TOKEN, AuthPlugin.LDAP_SIMPLE)
}


def translate_statement(statement: bytes, client: SqlClientInfo) -> bytes:
    """Return the statement for MariaDB; the same object if nothing changes."""
    lower = statement.lower()
    if not any(hint in lower for hint in _KEYWORDS):
        return statement
    if b"begin" in lower or b"start" in lower:
        statement = translate_begin(statement)
    if _ACCOUNT_STATEMENT.match(statement):
        return _IDENTIFIED_WITH.sub(_translate_auth_clause, statement)
    if _SELECT.match(statement):
        statement = _USER_FUNCTION.sub(lambda match: _resolve_user_function(match, client), statement)
    statement = _TRANSACTION_VARIABLE.sub(rb"\1tx_\2", statement)
    return _COLLATION.sub(lambda match: _COLLATIONS[match[1].lower()], statement)


def translate_prepared(statement: bytes, node: SimNode, client: SqlClientInfo) -> bytes:
    """Return a statement to prepare in MariaDB that gives TiDB's result at each execution."""
    builtin_row = (
        answer_builtin(normalize_statement(statement), node, client)
        if len(statement) <= MAX_STATEMENT_BYTES
        else None
    )
    return translate_statement(statement, client) if builtin_row is None else as_select(builtin_row)


def _resolve_user_function(match: re.Match[bytes], client: SqlClientInfo) -> bytes:
    if match[1] is None:
        return match[0]
    current = match[1].lower().startswith(b"current")
    return quote_literal(client.account if current else client.identity).encode()


def translate_kill(text: bytes) -> str | None:
    """Return the statement for MariaDB, or None if `text` is no KILL.

    Its status flags are not for the client.

    In TiDB, KILL of an unknown session succeeds, and KILL QUERY also ends an idle session, since it
    interrupts the read of the next command (pingcap/tidb pkg/server/server.go, `killQuery`).
    """
    match = _KILL.fullmatch(text)
    if match is None:
        return None
    number = match[2].decode()
    statement = f"kill {number}"
    if (match[1] or b"").lower() == b"query":
        idle = f"(select command from information_schema.processlist where id = {number}) = 'Sleep'"
        statement = f"if {idle} then {statement}; else kill query {number}; end if"
    return f"begin not atomic declare continue handler for 1094 begin end; {statement}; end"


def _translate_auth_clause(match: re.Match[bytes]) -> bytes:
    plugin, password = match[1].decode().lower(), (match[2] or b"").replace(b"''", b"'")
    if plugin == AuthPlugin.SOCKET:
        return f"identified via {CARRIER_PLUGIN}".encode()
    if plugin in _CARRIED_PLUGINS:
        hashed = hash_password(password) if password else ""
        return f"identified via {CARRIER_PLUGIN} using '{plugin}:{hashed}'".encode()
    if plugin == AuthPlugin.NATIVE and match[2] is not None:
        return f"identified via {plugin} using '{hash_password(password) if password else ''}'".encode()
    return match[0]
