"""What one session did that MariaDB does not tell when it is asked: read off its statements. Pure."""

from __future__ import annotations

import re

from sandbox.tidb_sim.last_statement_state import Leftovers
from sandbox.tidb_sim.packets import NO_BACKSLASH_ESCAPES
from sandbox.tidb_sim.prepared_statements import Statement, Statements
from sandbox.tidb_sim.sql_lexer import LITERALS, statements, string_literal

_HINTS = (
    *(b"temporary", b"lock", b"prepare", b"execute", b"drop", b"isolation"),
    *(b"use" + mark for mark in (b" ", b"\t", b"\r", b"\n", b"`", b"/*")),
)
"""Without one of these, in lower case, a statement does nothing that matters here."""

_NAME = rb"(?:`(?:[^`]|``)+`|[\w$\x80-\xff]+)"
_TABLE = _NAME + rb"(?:\s*\.\s*" + _NAME + rb")?"

_ONE_NAME = re.compile(_NAME)
_ONE_TABLE = re.compile(_TABLE)
_CREATE = re.compile(
    rb"(?is)create\s+(?:or\s+replace\s+)?temporary\s+table\s+(?:if\s+not\s+exists\s+)?(" + _TABLE + rb")"
)
_TABLES = _TABLE + rb"(?:\s*,\s*" + _TABLE + rb")*"
_DROP = re.compile(rb"(?is)drop\s+(?:temporary\s+)?tables?\s+(?:if\s+exists\s+)?(" + _TABLES + rb")")
_USE = re.compile(rb"(?is)use(?:\s+|(?=`))(" + _NAME + rb")")
_DROP_DATABASE = re.compile(rb"(?is)drop\s+(?:database|schema)\s+(?:if\s+exists\s+)?(" + _NAME + rb")")
_LOCK_TABLES = re.compile(rb"(?is)lock\s+tables?\b")
_UNLOCKS = re.compile(rb"(?is)(?:unlock\s+tables?|begin|start\s+transaction)\b")
_ONCE = re.compile(
    rb"(?is)set\s+transaction\s+(?:read\s+\w+\s*,\s*)?"
    rb"isolation\s+level\s+(read\s+uncommitted|read\s+committed|repeatable\s+read|serializable)\b"
)
_SETS = re.compile(rb"(?i)set\b")
_PREPARE = re.compile(rb"(?is)prepare\s+(" + _NAME + rb")\s+from\s*(.*)")
_LET_GO = re.compile(rb"(?is)(?:deallocate|drop)\s+prepare\s+(" + _NAME + rb")")
_EXECUTE = re.compile(rb"(?is)execute\s+(" + _NAME + rb")(?:\s+using\b.*)?")
_LOCKS = {
    backslash: re.compile(
        rb"(?is)" + literal + rb"|`[^`]*+`"
        rb"|(?<![\w$.])(?P<what>get_lock|release_lock|release_all_locks)\s*\(\s*"
        rb"(?P<name>" + literal + rb"(?=\s*[,)]))?"
    )
    for backslash, literal in LITERALS.items()
}
"""By whether a backslash escapes."""
_VARIABLE = re.compile(rb"@(?:[\w$.]+|`(?:[^`]|``)+`)")


class Ledger:
    """One session. `database`: the current one, as far as simple statements say it."""

    def __init__(self, database: str) -> None:
        self.database = database
        self.statements = Statements()
        # The session begins with these values, and not with those of our login at MariaDB.
        self.leftovers: Leftovers | None = Leftovers(0, 0, ())
        self.temporary: set[tuple[str, str]] = set()
        self.tables_locked = False
        self.lock_names: set[bytes] = set()
        """Of locks that may be held, in the client's character set: MariaDB can be asked for them."""
        self.nameless_locks = 0
        """How many there may be whose names nobody saw: in a parameter, say."""
        self.isolation_once: str | None = None
        """The level that SET TRANSACTION has set for the next transaction, which MariaDB does not tell."""

    @property
    def attentive(self) -> bool:
        """Whether `note` must be told of all statements."""
        return self.tables_locked or self.isolation_once is not None

    def heeds(self, text: bytes) -> bool:
        """Whether `note` must be told of these statements; most are of no interest."""
        return self.attentive or matters(text)

    def note(self, text: bytes, status: int, *, failed: bool) -> None:
        """These statements have been executed; `status`: the server's flags; `failed`: the last one did.

        Of several we then do not know which have been executed: those that pin a session are believed.
        """
        found = statements(text, backslash=not status & NO_BACKSLASH_ESCAPES)
        for one in found:
            self._isolated(one, failed=failed)
            if prepares := _PREPARE.match(one):
                # What had that name before is gone in any case.
                self.statements.drop_named(named(prepares[1]))
                if not failed or len(found) > 1:
                    self._prepared(prepares, status, failed=failed)
                continue
            if not failed or len(found) > 1:
                self._pinned(one)
                self._locked(one, status, failed=failed)
            if not failed:
                self._freed(one)
                self._named(one, status)

    def _isolated(self, statement: bytes, *, failed: bool) -> None:
        level = _ONCE.match(statement)
        if level is None:
            # What is not about the session's variables is a transaction, or ends one.
            if not _SETS.match(statement):
                self.isolation_once = None
        elif not failed:
            self.isolation_once = "-".join(level[1].decode().upper().split())

    def _pinned(self, statement: bytes) -> None:
        if created := _CREATE.match(statement):
            self.temporary.add(self._table(created[1]))
        elif _LOCK_TABLES.match(statement):
            self.tables_locked = True

    def _locked(self, statement: bytes, status: int, *, failed: bool) -> None:
        backslash = not status & NO_BACKSLASH_ESCAPES
        for token in _LOCKS[backslash].finditer(statement):
            what = (token["what"] or b"").lower()
            name = None if token["name"] is None else _literal(token["name"], backslash=backslash)
            if what == b"get_lock":
                if name is None:
                    self.nameless_locks += 1
                else:
                    self.lock_names.add(name)
            elif failed:
                continue
            elif what == b"release_all_locks":
                self.lock_names.clear()
                self.nameless_locks = 0
            elif what and name is None:
                self.nameless_locks = max(0, self.nameless_locks - 1)

    def _freed(self, statement: bytes) -> None:
        if dropped := _DROP.match(statement):
            self.temporary -= {self._table(table) for table in _ONE_TABLE.findall(dropped[1])}
        elif _UNLOCKS.match(statement):
            self.tables_locked = False
        elif used := _USE.fullmatch(statement):
            self.database = _unquoted(used[1])
        elif (gone := _DROP_DATABASE.fullmatch(statement)) and _unquoted(gone[1]) == self.database:
            self.database = ""

    def _named(self, statement: bytes, status: int) -> None:
        if gone := _LET_GO.match(statement):
            self.statements.drop_named(named(gone[1]))
        elif executed := _EXECUTE.fullmatch(statement):
            prepared = self.statements.named(named(executed[1]))
            if prepared is not None and not _EXECUTE.match(prepared.text):
                self.note(prepared.text, status, failed=False)

    def _prepared(self, prepares: re.Match[bytes], status: int, *, failed: bool) -> None:
        text = _literal(prepares[2], backslash=not status & NO_BACKSLASH_ESCAPES)
        self.add_named(named(prepares[1]), None if failed else text)

    def add_named(self, name: str, text: bytes | None) -> None:
        """PREPARE in SQL. `text`: None when nobody saw it, or whether it succeeded."""
        self.statements.drop_named(name)
        unseen = text is None
        self.statements.add(Statement(text or b"", self.database, name=name, unseen=unseen))

    def _table(self, written: bytes) -> tuple[str, str]:
        names = [_unquoted(name) for name in _ONE_NAME.findall(written)]
        return (self.database, names[0]) if len(names) == 1 else (names[0], names[1])


def matters(text: bytes) -> bool:
    """Whether executing this may change what a ledger knows."""
    lower = text.lower()
    return any(hint in lower for hint in _HINTS)


def prepared_from_variable(text: bytes) -> tuple[str, bytes] | None:
    """Name and variable of `PREPARE name FROM @variable`; None when the text is something else."""
    found = statements(text)
    prepares = _PREPARE.fullmatch(found[0]) if len(found) == 1 else None
    if prepares is None or not _VARIABLE.fullmatch(prepares[2]):
        return None
    return named(prepares[1]), prepares[2]


def _literal(written: bytes, *, backslash: bool) -> bytes | None:
    """The value of what is a string literal and nothing else, and can be read without its character set."""
    if b"\\" in written and not _is_utf8(written):
        return None  # in GBK it may be the second half of a character
    # Latin-1 carries any bytes through; the literal ends at the same place.
    found = string_literal(written.decode("latin-1"), backslash=backslash)
    return None if found is None or found[1].strip() else found[0].encode("latin-1")


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def named(written: bytes) -> str:
    """The name of a prepared statement; case does not matter."""
    return _unquoted(written).lower()


def _unquoted(written: bytes) -> str:
    name = written[1:-1].replace(b"``", b"`") if written.startswith(b"`") else written
    return name.decode(errors="replace")
