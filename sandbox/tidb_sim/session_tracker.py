"""State of one session that MariaDB cannot report, derived from the session's statements. No I/O."""

from __future__ import annotations

import re

from sandbox.tidb_sim.last_statement_state import LastStatementState
from sandbox.tidb_sim.packets import NO_BACKSLASH_ESCAPES
from sandbox.tidb_sim.prepared_statements import PreparedStatement, PreparedStatements
from sandbox.tidb_sim.sql_lexer import STRING_LITERAL_PATTERNS, parse_string_literal, split_statements

_KEYWORDS = (
    *(b"temporary", b"lock", b"prepare", b"execute", b"drop", b"isolation"),
    *(b"use" + mark for mark in (b" ", b"\t", b"\r", b"\n", b"`", b"/*")),
)
"""A statement without any of these, in lower case, changes nothing that is tracked here."""

_NAME = rb"(?:`(?:[^`]|``)+`|[\w$\x80-\xff]+)"
_TABLE = _NAME + rb"(?:\s*\.\s*" + _NAME + rb")?"

_ONE_NAME = re.compile(_NAME)
_ONE_TABLE = re.compile(_TABLE)
_CREATE_TEMPORARY_TABLE = re.compile(
    rb"(?is)create\s+(?:or\s+replace\s+)?temporary\s+table\s+(?:if\s+not\s+exists\s+)?(" + _TABLE + rb")"
)
_TABLES = _TABLE + rb"(?:\s*,\s*" + _TABLE + rb")*"
_DROP_TABLE = re.compile(rb"(?is)drop\s+(?:temporary\s+)?tables?\s+(?:if\s+exists\s+)?(" + _TABLES + rb")")
_USE = re.compile(rb"(?is)use(?:\s+|(?=`))(" + _NAME + rb")")
_DROP_DATABASE = re.compile(rb"(?is)drop\s+(?:database|schema)\s+(?:if\s+exists\s+)?(" + _NAME + rb")")
_LOCK_TABLES = re.compile(rb"(?is)lock\s+tables?\b")
_UNLOCK_TABLES = re.compile(rb"(?is)(?:unlock\s+tables?|begin|start\s+transaction)\b")
_SET_TRANSACTION_ISOLATION = re.compile(
    rb"(?is)set\s+transaction\s+(?:read\s+\w+\s*,\s*)?"
    rb"isolation\s+level\s+(read\s+uncommitted|read\s+committed|repeatable\s+read|serializable)\b"
)
_SET = re.compile(rb"(?i)set\b")
_PREPARE = re.compile(rb"(?is)prepare\s+(" + _NAME + rb")\s+from\s*(.*)")
_DEALLOCATE = re.compile(rb"(?is)(?:deallocate|drop)\s+prepare\s+(" + _NAME + rb")")
_EXECUTE = re.compile(rb"(?is)execute\s+(" + _NAME + rb")(?:\s+using\b.*)?")
_USER_LOCK_CALLS = {
    backslash: re.compile(
        rb"(?is)" + literal + rb"|`[^`]*+`"
        rb"|(?<![\w$.])(?P<function>get_lock|release_lock|release_all_locks)\s*\(\s*"
        rb"(?P<name>" + literal + rb"(?=\s*[,)]))?"
    )
    for backslash, literal in STRING_LITERAL_PATTERNS.items()
}
"""By whether a backslash escapes."""
_USER_VARIABLE = re.compile(rb"@(?:[\w$.]+|`(?:[^`]|``)+`)")


class SessionTracker:
    """Tracks one session. `database`: the current one, as far as simple statements show it."""

    def __init__(self, database: str) -> None:
        self.database = database
        self.prepared_statements = PreparedStatements()
        # The session starts with these values, not with those of our login at MariaDB.
        self.last_statement: LastStatementState | None = LastStatementState(0, 0, ())
        self.temporary_tables: set[tuple[str, str]] = set()
        self.has_locked_tables = False
        self.user_lock_names: set[bytes] = set()
        """Locks that may be held, in the client's character set: MariaDB can be queried for them."""
        self.unnamed_lock_count = 0
        """How many locks with unknown names may be held: named by a parameter, for example."""
        self.next_transaction_isolation: str | None = None
        """The level that SET TRANSACTION has set for the next transaction, which MariaDB does not report."""

    @property
    def tracks_all_statements(self) -> bool:
        """Whether `track` needs all statements."""
        return self.has_locked_tables or self.next_transaction_isolation is not None

    def must_track(self, text: bytes) -> bool:
        """Return whether `track` needs these statements; most have no effect here."""
        return self.tracks_all_statements or affects_session(text)

    def track(self, text: bytes, status: int, *, failed: bool) -> None:
        """Record executed statements; `status`: the server's flags; `failed`: the last one failed.

        Of several statements it is then unknown which were executed: those that pin a session are assumed to.
        """
        statements = split_statements(text, backslash_escapes=not status & NO_BACKSLASH_ESCAPES)
        for statement in statements:
            self._track_isolation(statement, failed=failed)
            if prepare := _PREPARE.match(statement):
                # The previous statement with that name is dropped in any case.
                self.prepared_statements.drop_named(statement_name(prepare[1]))
                if not failed or len(statements) > 1:
                    self._track_prepare(prepare, status, failed=failed)
                continue
            if not failed or len(statements) > 1:
                self._track_pinning(statement)
                self._track_user_locks(statement, status, failed=failed)
            if not failed:
                self._track_releases(statement)
                self._track_named_statement(statement, status)

    def _track_isolation(self, statement: bytes, *, failed: bool) -> None:
        level = _SET_TRANSACTION_ISOLATION.match(statement)
        if level is None:
            # A statement that does not set the session's variables starts or ends a transaction.
            if not _SET.match(statement):
                self.next_transaction_isolation = None
        elif not failed:
            self.next_transaction_isolation = "-".join(level[1].decode().upper().split())

    def _track_pinning(self, statement: bytes) -> None:
        if created := _CREATE_TEMPORARY_TABLE.match(statement):
            self.temporary_tables.add(self._qualified_table(created[1]))
        elif _LOCK_TABLES.match(statement):
            self.has_locked_tables = True

    def _track_user_locks(self, statement: bytes, status: int, *, failed: bool) -> None:
        backslash = not status & NO_BACKSLASH_ESCAPES
        for token in _USER_LOCK_CALLS[backslash].finditer(statement):
            function = (token["function"] or b"").lower()
            name = None if token["name"] is None else _parse_literal(token["name"], backslash=backslash)
            if function == b"get_lock":
                if name is None:
                    self.unnamed_lock_count += 1
                else:
                    self.user_lock_names.add(name)
            elif failed:
                continue
            elif function == b"release_all_locks":
                self.user_lock_names.clear()
                self.unnamed_lock_count = 0
            elif function and name is None:
                self.unnamed_lock_count = max(0, self.unnamed_lock_count - 1)

    def _track_releases(self, statement: bytes) -> None:
        if dropped := _DROP_TABLE.match(statement):
            self.temporary_tables -= {
                self._qualified_table(table) for table in _ONE_TABLE.findall(dropped[1])
            }
        elif _UNLOCK_TABLES.match(statement):
            self.has_locked_tables = False
        elif used := _USE.fullmatch(statement):
            self.database = _unquote(used[1])
        elif (dropped := _DROP_DATABASE.fullmatch(statement)) and _unquote(dropped[1]) == self.database:
            self.database = ""

    def _track_named_statement(self, statement: bytes, status: int) -> None:
        if deallocated := _DEALLOCATE.match(statement):
            self.prepared_statements.drop_named(statement_name(deallocated[1]))
        elif executed := _EXECUTE.fullmatch(statement):
            prepared = self.prepared_statements.find_named(statement_name(executed[1]))
            if prepared is not None and not _EXECUTE.match(prepared.text):
                self.track(prepared.text, status, failed=False)

    def _track_prepare(self, prepare: re.Match[bytes], status: int, *, failed: bool) -> None:
        text = _parse_literal(prepare[2], backslash=not status & NO_BACKSLASH_ESCAPES)
        self.add_named_statement(statement_name(prepare[1]), None if failed else text)

    def add_named_statement(self, name: str, text: bytes | None) -> None:
        """Add a PREPARE of SQL. `text`: None if it is unknown, or unknown whether the PREPARE succeeded."""
        self.prepared_statements.drop_named(name)
        is_text_unknown = text is None
        self.prepared_statements.add(
            PreparedStatement(text or b"", self.database, name=name, is_text_unknown=is_text_unknown)
        )

    def _qualified_table(self, written: bytes) -> tuple[str, str]:
        names = [_unquote(name) for name in _ONE_NAME.findall(written)]
        return (self.database, names[0]) if len(names) == 1 else (names[0], names[1])


def affects_session(text: bytes) -> bool:
    """Return whether executing this may change what a SessionTracker tracks."""
    lower = text.lower()
    return any(hint in lower for hint in _KEYWORDS)


def parse_prepare_from_variable(text: bytes) -> tuple[str, bytes] | None:
    """Return name and variable of `PREPARE name FROM @variable`; None for any other text."""
    statements = split_statements(text)
    prepare = _PREPARE.fullmatch(statements[0]) if len(statements) == 1 else None
    if prepare is None or not _USER_VARIABLE.fullmatch(prepare[2]):
        return None
    return statement_name(prepare[1]), prepare[2]


def _parse_literal(written: bytes, *, backslash: bool) -> bytes | None:
    """Return the value of a lone string literal; None if it depends on an unknown character set."""
    if b"\\" in written and not _is_utf8(written):
        return None  # In GBK the backslash may be the second half of a character.
    # Latin-1 preserves any bytes; the literal ends at the same place.
    parsed = parse_string_literal(written.decode("latin-1"), backslash_escapes=backslash)
    return None if parsed is None or parsed[1].strip() else parsed[0].encode("latin-1")


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def statement_name(written: bytes) -> str:
    """Return the name of a prepared statement; case does not matter."""
    return _unquote(written).lower()


def _unquote(written: bytes) -> str:
    name = written[1:-1].replace(b"``", b"`") if written.startswith(b"`") else written
    return name.decode(errors="replace")
