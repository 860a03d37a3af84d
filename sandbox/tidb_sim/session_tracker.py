"""State of one session that MariaDB cannot report. It is derived from the session's statements. No I/O."""

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
"""If a statement, in lower case, contains none of these, it changes nothing that is tracked here."""

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
"""Patterns of literals, quoted names and calls of lock functions. The key is whether a backslash escapes."""
_USER_VARIABLE = re.compile(rb"@(?:[\w$.]+|`(?:[^`]|``)+`)")


class SessionTracker:
    """Tracks the state of one session.

    `database`: the current database. It is outdated if a statement changes the database but matches neither
    `_USE` nor `_DROP_DATABASE`.
    """

    def __init__(self, database: str) -> None:
        self.database = database
        self.prepared_statements = PreparedStatements()
        # ROW_COUNT(), FOUND_ROWS() and warnings of a new session. MariaDB would return the results of the
        # queries that the simulated server makes at login.
        self.last_statement: LastStatementState | None = LastStatementState(0, 0, ())
        self.temporary_tables: set[tuple[str, str]] = set()
        self.has_locked_tables = False
        self.user_lock_names: set[bytes] = set()
        """Names of locks that may be held, in the client's character set. MariaDB knows which are held."""
        self.unnamed_lock_count = 0
        """Number of locks that may be held but have unknown names, for example from a parameter."""
        self.next_transaction_isolation: str | None = None
        """The level that SET TRANSACTION has set for the next transaction. MariaDB does not report it."""

    @property
    def tracks_all_statements(self) -> bool:
        """Whether `track` needs all statements, as each may unlock tables or use up the isolation level."""
        return self.has_locked_tables or self.next_transaction_isolation is not None

    def must_track(self, text: bytes) -> bool:
        """Return whether `track` needs the statements in `text`. Most change nothing that is tracked."""
        return self.tracks_all_statements or affects_session(text)

    def track(self, text: bytes, status: int, *, failed: bool) -> None:
        """Record the effects of executed statements. `status`: the server's status flags after them.

        `failed`: the response ended with an error. A single failed statement adds nothing. Of several
        statements, it is unknown which were executed. To be safe, statements are tracked if they add state
        that can prevent a migration, and ignored if they remove such state.
        """
        statements = split_statements(text, backslash_escapes=not status & NO_BACKSLASH_ESCAPES)
        for statement in statements:
            self._track_isolation(statement, failed=failed)
            if prepare := _PREPARE.match(statement):
                # Even a PREPARE that fails drops the previous statement with that name.
                self.prepared_statements.drop_named(statement_name(prepare[1]))
                if not failed or len(statements) > 1:
                    literal = _parse_literal(prepare[2], backslash=not status & NO_BACKSLASH_ESCAPES)
                    self.add_named_statement(statement_name(prepare[1]), None if failed else literal)
                continue
            if not failed or len(statements) > 1:
                if created := _CREATE_TEMPORARY_TABLE.match(statement):
                    self.temporary_tables.add(self._qualified_table(created[1]))
                elif _LOCK_TABLES.match(statement):
                    self.has_locked_tables = True
                self._track_user_locks(statement, status, failed=failed)
            if not failed:
                self._track_releases_and_database(statement)
                self._track_named_statement(statement, status)

    def _track_isolation(self, statement: bytes, *, failed: bool) -> None:
        level = _SET_TRANSACTION_ISOLATION.match(statement)
        if level is None:
            # Every statement except SET starts or ends a transaction, so the level is used up.
            if not _SET.match(statement):
                self.next_transaction_isolation = None
        elif not failed:
            self.next_transaction_isolation = "-".join(level[1].decode().upper().split())

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

    def _track_releases_and_database(self, statement: bytes) -> None:
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

    def add_named_statement(self, name: str, text: bytes | None) -> None:
        """Add a statement that SQL has prepared under this name.

        `text`: None if the text, or the success of the PREPARE, is unknown.
        """
        self.prepared_statements.drop_named(name)
        statement = PreparedStatement(text or b"", self.database, name=name, is_text_unknown=text is None)
        self.prepared_statements.add(statement)

    def _qualified_table(self, written: bytes) -> tuple[str, str]:
        names = [_unquote(name) for name in _ONE_NAME.findall(written)]
        return (self.database, names[0]) if len(names) == 1 else (names[0], names[1])


def affects_session(text: bytes) -> bool:
    """Return whether an execution may change the state that a SessionTracker tracks."""
    lower = text.lower()
    return any(hint in lower for hint in _KEYWORDS)


def parse_prepare_from_variable(text: bytes) -> tuple[str, bytes] | None:
    """Return the name and the variable of `PREPARE name FROM @variable`; None for any other text."""
    statements = split_statements(text)
    prepare = _PREPARE.fullmatch(statements[0]) if len(statements) == 1 else None
    if prepare is None or not _USER_VARIABLE.fullmatch(prepare[2]):
        return None
    return statement_name(prepare[1]), prepare[2]


def _parse_literal(written: bytes, *, backslash: bool) -> bytes | None:
    """Return the value of a string literal; None if `written` is not exactly one literal.

    The result is also None if the value depends on the character set, which is unknown here.
    """
    if b"\\" in written:
        try:
            written.decode()
        except UnicodeDecodeError:
            return None  # In GBK, a backslash may be the second byte of a character.
    # Latin-1 can decode and encode any bytes, and does not change where the literal ends.
    parsed = parse_string_literal(written.decode("latin-1"), backslash_escapes=backslash)
    return None if parsed is None or parsed[1].strip() else parsed[0].encode("latin-1")


def statement_name(written: bytes) -> str:
    """Return the name of a prepared statement in lower case, since case does not matter."""
    return _unquote(written).lower()


def _unquote(written: bytes) -> str:
    name = written[1:-1].replace(b"``", b"`") if written.startswith(b"`") else written
    return name.decode(errors="replace")
