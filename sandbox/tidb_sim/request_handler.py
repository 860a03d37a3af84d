"""What becomes of a whole request: TiDB's own answer, or what MariaDB gets in its place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from sandbox.tidb_sim.builtin_queries import LONGEST, SHUTDOWN, Client, answer, normalised
from sandbox.tidb_sim.dialect import kill, prepared, translated
from sandbox.tidb_sim.node import Node
from sandbox.tidb_sim.packets import Command, err, ok, one_row
from sandbox.tidb_sim.prepared_statements import Statement
from sandbox.tidb_sim.proxy_rules import SET_STATES
from sandbox.tidb_sim.response_tracker import ResponseTracker
from sandbox.tidb_sim.session_migration import Movement, Reply
from sandbox.tidb_sim.session_tracker import matters, prepared_from_variable

LOOK = 16
"""So many bytes of a long request of the binary protocol tell how many more must be looked at."""
_TRANSLATED = 256 * 1024
"""Longer texts, in bytes, are data above all: no words in them are exchanged."""

_SERVED = frozenset(Command)
_SHOW_STATES = ["show", "session_states"]


class Deed(Enum):
    """A request that is neither answered nor passed on as one."""

    QUIT = auto()
    CHANGE_USER = auto()
    SHUT_DOWN = auto()


@dataclass(frozen=True, slots=True)
class Talk:
    """A request whose answer we must ask MariaDB for; `ask` gets the server status flags told last."""

    ask: Callable[[int], Awaitable[Reply]]


class Requests:
    """The requests of one session, and what their answers mean for it."""

    def __init__(self, node: Node, who: Client, movement: Movement, *, deprecate_eof: bool) -> None:
        self.who = who
        self.deprecate_eof = deprecate_eof
        self._node, self._movement = node, movement
        self._asked: bytes | None = None
        """Statements under way that the ledger must know of."""
        self._preparing: bytes | None = None
        self._database: str | None = None
        """What an INIT_DB under way asks for."""

    def judge(self, payload: bytes, status: int) -> bytes | list[bytes] | Deed | Talk:
        """The payload for MariaDB, the very same object if it is unchanged; or those of the answer.

        `status`: the server status flags that were told last.
        """
        self._watch(payload)
        command = payload[0]
        if command == Command.QUERY:
            return self._query(payload, status)
        if command == Command.STMT_PREPARE:
            return self._prepare(payload)
        if command == Command.PING and self._node.stopping:
            return [err(1053, "Server shutdown in progress", "08S01")]
        if command == Command.QUIT:
            return Deed.QUIT
        if command == Command.CHANGE_USER:
            return Deed.CHANGE_USER
        if command == Command.SHUTDOWN:
            return Deed.SHUT_DOWN
        if command not in _SERVED:
            return [err(1105, f"ERROR 1105 (HY000): command {command} not supported now", "HY000")]
        if command == Command.RESET_CONNECTION:
            self._movement.reset()
        elif command == Command.INIT_DB:
            self._database = payload[1:].rstrip(b"\0").decode(errors="replace")
        wanted, refusal = self._of_statement(payload)
        return wanted if refusal is None else [refusal]

    def needed(self, head: bytes) -> int | None:
        """How many bytes of a long request must be there before it is passed on; None: all of it.

        `head`: its first bytes, up to `LOOK`.
        """
        if head[0] in (Command.QUERY, Command.STMT_PREPARE):
            return None
        return self._movement.ledger.statements.needed(head)

    def begin(self, head: bytes) -> tuple[bytes, bytes | None]:
        """A long request begins: `head` as MariaDB shall get it, of the same length.

        With an ERR that the client gets instead, if any.
        """
        self._watch(head)
        return self._of_statement(head)

    def answered(self, tracker: ResponseTracker) -> int | None:
        """The answer of MariaDB has ended; the number for the client if a statement has been prepared."""
        ledger = self._movement.ledger
        if self._asked is not None:
            ledger.note(self._asked, tracker.status, failed=tracker.failed)
            self._asked = None
        if self._database is not None:
            ledger.database = ledger.database if tracker.failed else self._database
            self._database = None
        ledger.statements.answered(tracker.status, failed=tracker.failed)
        text, self._preparing = self._preparing, None
        if text is None or tracker.prepared is None:
            return None
        return ledger.statements.add(
            Statement(text, ledger.database, tracker.prepared, tracker.parameters, matters=matters(text))
        )

    def _watch(self, payload: bytes) -> None:
        conduct = self._movement.conduct
        if conduct.waiting:
            self._movement.violation(conduct.request(payload))

    def _query(self, payload: bytes, status: int) -> bytes | list[bytes] | Deed | Talk:
        text = payload[1:]
        if SET_STATES.match(text):
            return Talk(partial(self._movement.set, text))
        if len(text) <= LONGEST:
            own = self._own(text, status)
            if own is not None:
                return own
        statement = kill(text)
        if statement is not None:
            self._age(text)
            return Talk(partial(self._movement.execute, statement))
        ledger = self._movement.ledger
        worded = text
        if ledger.leftovers is not None:
            worded = ledger.leftovers.put_into(text)
        if ledger.heeds(text):
            dynamic = prepared_from_variable(text)
            if dynamic is not None:
                return Talk(partial(self._movement.prepare, *dynamic, text))
            self._asked = text
        self._age(text)
        if len(worded) <= _TRANSLATED:
            worded = translated(worded, self.who)
        return payload if worded is text else payload[:1] + worded

    def _prepare(self, payload: bytes) -> bytes:
        text = payload[1:].rstrip(b"\0")
        self._preparing = text
        worded = prepared(text, self._node, self.who)
        return payload if worded is text else payload[:1] + worded

    def _of_statement(self, payload: bytes) -> tuple[bytes, bytes | None]:
        """A request of the binary protocol, if it is one."""
        ledger = self._movement.ledger
        wanted, refusal = ledger.statements.judge(payload)
        if payload[0] == Command.STMT_EXECUTE and refusal is None:
            statement = ledger.statements.of(payload)
            if statement is not None:
                self._age(statement.text)
                if statement.matters or ledger.attentive:
                    self._asked = statement.text
        return wanted, refusal

    def _age(self, statement: bytes) -> None:
        """A statement is executed: what the last one left behind is gone, or some of it."""
        ledger = self._movement.ledger
        if ledger.leftovers is not None:
            ledger.leftovers = ledger.leftovers.after(statement)

    def _own(self, text: bytes, status: int) -> list[bytes] | Deed | Talk | None:
        statement = normalised(text)
        if not statement:
            return [ok(status)]
        if statement == SHUTDOWN:
            return Deed.SHUT_DOWN
        if statement.startswith("show") and statement.split() == _SHOW_STATES:
            return Talk(self._movement.show)
        leftovers = self._movement.ledger.leftovers
        if leftovers is not None:
            listing = leftovers.answer(statement, status, deprecate_eof=self.deprecate_eof)
            if listing is not None:
                return listing
        own = answer(statement, self._node, self.who)
        return None if own is None else one_row(own, status, deprecate_eof=self.deprecate_eof)
