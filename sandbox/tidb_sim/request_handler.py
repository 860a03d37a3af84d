"""Decides how to handle a complete request: answer it here, or translate it and send it to MariaDB."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum, auto
from functools import partial
from typing import TypeAlias

from sandbox.tidb_sim.builtin_queries import (
    MAX_STATEMENT_BYTES,
    SqlClientInfo,
    answer_builtin,
    normalize_statement,
)
from sandbox.tidb_sim.dialect import translate_kill, translate_prepared, translate_statement
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.packets import MySqlCommand, err, ok, single_row_result
from sandbox.tidb_sim.prepared_statements import PreparedStatement
from sandbox.tidb_sim.proxy_rules import SET_SESSION_STATES
from sandbox.tidb_sim.response_tracker import ResponseTracker
from sandbox.tidb_sim.session_migration import ClientResponse, SessionMigration
from sandbox.tidb_sim.session_tracker import affects_session, parse_prepare_from_variable

_MAX_TRANSLATED_BYTES = 256 * 1024  # Longer texts are mostly data, and are not translated.

_SUPPORTED_COMMANDS = frozenset(MySqlCommand)
_SHOW_STATES = ["show", "session_states"]


class SpecialCommand(Enum):
    """A request that the relay handles in a special way."""

    QUIT = auto()
    CHANGE_USER = auto()


BackendExchange: TypeAlias = Callable[[int], Awaitable[ClientResponse]]
"""Queries MariaDB and returns the response to the client. The argument is the last reported server status."""
_Answer: TypeAlias = bytes | list[bytes] | SpecialCommand | BackendExchange


class RequestHandler:
    """Handles the requests of one session and updates its state from the responses."""

    def __init__(
        self, node: SimNode, client: SqlClientInfo, migration: SessionMigration, *, deprecate_eof: bool
    ) -> None:
        self.client = client
        self.deprecate_eof = deprecate_eof
        self._node, self._migration = node, migration
        self._tracked_statement: bytes | None = None
        """The statement in progress, if the session tracker must record it."""
        self._prepare_text: bytes | None = None
        self._requested_database: str | None = None  # Selected by the INIT_DB in progress.

    def handle(self, payload: bytes, status: int) -> _Answer:
        """Handle a request. `status`: the server status flags that the last response has reported.

        Returns the payload to send to MariaDB, the payloads of the response to the client (a list), a special
        command, or an exchange with MariaDB that the relay must run.
        """
        rules = self._migration.proxy_rules
        if rules.awaits_states:
            self._migration.report_violation(rules.check_request(payload))
        command = payload[0]
        if command == MySqlCommand.QUERY:
            return self._handle_query(payload, status)
        if command == MySqlCommand.STMT_PREPARE:
            text = self._prepare_text = payload[1:].rstrip(b"\0")
            return payload[:1] + translate_prepared(text, self._node, self.client)
        if command == MySqlCommand.PING and self._node.is_reporting_shutdown:
            return [err(1053, "Server shutdown in progress", "08S01")]
        if command == MySqlCommand.QUIT:
            return SpecialCommand.QUIT
        if command == MySqlCommand.CHANGE_USER:
            return SpecialCommand.CHANGE_USER
        if command not in _SUPPORTED_COMMANDS:
            return [err(1105, f"ERROR 1105 (HY000): command {command} not supported now", "HY000")]
        if command == MySqlCommand.RESET_CONNECTION:
            self._migration.reset()
        elif command == MySqlCommand.INIT_DB:
            self._requested_database = payload[1:].rstrip(b"\0").decode(errors="replace")
        tracker = self._migration.tracker
        translated, error = tracker.prepared_statements.translate(payload)
        if error is not None:
            return [error]
        statement = tracker.prepared_statements.find(payload)
        if command == MySqlCommand.STMT_EXECUTE and statement is not None:
            self._advance_last_statement(statement.text)
            if statement.affects_session or tracker.tracks_all_statements:
                self._tracked_statement = statement.text
        return translated

    def on_response_end(self, tracker: ResponseTracker) -> int | None:
        """Handle the end of MariaDB's response. If a statement was prepared, return its id for the client."""
        session = self._migration.tracker
        if self._tracked_statement is not None:
            session.track(self._tracked_statement, tracker.status, failed=tracker.has_failed)
            self._tracked_statement = None
        if self._requested_database is not None:
            session.database = session.database if tracker.has_failed else self._requested_database
            self._requested_database = None
        session.prepared_statements.on_response_end(tracker.status, failed=tracker.has_failed)
        text, self._prepare_text = self._prepare_text, None
        if text is None or tracker.prepared_id is None:
            return None
        return session.prepared_statements.add(
            PreparedStatement(
                text,
                session.database,
                tracker.prepared_id,
                tracker.parameter_count,
                affects_session=affects_session(text),
            )
        )

    def _handle_query(self, payload: bytes, status: int) -> _Answer:
        text = payload[1:]
        if SET_SESSION_STATES.match(text):
            return partial(self._migration.set_states, text)
        if len(text) <= MAX_STATEMENT_BYTES:
            builtin = self._builtin_response(text, status)
            if builtin is not None:
                return builtin
        statement = translate_kill(text)
        if statement is not None:
            self._advance_last_statement(text)
            return partial(self._migration.execute, statement)
        tracker = self._migration.tracker
        translated_text = text
        if tracker.last_statement is not None:
            translated_text = tracker.last_statement.substitute(text)
        if tracker.must_track(text):
            from_variable = parse_prepare_from_variable(text)
            if from_variable is not None:
                return partial(self._migration.prepare_from_variable, *from_variable, text)
            self._tracked_statement = text
        self._advance_last_statement(text)
        if len(translated_text) <= _MAX_TRANSLATED_BYTES:
            translated_text = translate_statement(translated_text, self.client)
        return payload[:1] + translated_text

    def _advance_last_statement(self, statement: bytes) -> None:
        """Drop the results of the last statement that are no longer valid after `statement`."""
        tracker = self._migration.tracker
        if tracker.last_statement is not None:
            tracker.last_statement = tracker.last_statement.after_statement(statement)

    def _builtin_response(self, text: bytes, status: int) -> _Answer | None:
        statement = normalize_statement(text)
        if not statement:
            return [ok(status)]
        if statement.startswith("show") and statement.split() == _SHOW_STATES:
            return self._migration.show_states
        last_statement = self._migration.tracker.last_statement
        if last_statement is not None:
            warnings = last_statement.answer_show_warnings(
                statement, status, deprecate_eof=self.deprecate_eof
            )
            if warnings is not None:
                return warnings
        row = answer_builtin(statement, self._node, self.client)
        return None if row is None else single_row_result(row, status, deprecate_eof=self.deprecate_eof)
