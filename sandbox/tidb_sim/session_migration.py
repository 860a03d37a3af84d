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
from sandbox.tidb_sim.builtin_queries import SqlClientInfo
from sandbox.tidb_sim.charsets import tidb_codec
from sandbox.tidb_sim.export_states import VolatileState
from sandbox.tidb_sim.last_statement_state import LastStatementState
from sandbox.tidb_sim.mariadb_backend import BackendConnection, BackendError
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.packets import TYPE_JSON, err, ok, result_set
from sandbox.tidb_sim.proxy_rules import ProxyRuleChecker
from sandbox.tidb_sim.restore_states import NEXT_TRANSACTION_ISOLATION, StateRestorer
from sandbox.tidb_sim.session_states import InvalidSessionStates, SessionStates
from sandbox.tidb_sim.session_token import issue_token
from sandbox.tidb_sim.session_tracker import SessionTracker
from sandbox.tidb_sim.sql_lexer import parse_string_literal

_SET_SESSION_STATES_HEAD = re.compile(r"(?is)\s*set\s+session_states\s*")
_SYNTAX_ERROR = err(1064, "You have an error in your SQL syntax near 'SESSION_STATES'", "42000")
_NULL_TOKEN_MAJOR_RELEASE = 9
"""Since this major release a node without a certificate gives NULL for a token."""


@dataclass(frozen=True)
class ClientResponse:
    """Payloads for the client, and the server status flags from now on."""

    payloads: list[bytes]
    status: int


class MigrationBlocked(Exception):
    """ERR 8146; the text is the reason."""


class SessionMigration:
    """The moves of one session; `ledger` is another one after COM_RESET_CONNECTION."""

    def __init__(
        self,
        node: SimNode,
        client: SqlClientInfo,
        backend: BackendConnection,
        rules: MigrationRules,
        *,
        database: str,
        by_token: bool,
        deprecate_eof: bool,
    ) -> None:
        self.tracker = SessionTracker(database)
        self.proxy_rules = ProxyRuleChecker(by_token=by_token)
        self._node, self._client, self._backend, self._rules = node, client, backend, rules
        self._deprecate_eof = deprecate_eof

    def reset(self) -> None:
        """COM_RESET_CONNECTION: a fresh session in the same database."""
        self.tracker = SessionTracker(self.tracker.database)

    def report_violation(self, what: str | None) -> None:
        """A proxy did what no proxy may do; None: it did not."""
        if what is not None:
            self._node.record_violation(self._client.peer, what)

    async def show_states(self, status: int) -> ClientResponse:
        """SHOW SESSION_STATES. ConnectionClosed."""
        await asyncio.sleep(self._rules.export_delay_seconds)
        ledger = self.tracker
        try:
            moment = await VolatileState.query(self._backend)
            ledger.last_statement = _keep_last_statement(moment, ledger.last_statement)
            obstacle = await self._find_blocker(moment)
            if obstacle is not None:
                raise MigrationBlocked(obstacle)
            states = await self._collect_states(moment, ledger.last_statement, status)
            payloads = self._encode_states(states, self._issue_token(), moment.result_charset or "", status)
            self.proxy_rules.states_exported()
        except MigrationBlocked as reason:
            payloads = [err(8146, f"cannot migrate the current session: {reason}", "HY000")]
        except BackendError as refusal:
            payloads = [refusal.payload]
        if self._rules.show_changes_row_count and ledger.last_statement is not None:
            ledger.last_statement = replace(ledger.last_statement, row_count=-1, found_rows=1)
        return ClientResponse(payloads, status)

    async def set_states(self, text: bytes, status: int) -> ClientResponse:
        """SET SESSION_STATES, the whole statement. ConnectionClosed."""
        self.report_violation(self.proxy_rules.check_set_states())
        if self._rules.rejects_set_states:
            return ClientResponse([_SYNTAX_ERROR], status)
        try:
            moment = await VolatileState.query(self._backend)
            self.tracker.last_statement = _keep_last_statement(moment, self.tracker.last_statement)
            literal = _parse_states_literal(
                text.decode(tidb_codec(moment.client_charset), errors="replace"), moment
            )
            if literal is None:
                return ClientResponse([_SYNTAX_ERROR], status)
            states = SessionStates.parse(literal)
            self.report_violation(self.proxy_rules.check_restored(is_complete=states.is_complete))
            await StateRestorer(self._node, self._client, self._backend, self.tracker).restore(states, moment)
        except InvalidSessionStates as error:
            return ClientResponse([err(1105, str(error), "HY000")], status)
        except BackendError as refusal:
            return ClientResponse([refusal.payload], status)
        self.tracker.last_statement = _restored_last_statement(states)
        return ClientResponse([ok(self._backend.status)], self._backend.status)

    async def execute(self, statement: str, status: int) -> ClientResponse:
        """Execute a statement without rows; the client gets `status`. ConnectionClosed."""
        try:
            await self._backend.execute(statement)
        except BackendError as refusal:
            return ClientResponse([refusal.payload], status)
        return ClientResponse([ok(status)], status)

    async def prepare_from_variable(
        self, name: str, variable: bytes, text: bytes, status: int
    ) -> ClientResponse:
        """`PREPARE name FROM @variable`: what was in the variable is known only now. ConnectionClosed."""
        ledger = self.tracker
        asked = b"SELECT HEX(CONVERT(" + variable + b" USING utf8mb4)), HEX(FOUND_ROWS()) LIMIT 1"
        try:
            ((value, found_rows),) = await self._backend.rows(asked)
            former = ledger.last_statement or LastStatementState()
            if former.found_rows is None and found_rows is not None:
                former = replace(former, found_rows=int(found_rows.replace(b"\0", b""), 16))
            ledger.last_statement = former.after_statement(text)
            ledger.prepared_statements.drop_named(name)
            await self._backend.execute(text)
        except BackendError as refusal:
            return ClientResponse([refusal.payload], status)
        ledger.add_named_statement(name, export_states.unhex(value or b""))
        return ClientResponse([ok(self._backend.status)], self._backend.status)

    async def _find_blocker(self, volatile: VolatileState) -> str | None:
        ledger = self.tracker
        if volatile.in_transaction:
            return "session has an active transaction"
        if ledger.temporary_tables:
            return "session has local temporary tables"
        ledger.user_lock_names = await export_states.query_held_locks(
            self._backend, ledger.user_lock_names, volatile
        )
        if ledger.unnamed_lock_count or ledger.user_lock_names:
            return "session has advisory locks"
        if ledger.has_locked_tables:
            return "session has locked tables"
        return ledger.prepared_statements.migration_blocker()

    async def _collect_states(
        self, volatile: VolatileState, last_statement: LastStatementState, status: int
    ) -> SessionStates:
        statements, once = self.tracker.prepared_statements, self.tracker.next_transaction_isolation
        async with export_states.utf8_charsets(self._backend, volatile):
            warnings = last_statement.warnings
            if warnings is None:
                warnings = await export_states.query_warnings(self._backend)
            # From here on MariaDB has others.
            self.tracker.last_statement = replace(last_statement, warnings=warnings)
            variables = await export_states.query_system_variables(self._backend, volatile)
            return SessionStates(
                system_variables=variables
                if once is None
                else {**variables, NEXT_TRANSACTION_ISOLATION: once},
                user_variables=await export_states.query_user_variables(self._backend),
                statements={
                    number: export_states.export_statement(one, volatile)
                    for number, one in statements.by_id.items()
                },
                last_statement_id=statements.last_id,
                status=status,
                database=volatile.database,
                found_rows=last_statement.found_rows,
                affected_rows=last_statement.row_count,
                last_insert_id=volatile.last_insert_id,
                warnings=warnings,
            )

    def _issue_token(self) -> str | None:
        if self._rules.signer is not None:
            token = issue_token(self._rules.signer, self._client.user, self._rules.now_nanoseconds())
            return json.dumps(token, ensure_ascii=False, sort_keys=True)
        major = re.match(r"v?(\d+)", self._node.release)
        if major is not None and int(major[1]) >= _NULL_TOKEN_MAJOR_RELEASE:
            return None
        raise MigrationBlocked("no certificate or key file to sign the data")

    def _encode_states(
        self, states: SessionStates, token: str | None, result_charset: str, status: int
    ) -> list[bytes]:
        columns = [("Session_states", TYPE_JSON), ("Session_token", TYPE_JSON)]
        # As any text: in the character set that the client wants, and what that one lacks is lost
        # (pingcap/tidb pkg/server/internal/column/column.go).
        codec = tidb_codec(result_charset)
        row = [None if text is None else text.encode(codec, "replace") for text in (states.encode(), token)]
        return result_set(columns, [row], status, deprecate_eof=self._deprecate_eof)


def _keep_last_statement(moment: VolatileState, former: LastStatementState | None) -> LastStatementState:
    """What the next statement shall see, though we have asked MariaDB."""
    former = former or LastStatementState()
    return replace(
        former,
        row_count=moment.row_count if former.row_count is None else former.row_count,
        found_rows=moment.found_rows if former.found_rows is None else former.found_rows,
    )


def _restored_last_statement(states: SessionStates) -> LastStatementState:
    """The results of the last statement according to restored states; what these lack is empty."""
    return LastStatementState(states.affected_rows or 0, states.found_rows or 0, states.warnings or ())


def _parse_states_literal(statement: str, moment: VolatileState) -> str | None:
    """The literal of SET SESSION_STATES; None when the statement is not of that form."""
    head = _SET_SESSION_STATES_HEAD.match(statement)
    found = parse_string_literal(
        statement[head.end() :] if head else "",
        backslash_escapes="NO_BACKSLASH_ESCAPES" not in moment.sql_modes,
        double_quotes="ANSI_QUOTES" not in moment.sql_modes,
    )
    if found is None or found[1].rstrip("\0").strip(" \t\r\n;"):
        return None
    return found[0]
