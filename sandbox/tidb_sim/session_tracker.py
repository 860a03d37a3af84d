"""What one session did that MariaDB does not tell when it is asked: read off its statements. Pure."""

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
"""Without one of these, in lower case, a statement does nothing that matters here."""

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
        rb"|(?<![\w$.])(?P<what>get_lock|release_lock|release_all_locks)\s*\(\s*"
        rb"(?P<name>" + literal + rb"(?=\s*[,)]))?"
    )
    for backslash, literal in STRING_LITERAL_PATTERNS.items()
}
"""By whether a backslash escapes."""
_USER_VARIABLE = re.compile(rb"@(?:[\w$.]+|`(?:[^`]|``)+`)")


class SessionTracker:
    """One session. `database`: the current one, as far as simple statements say it."""

    def __init__(self, database: str) -> None:
        self.database = database
        self.prepared_statements = PreparedStatements()
        # The session begins with these values, and not with those of our login at MariaDB.
        self.last_statement: LastStatementState | None = LastStatementState(0, 0, ())
        self.temporary_tables: set[tuple[str, str]] = set()
        self.has_locked_tables = False
        self.user_lock_names: set[bytes] = set()
        """Of locks that may be held, in the client's character set: MariaDB can be asked for them."""
        self.unnamed_lock_count = 0
        """How many there may be whose names nobody saw: in a parameter, say."""
        self.next_transaction_isolation: str | None = None
        """The level that SET TRANSACTION has set for the next transaction, which MariaDB does not tell."""

    @property
    def tracks_all_statements(self) -> bool:
        """Whether `note` must be told of all statements."""
        return self.has_locked_tables or self.next_transaction_isolation is not None

    def must_track(self, text: bytes) -> bool:
        """Whether `note` must be told of these statements; most are of no interest."""
        return self.tracks_all_statements or affects_session(text)

    def track(self, text: bytes, status: int, *, failed: bool) -> None:
        """These statements have been executed; `status`: the server's flags; `failed`: the last one did.

        Of several we then do not know which have been executed: those that pin a session are believed.
        """
        found = split_statements(text, backslash_escapes=not status & NO_BACKSLASH_ESCAPES)
        for one in found:
            self._track_isolation(one, failed=failed)
            if prepares := _PREPARE.match(one):
                # What had that name before is gone in any case.
                self.prepared_statements.drop_named(statement_name(prepares[1]))
                if not failed or len(found) > 1:
                    self._track_prepare(prepares, status, failed=failed)
                continue
            if not failed or len(found) > 1:
                self._track_pinning(one)
                self._track_user_locks(one, status, failed=failed)
            if not failed:
                self._track_releases(one)
                self._track_named_statement(one, status)

    def _track_isolation(self, statement: bytes, *, failed: bool) -> None:
        level = _SET_TRANSACTION_ISOLATION.match(statement)
        if level is None:
            # What is not about the session's variables is a transaction, or ends one.
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
            what = (token["what"] or b"").lower()
            name = None if token["name"] is None else _parse_literal(token["name"], backslash=backslash)
            if what == b"get_lock":
                if name is None:
                    self.unnamed_lock_count += 1
                else:
                    self.user_lock_names.add(name)
            elif failed:
                continue
            elif what == b"release_all_locks":
                self.user_lock_names.clear()
                self.unnamed_lock_count = 0
            elif what and name is None:
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
        elif (gone := _DROP_DATABASE.fullmatch(statement)) and _unquote(gone[1]) == self.database:
            self.database = ""

    def _track_named_statement(self, statement: bytes, status: int) -> None:
        if gone := _DEALLOCATE.match(statement):
            self.prepared_statements.drop_named(statement_name(gone[1]))
        elif executed := _EXECUTE.fullmatch(statement):
            prepared = self.prepared_statements.find_named(statement_name(executed[1]))
            if prepared is not None and not _EXECUTE.match(prepared.text):
                self.track(prepared.text, status, failed=False)

    def _track_prepare(self, prepares: re.Match[bytes], status: int, *, failed: bool) -> None:
        text = _parse_literal(prepares[2], backslash=not status & NO_BACKSLASH_ESCAPES)
        self.add_named_statement(statement_name(prepares[1]), None if failed else text)

    def add_named_statement(self, name: str, text: bytes | None) -> None:
        """PREPARE in SQL. `text`: None when nobody saw it, or whether it succeeded."""
        self.prepared_statements.drop_named(name)
        is_text_unknown = text is None
        self.prepared_statements.add(
            PreparedStatement(text or b"", self.database, name=name, is_text_unknown=is_text_unknown)
        )

    def _qualified_table(self, written: bytes) -> tuple[str, str]:
        names = [_unquote(name) for name in _ONE_NAME.findall(written)]
        return (self.database, names[0]) if len(names) == 1 else (names[0], names[1])


def affects_session(text: bytes) -> bool:
    """Whether executing this may change what a ledger knows."""
    lower = text.lower()
    return any(hint in lower for hint in _KEYWORDS)


def parse_prepare_from_variable(text: bytes) -> tuple[str, bytes] | None:
    """Name and variable of `PREPARE name FROM @variable`; None when the text is something else."""
    found = split_statements(text)
    prepares = _PREPARE.fullmatch(found[0]) if len(found) == 1 else None
    if prepares is None or not _USER_VARIABLE.fullmatch(prepares[2]):
        return None
    return statement_name(prepares[1]), prepares[2]


def _parse_literal(written: bytes, *, backslash: bool) -> bytes | None:
    """The value of what is a string literal and nothing else, and can be read without its character set."""
    if b"\\" in written and not _is_utf8(written):
        return None  # in GBK it may be the second half of a character
    # Latin-1 carries any bytes through; the literal ends at the same place.
    found = parse_string_literal(written.decode("latin-1"), backslash_escapes=backslash)
    return None if found is None or found[1].strip() else found[0].encode("latin-1")


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def statement_name(written: bytes) -> str:
    """The name of a prepared statement; case does not matter."""
    return _unquote(written).lower()


def _unquote(written: bytes) -> str:
    name = written[1:-1].replace(b"``", b"`") if written.startswith(b"`") else written
    return name.decode(errors="replace")
