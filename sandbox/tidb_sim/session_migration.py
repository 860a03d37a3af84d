"""SHOW SESSION_STATES and SET SESSION_STATES: what one session answers to them.

Statements, refusals and their order: pingcap/tidb pkg/executor/show.go, simple.go, pkg/session/session.go,
pkg/server/driver_tidb.go.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, replace

from sandbox.tidb_sim import export_states
from sandbox.tidb_sim.builtin_queries import Client
from sandbox.tidb_sim.charsets import tidb_codec
from sandbox.tidb_sim.export_states import Moment
from sandbox.tidb_sim.last_statement_state import Leftovers
from sandbox.tidb_sim.mariadb_backend import Backing, BackingRefused
from sandbox.tidb_sim.migration_rules import MoveRules
from sandbox.tidb_sim.node import Node
from sandbox.tidb_sim.packets import TYPE_JSON, err, ok, result_set
from sandbox.tidb_sim.proxy_rules import Conduct
from sandbox.tidb_sim.restore_states import ISOLATION_ONCE, Restoration
from sandbox.tidb_sim.session_states import BadStates, SessionStates
from sandbox.tidb_sim.session_token import issue
from sandbox.tidb_sim.session_tracker import Ledger
from sandbox.tidb_sim.sql_lexer import string_literal

_HEAD = re.compile(r"(?is)\s*set\s+session_states\s*")
_SYNTAX = err(1064, "You have an error in your SQL syntax near 'SESSION_STATES'", "42000")
_FIRST_WITHOUT_ERROR = 9
"""Since this major release a node without a certificate gives NULL for a token."""


@dataclass(frozen=True)
class Reply:
    """Payloads for the client, and the server status flags from now on."""

    payloads: list[bytes]
    status: int


class CannotMove(Exception):
    """ERR 8146; the text is the reason."""


class Movement:
    """The moves of one session; `ledger` is another one after COM_RESET_CONNECTION."""

    def __init__(
        self,
        node: Node,
        who: Client,
        backing: Backing,
        rules: MoveRules,
        *,
        database: str,
        by_token: bool,
        deprecate_eof: bool,
    ) -> None:
        self.ledger = Ledger(database)
        self.conduct = Conduct(by_token=by_token)
        self._node, self._who, self._backing, self._rules = node, who, backing, rules
        self._deprecate_eof = deprecate_eof

    def reset(self) -> None:
        """COM_RESET_CONNECTION: a fresh session in the same database."""
        self.ledger = Ledger(self.ledger.database)

    def violation(self, what: str | None) -> None:
        """A proxy did what no proxy may do; None: it did not."""
        if what is not None:
            self._node.violation(self._who.peer, what)

    async def show(self, status: int) -> Reply:
        """SHOW SESSION_STATES. ConnectionClosed."""
        await asyncio.sleep(self._rules.delay)
        ledger = self.ledger
        try:
            moment = await Moment.of(self._backing)
            ledger.leftovers = _kept(moment, ledger.leftovers)
            obstacle = await self._obstacle(moment)
            if obstacle is not None:
                raise CannotMove(obstacle)
            states = await self._states(moment, ledger.leftovers, status)
            payloads = self._shown(states, self._token(), moment.results or "", status)
            self.conduct.shown()
        except CannotMove as reason:
            payloads = [err(8146, f"cannot migrate the current session: {reason}", "HY000")]
        except BackingRefused as refusal:
            payloads = [refusal.payload]
        if self._rules.disturb and ledger.leftovers is not None:
            ledger.leftovers = replace(ledger.leftovers, row_count=-1, found_rows=1)
        return Reply(payloads, status)

    async def set(self, text: bytes, status: int) -> Reply:
        """SET SESSION_STATES, the whole statement. ConnectionClosed."""
        self.violation(self.conduct.set())
        if self._rules.refuse:
            return Reply([_SYNTAX], status)
        try:
            moment = await Moment.of(self._backing)
            self.ledger.leftovers = _kept(moment, self.ledger.leftovers)
            literal = _literal(text.decode(tidb_codec(moment.client), errors="replace"), moment)
            if literal is None:
                return Reply([_SYNTAX], status)
            states = SessionStates.parse(literal)
            self.violation(self.conduct.filled(full=states.full))
            await Restoration(self._node, self._who, self._backing, self.ledger).run(states, moment)
        except BadStates as error:
            return Reply([err(1105, str(error), "HY000")], status)
        except BackingRefused as refusal:
            return Reply([refusal.payload], status)
        self.ledger.leftovers = _restored(states)
        return Reply([ok(self._backing.status)], self._backing.status)

    async def execute(self, statement: str, status: int) -> Reply:
        """Execute a statement without rows; the client gets `status`. ConnectionClosed."""
        try:
            await self._backing.execute(statement)
        except BackingRefused as refusal:
            return Reply([refusal.payload], status)
        return Reply([ok(status)], status)

    async def prepare(self, name: str, variable: bytes, text: bytes, status: int) -> Reply:
        """`PREPARE name FROM @variable`: what was in the variable is known only now. ConnectionClosed."""
        ledger = self.ledger
        asked = b"SELECT HEX(CONVERT(" + variable + b" USING utf8mb4)), HEX(FOUND_ROWS()) LIMIT 1"
        try:
            ((value, found_rows),) = await self._backing.rows(asked)
            former = ledger.leftovers or Leftovers()
            if former.found_rows is None and found_rows is not None:
                former = replace(former, found_rows=int(found_rows.replace(b"\0", b""), 16))
            ledger.leftovers = former.after(text)
            ledger.statements.drop_named(name)
            await self._backing.execute(text)
        except BackingRefused as refusal:
            return Reply([refusal.payload], status)
        ledger.add_named(name, export_states.unhexed(value or b""))
        return Reply([ok(self._backing.status)], self._backing.status)

    async def _obstacle(self, moment: Moment) -> str | None:
        ledger = self.ledger
        if moment.in_transaction:
            return "session has an active transaction"
        if ledger.temporary:
            return "session has local temporary tables"
        ledger.lock_names = await export_states.held_locks(self._backing, ledger.lock_names, moment)
        if ledger.nameless_locks or ledger.lock_names:
            return "session has advisory locks"
        if ledger.tables_locked:
            return "session has locked tables"
        return ledger.statements.obstacle()

    async def _states(self, moment: Moment, left: Leftovers, status: int) -> SessionStates:
        statements, once = self.ledger.statements, self.ledger.isolation_once
        async with export_states.in_utf8(self._backing, moment):
            warnings = left.warnings
            if warnings is None:
                warnings = await export_states.warnings(self._backing)
            # From here on MariaDB has others.
            self.ledger.leftovers = replace(left, warnings=warnings)
            variables = await export_states.system_variables(self._backing, moment)
            return SessionStates(
                system_variables=variables if once is None else {**variables, ISOLATION_ONCE: once},
                user_variables=await export_states.user_variables(self._backing),
                statements={
                    number: export_states.prepared_text(one, moment) for number, one in statements.all.items()
                },
                last_statement=statements.last,
                status=status,
                database=moment.database,
                found_rows=left.found_rows,
                affected_rows=left.row_count,
                last_insert_id=moment.last_insert_id,
                warnings=warnings,
            )

    def _token(self) -> str | None:
        if self._rules.signer is not None:
            token = issue(self._rules.signer, self._who.user, self._rules.now())
            return json.dumps(token, ensure_ascii=False, sort_keys=True)
        major = re.match(r"v?(\d+)", self._node.release)
        if major is not None and int(major[1]) >= _FIRST_WITHOUT_ERROR:
            return None
        raise CannotMove("no certificate or key file to sign the data")

    def _shown(self, states: SessionStates, token: str | None, results: str, status: int) -> list[bytes]:
        columns = [("Session_states", TYPE_JSON), ("Session_token", TYPE_JSON)]
        # As any text: in the character set that the client wants, and what that one lacks is lost
        # (pingcap/tidb pkg/server/internal/column/column.go).
        codec = tidb_codec(results)
        row = [None if text is None else text.encode(codec, "replace") for text in (states.encode(), token)]
        return result_set(columns, [row], status, deprecate_eof=self._deprecate_eof)


def _kept(moment: Moment, former: Leftovers | None) -> Leftovers:
    """What the next statement shall see, though we have asked MariaDB."""
    former = former or Leftovers()
    return replace(
        former,
        row_count=moment.row_count if former.row_count is None else former.row_count,
        found_rows=moment.found_rows if former.found_rows is None else former.found_rows,
    )


def _restored(states: SessionStates) -> Leftovers:
    """The results of the last statement according to restored states; what these lack is empty."""
    return Leftovers(states.affected_rows or 0, states.found_rows or 0, states.warnings or ())


def _literal(statement: str, moment: Moment) -> str | None:
    """The literal of SET SESSION_STATES; None when the statement is not of that form."""
    head = _HEAD.match(statement)
    found = string_literal(
        statement[head.end() :] if head else "",
        backslash="NO_BACKSLASH_ESCAPES" not in moment.modes,
        double_quotes="ANSI_QUOTES" not in moment.modes,
    )
    if found is None or found[1].rstrip("\0").strip(" \t\r\n;"):
        return None
    return found[0]
