"""Handles SHOW SESSION_STATES and SET SESSION_STATES for one session.

Statements, errors and their order: pingcap/tidb pkg/executor/show.go, simple.go, pkg/session/session.go,
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
"""From this major release on, a node without a certificate returns NULL for a token."""


@dataclass(frozen=True)
class ClientResponse:
    """Payloads for the client, and the server status flags from now on."""

    payloads: list[bytes]
    status: int


class MigrationBlocked(Exception):
    """The session cannot migrate (ERR 8146); the text is the reason."""


class SessionMigration:
    """The migrations of one session; `tracker` is replaced by COM_RESET_CONNECTION."""

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
        """Start a fresh session in the same database (COM_RESET_CONNECTION)."""
        self.tracker = SessionTracker(self.tracker.database)

    def report_violation(self, what: str | None) -> None:
        """Record a violation of the proxy rules; None: there was none."""
        if what is not None:
            self._node.record_violation(self._client.peer, what)

    async def show_states(self, status: int) -> ClientResponse:
        """Answer SHOW SESSION_STATES. Raises ConnectionClosed."""
        await asyncio.sleep(self._rules.export_delay_seconds)
        tracker = self.tracker
        try:
            volatile = await VolatileState.query(self._backend)
            tracker.last_statement = _keep_last_statement(volatile, tracker.last_statement)
            blocker = await self._find_blocker(volatile)
            if blocker is not None:
                raise MigrationBlocked(blocker)
            states = await self._collect_states(volatile, tracker.last_statement, status)
            payloads = self._encode_states(states, self._issue_token(), volatile.result_charset or "", status)
            self.proxy_rules.states_exported()
        except MigrationBlocked as reason:
            payloads = [err(8146, f"cannot migrate the current session: {reason}", "HY000")]
        except BackendError as error:
            payloads = [error.payload]
        if self._rules.show_changes_row_count and tracker.last_statement is not None:
            tracker.last_statement = replace(tracker.last_statement, row_count=-1, found_rows=1)
        return ClientResponse(payloads, status)

    async def set_states(self, text: bytes, status: int) -> ClientResponse:
        """Answer SET SESSION_STATES; `text` is the whole statement. Raises ConnectionClosed."""
        self.report_violation(self.proxy_rules.check_set_states())
        if self._rules.rejects_set_states:
            return ClientResponse([_SYNTAX_ERROR], status)
        try:
            volatile = await VolatileState.query(self._backend)
            self.tracker.last_statement = _keep_last_statement(volatile, self.tracker.last_statement)
            literal = _parse_states_literal(
                text.decode(tidb_codec(volatile.client_charset), errors="replace"), volatile
            )
            if literal is None:
                return ClientResponse([_SYNTAX_ERROR], status)
            states = SessionStates.parse(literal)
            self.report_violation(self.proxy_rules.check_restored(is_complete=states.is_complete))
            await StateRestorer(self._node, self._client, self._backend, self.tracker).restore(
                states, volatile
            )
        except InvalidSessionStates as error:
            return ClientResponse([err(1105, str(error), "HY000")], status)
        except BackendError as error:
            return ClientResponse([error.payload], status)
        self.tracker.last_statement = _restored_last_statement(states)
        return ClientResponse([ok(self._backend.status)], self._backend.status)

    async def execute(self, statement: str, status: int) -> ClientResponse:
        """Execute a statement without rows; the client gets `status`. Raises ConnectionClosed."""
        try:
            await self._backend.execute(statement)
        except BackendError as error:
            return ClientResponse([error.payload], status)
        return ClientResponse([ok(status)], status)

    async def prepare_from_variable(
        self, name: str, variable: bytes, text: bytes, status: int
    ) -> ClientResponse:
        """Answer `PREPARE name FROM @variable`, whose text is known only now. Raises ConnectionClosed."""
        tracker = self.tracker
        query = b"SELECT HEX(CONVERT(" + variable + b" USING utf8mb4)), HEX(FOUND_ROWS()) LIMIT 1"
        try:
            ((value, found_rows),) = await self._backend.rows(query)
            previous = tracker.last_statement or LastStatementState()
            if previous.found_rows is None and found_rows is not None:
                previous = replace(previous, found_rows=int(found_rows.replace(b"\0", b""), 16))
            tracker.last_statement = previous.after_statement(text)
            tracker.prepared_statements.drop_named(name)
            await self._backend.execute(text)
        except BackendError as error:
            return ClientResponse([error.payload], status)
        tracker.add_named_statement(name, export_states.unhex(value or b""))
        return ClientResponse([ok(self._backend.status)], self._backend.status)

    async def _find_blocker(self, volatile: VolatileState) -> str | None:
        tracker = self.tracker
        if volatile.in_transaction:
            return "session has an active transaction"
        if tracker.temporary_tables:
            return "session has local temporary tables"
        tracker.user_lock_names = await export_states.query_held_locks(
            self._backend, tracker.user_lock_names, volatile
        )
        if tracker.unnamed_lock_count or tracker.user_lock_names:
            return "session has advisory locks"
        if tracker.has_locked_tables:
            return "session has locked tables"
        return tracker.prepared_statements.migration_blocker()

    async def _collect_states(
        self, volatile: VolatileState, last_statement: LastStatementState, status: int
    ) -> SessionStates:
        statements, next_isolation = self.tracker.prepared_statements, self.tracker.next_transaction_isolation
        async with export_states.utf8_charsets(self._backend, volatile):
            warnings = last_statement.warnings
            if warnings is None:
                warnings = await export_states.query_warnings(self._backend)
            # From here on MariaDB has other warnings.
            self.tracker.last_statement = replace(last_statement, warnings=warnings)
            variables = await export_states.query_system_variables(self._backend, volatile)
            return SessionStates(
                system_variables=variables
                if next_isolation is None
                else {**variables, NEXT_TRANSACTION_ISOLATION: next_isolation},
                user_variables=await export_states.query_user_variables(self._backend),
                statements={
                    statement_id: export_states.export_statement(statement, volatile)
                    for statement_id, statement in statements.by_id.items()
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
        # Like any text, in the client's character set; characters that it lacks are lost
        # (pingcap/tidb pkg/server/internal/column/column.go).
        codec = tidb_codec(result_charset)
        row = [None if text is None else text.encode(codec, "replace") for text in (states.encode(), token)]
        return result_set(columns, [row], status, deprecate_eof=self._deprecate_eof)


def _keep_last_statement(volatile: VolatileState, previous: LastStatementState | None) -> LastStatementState:
    """Keep what the next statement must see although we have queried MariaDB."""
    previous = previous or LastStatementState()
    return replace(
        previous,
        row_count=volatile.row_count if previous.row_count is None else previous.row_count,
        found_rows=volatile.found_rows if previous.found_rows is None else previous.found_rows,
    )


def _restored_last_statement(states: SessionStates) -> LastStatementState:
    """Return the results of the last statement according to restored states; missing ones are empty."""
    return LastStatementState(states.affected_rows or 0, states.found_rows or 0, states.warnings or ())


def _parse_states_literal(statement: str, volatile: VolatileState) -> str | None:
    """Return the literal of SET SESSION_STATES; None if the statement does not have that form."""
    head = _SET_SESSION_STATES_HEAD.match(statement)
    parsed = parse_string_literal(
        statement[head.end() :] if head else "",
        backslash_escapes="NO_BACKSLASH_ESCAPES" not in volatile.sql_modes,
        double_quotes="ANSI_QUOTES" not in volatile.sql_modes,
    )
    if parsed is None or parsed[1].rstrip("\0").strip(" \t\r\n;"):
        return None
    return parsed[0]
