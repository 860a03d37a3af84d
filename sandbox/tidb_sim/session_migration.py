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
from sandbox.tidb_sim.charsets import decode_prepared_text, tidb_codec
from sandbox.tidb_sim.export_states import StateReadFirst
from sandbox.tidb_sim.last_statement_state import LastStatementState
from sandbox.tidb_sim.mariadb_backend import BackendConnection, BackendError
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.packets import TYPE_JSON, err, ok, result_set
from sandbox.tidb_sim.proxy_rules import ProxyRuleChecker
from sandbox.tidb_sim.restore_states import NEXT_TRANSACTION_ISOLATION, StateRestorer
from sandbox.tidb_sim.session_states import InvalidSessionStates, PreparedStatementState, SessionStates
from sandbox.tidb_sim.session_token import issue_token
from sandbox.tidb_sim.session_tracker import SessionTracker
from sandbox.tidb_sim.sql_lexer import parse_string_literal

_SET_SESSION_STATES_HEAD = re.compile(r"(?is)\s*set\s+session_states\s*")
_SYNTAX_ERROR = err(1064, "You have an error in your SQL syntax near 'SESSION_STATES'", "42000")
_NULL_TOKEN_MAJOR_RELEASE = 9
"""From this major release on, a node without a certificate returns NULL instead of a token."""


@dataclass(frozen=True)
class ClientResponse:
    """The payloads to send to the client, and the session's server status flags afterwards."""

    payloads: list[bytes]
    status: int


class SessionMigration:
    """Exports and restores one session. `tracker` is a new object after COM_RESET_CONNECTION.

    Methods that answer a statement raise BackendError, with the ERR packet for the client, or
    ConnectionClosed.
    """

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
        """Forget all tracked state except the current database (COM_RESET_CONNECTION)."""
        self.tracker = SessionTracker(self.tracker.database)

    def report_violation(self, violation: str | None) -> None:
        """Record a violation of the proxy rules, if there is one."""
        if violation is not None:
            self._node.record_violation(self._client.peer, violation)

    async def show_states(self, status: int) -> ClientResponse:
        """Answer SHOW SESSION_STATES."""
        await asyncio.sleep(self._rules.export_delay_seconds)
        tracker = self.tracker
        try:
            read_first = await StateReadFirst.query(self._backend)
            tracker.last_statement = _keep_last_statement(read_first, tracker.last_statement)
            blocker = await self._find_blocker(read_first)
            if blocker is not None:
                raise _migration_blocked(blocker)
            states = await self._collect_states(read_first, tracker.last_statement, status)
            payloads = self._encode_states(
                states, self._issue_token(), read_first.result_charset or "", status
            )
        finally:
            if self._rules.show_changes_row_count and tracker.last_statement is not None:
                tracker.last_statement = replace(tracker.last_statement, row_count=-1, found_rows=1)
        self.proxy_rules.record_export()
        return ClientResponse(payloads, status)

    async def set_states(self, text: bytes, status: int) -> ClientResponse:
        """Answer SET SESSION_STATES; `text` is the whole statement."""
        self.report_violation(self.proxy_rules.check_set_states())
        if self._rules.rejects_set_states:
            raise BackendError(_SYNTAX_ERROR)
        read_first = await StateReadFirst.query(self._backend)
        self.tracker.last_statement = _keep_last_statement(read_first, self.tracker.last_statement)
        statement = text.decode(tidb_codec(read_first.client_charset), errors="replace")
        literal = _parse_states_literal(statement, read_first)
        if literal is None:
            raise BackendError(_SYNTAX_ERROR)
        try:
            states = SessionStates.parse(literal)
        except InvalidSessionStates as error:
            raise BackendError(err(1105, str(error), "HY000")) from error
        self.report_violation(self.proxy_rules.check_repeated_restore(is_complete=states.is_complete))
        restorer = StateRestorer(self._node, self._client, self._backend, self.tracker)
        await restorer.restore(states, read_first)
        # If the states lack a result of the last statement, it becomes 0, or there are no warnings.
        self.tracker.last_statement = LastStatementState(
            states.affected_rows or 0, states.found_rows or 0, states.warnings
        )
        return ClientResponse([ok(self._backend.status)], self._backend.status)

    async def execute(self, statement: str, status: int) -> ClientResponse:
        """Execute a statement that returns no rows. The client gets an OK packet with `status`."""
        await self._backend.execute(statement)
        return ClientResponse([ok(status)], status)

    async def prepare_from_variable(
        self, name: str, variable: bytes, text: bytes, status: int
    ) -> ClientResponse:
        """Answer `PREPARE name FROM @variable`; `text` is this statement.

        The session tracker needs the text of the new prepared statement, so the variable is read first.
        """
        tracker = self.tracker
        query = b"SELECT HEX(CONVERT(" + variable + b" USING utf8mb4)), HEX(FOUND_ROWS()) LIMIT 1"
        ((value, found_rows),) = await self._backend.rows(query)
        previous = tracker.last_statement or LastStatementState()
        if previous.found_rows is None and found_rows is not None:
            previous = replace(previous, found_rows=int(found_rows.replace(b"\0", b""), 16))
        tracker.last_statement = previous.after_statement(text)
        tracker.prepared_statements.drop_named(name)
        await self._backend.execute(text)
        tracker.add_named_statement(name, export_states.unhex(value or b""))
        return ClientResponse([ok(self._backend.status)], self._backend.status)

    async def _find_blocker(self, read_first: StateReadFirst) -> str | None:
        tracker = self.tracker
        if read_first.in_transaction:
            return "session has an active transaction"
        if tracker.temporary_tables:
            return "session has local temporary tables"
        tracker.user_lock_names = await export_states.query_held_locks(
            self._backend, tracker.user_lock_names, read_first
        )
        if tracker.unnamed_lock_count or tracker.user_lock_names:
            return "session has advisory locks"
        if tracker.has_locked_tables:
            return "session has locked tables"
        return tracker.prepared_statements.migration_blocker()

    async def _collect_states(
        self, read_first: StateReadFirst, last_statement: LastStatementState, status: int
    ) -> SessionStates:
        statements, next_isolation = self.tracker.prepared_statements, self.tracker.next_transaction_isolation
        async with export_states.utf8_charsets(
            self._backend, read_first.client_charset, read_first.result_charset
        ):
            warnings = last_statement.warnings
            if warnings is None:
                warnings = await export_states.query_warnings(self._backend)
            # The queries below replace the warnings in MariaDB.
            self.tracker.last_statement = replace(last_statement, warnings=warnings)
            variables = await export_states.query_system_variables(self._backend, read_first)
            return SessionStates(
                system_variables=variables
                if next_isolation is None
                else {**variables, NEXT_TRANSACTION_ISOLATION: next_isolation},
                user_variables=await export_states.query_user_variables(self._backend),
                statements={
                    statement_id: PreparedStatementState(
                        decode_prepared_text(statement.text, read_first.client_charset),
                        statement.database,
                        statement.name,
                        statement.parameter_types,
                    )
                    for statement_id, statement in statements.by_id.items()
                },
                last_statement_id=statements.last_id,
                status=status,
                database=read_first.database,
                found_rows=last_statement.found_rows,
                affected_rows=last_statement.row_count,
                last_insert_id=read_first.last_insert_id,
                warnings=warnings,
            )

    def _issue_token(self) -> str | None:
        if self._rules.signer is not None:
            token = issue_token(self._rules.signer, self._client.user, self._rules.now_nanoseconds())
            return json.dumps(token, ensure_ascii=False, sort_keys=True)
        major = re.match(r"v?(\d+)", self._node.release)
        if major is not None and int(major[1]) >= _NULL_TOKEN_MAJOR_RELEASE:
            return None
        raise _migration_blocked("no certificate or key file to sign the data")

    def _encode_states(
        self, states: SessionStates, token: str | None, result_charset: str, status: int
    ) -> list[bytes]:
        columns = [("Session_states", TYPE_JSON), ("Session_token", TYPE_JSON)]
        # Like any text, the states are sent in the client's character set; other characters become `?`, as in
        # TiDB 8.5.4 and later (pingcap/tidb pkg/server/internal/column/result_encoder.go).
        codec = tidb_codec(result_charset)
        row = [None if text is None else text.encode(codec, "replace") for text in (states.encode(), token)]
        return result_set(columns, [row], status, deprecate_eof=self._deprecate_eof)


def _keep_last_statement(
    read_first: StateReadFirst, previous: LastStatementState | None
) -> LastStatementState:
    """Return the results of the previous statement: `previous`, completed from `read_first`.

    The client's next statement must see these results, but our own queries have replaced them in MariaDB.
    """
    previous = previous or LastStatementState()
    return replace(
        previous,
        row_count=read_first.row_count if previous.row_count is None else previous.row_count,
        found_rows=read_first.found_rows if previous.found_rows is None else previous.found_rows,
    )


def _migration_blocked(reason: str) -> BackendError:
    return BackendError(err(8146, f"cannot migrate the current session: {reason}", "HY000"))


def _parse_states_literal(statement: str, read_first: StateReadFirst) -> str | None:
    """Return the value of the literal in SET SESSION_STATES; None if the syntax is wrong."""
    head = _SET_SESSION_STATES_HEAD.match(statement)
    parsed = parse_string_literal(
        statement[head.end() :] if head else "",
        backslash_escapes="NO_BACKSLASH_ESCAPES" not in read_first.sql_modes,
        double_quotes="ANSI_QUOTES" not in read_first.sql_modes,
    )
    if parsed is None or parsed[1].rstrip("\0").strip(" \t\r\n;"):
        return None
    return parsed[0]
