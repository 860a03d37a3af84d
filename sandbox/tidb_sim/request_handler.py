"""Decides for a complete request: TiDB's own answer, or the request that MariaDB gets instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from sandbox.tidb_sim.builtin_queries import (
    MAX_STATEMENT_BYTES,
    SHUTDOWN,
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

PEEK_BYTES = 16
"""Bytes of a long binary-protocol request that determine how many more are needed."""
_MAX_TRANSLATED_BYTES = 256 * 1024
"""Longer texts, in bytes, are mostly data and are not translated."""

_SUPPORTED_COMMANDS = frozenset(MySqlCommand)
_SHOW_STATES = ["show", "session_states"]


class SpecialCommand(Enum):
    """A request that is neither answered nor forwarded in the usual way."""

    QUIT = auto()
    CHANGE_USER = auto()
    SHUT_DOWN = auto()


@dataclass(frozen=True, slots=True)
class BackendExchange:
    """A request that needs our own queries to MariaDB; `run` gets the last reported server status flags."""

    run: Callable[[int], Awaitable[ClientResponse]]


class RequestHandler:
    """Handles the requests of one session and updates its state from the responses."""

    def __init__(
        self, node: SimNode, client: SqlClientInfo, migration: SessionMigration, *, deprecate_eof: bool
    ) -> None:
        self.client = client
        self.deprecate_eof = deprecate_eof
        self._node, self._migration = node, migration
        self._tracked_statement: bytes | None = None
        """The statement in progress that the session tracker must record."""
        self._prepare_text: bytes | None = None
        self._requested_database: str | None = None
        """The database that an INIT_DB in progress selects."""

    def handle(self, payload: bytes, status: int) -> bytes | list[bytes] | SpecialCommand | BackendExchange:
        """Return the payload for MariaDB (the same object if unchanged), or the payloads of the response.

        `status`: the last reported server status flags.
        """
        self._check_proxy_rules(payload)
        command = payload[0]
        if command == MySqlCommand.QUERY:
            return self._handle_query(payload, status)
        if command == MySqlCommand.STMT_PREPARE:
            return self._handle_prepare(payload)
        if command == MySqlCommand.PING and self._node.is_stopping:
            return [err(1053, "Server shutdown in progress", "08S01")]
        if command == MySqlCommand.QUIT:
            return SpecialCommand.QUIT
        if command == MySqlCommand.CHANGE_USER:
            return SpecialCommand.CHANGE_USER
        if command == MySqlCommand.SHUTDOWN:
            return SpecialCommand.SHUT_DOWN
        if command not in _SUPPORTED_COMMANDS:
            return [err(1105, f"ERROR 1105 (HY000): command {command} not supported now", "HY000")]
        if command == MySqlCommand.RESET_CONNECTION:
            self._migration.reset()
        elif command == MySqlCommand.INIT_DB:
            self._requested_database = payload[1:].rstrip(b"\0").decode(errors="replace")
        translated, error = self._translate_binary(payload)
        return translated if error is None else [error]

    def required_bytes(self, head: bytes) -> int | None:
        """Return how many bytes of a long request must arrive before it is forwarded; None: all of it.

        `head`: its first bytes, up to `PEEK_BYTES`.
        """
        if head[0] in (MySqlCommand.QUERY, MySqlCommand.STMT_PREPARE):
            return None
        return self._migration.tracker.prepared_statements.required_bytes(head)

    def begin_long_request(self, head: bytes) -> tuple[bytes, bytes | None]:
        """Translate the start of a long request for MariaDB, keeping its length.

        Also returns the ERR that the client gets instead, if any.
        """
        self._check_proxy_rules(head)
        return self._translate_binary(head)

    def on_response_end(self, tracker: ResponseTracker) -> int | None:
        """Handle the end of MariaDB's response; return the client's id of a newly prepared statement."""
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

    def _check_proxy_rules(self, payload: bytes) -> None:
        rules = self._migration.proxy_rules
        if rules.awaits_states:
            self._migration.report_violation(rules.check_request(payload))

    def _handle_query(
        self, payload: bytes, status: int
    ) -> bytes | list[bytes] | SpecialCommand | BackendExchange:
        text = payload[1:]
        if SET_SESSION_STATES.match(text):
            return BackendExchange(partial(self._migration.set_states, text))
        if len(text) <= MAX_STATEMENT_BYTES:
            builtin = self._builtin_response(text, status)
            if builtin is not None:
                return builtin
        statement = translate_kill(text)
        if statement is not None:
            self._advance_last_statement(text)
            return BackendExchange(partial(self._migration.execute, statement))
        tracker = self._migration.tracker
        translated_text = text
        if tracker.last_statement is not None:
            translated_text = tracker.last_statement.substitute(text)
        if tracker.must_track(text):
            from_variable = parse_prepare_from_variable(text)
            if from_variable is not None:
                return BackendExchange(partial(self._migration.prepare_from_variable, *from_variable, text))
            self._tracked_statement = text
        self._advance_last_statement(text)
        if len(translated_text) <= _MAX_TRANSLATED_BYTES:
            translated_text = translate_statement(translated_text, self.client)
        return payload if translated_text is text else payload[:1] + translated_text

    def _handle_prepare(self, payload: bytes) -> bytes:
        text = payload[1:].rstrip(b"\0")
        self._prepare_text = text
        translated_text = translate_prepared(text, self._node, self.client)
        return payload if translated_text is text else payload[:1] + translated_text

    def _translate_binary(self, payload: bytes) -> tuple[bytes, bytes | None]:
        """Translate a request if it belongs to the binary protocol."""
        tracker = self._migration.tracker
        translated, error = tracker.prepared_statements.translate(payload)
        if payload[0] == MySqlCommand.STMT_EXECUTE and error is None:
            statement = tracker.prepared_statements.find(payload)
            if statement is not None:
                self._advance_last_statement(statement.text)
                if statement.affects_session or tracker.tracks_all_statements:
                    self._tracked_statement = statement.text
        return translated, error

    def _advance_last_statement(self, statement: bytes) -> None:
        """Drop the results of the last statement that executing this one replaces."""
        tracker = self._migration.tracker
        if tracker.last_statement is not None:
            tracker.last_statement = tracker.last_statement.after_statement(statement)

    def _builtin_response(
        self, text: bytes, status: int
    ) -> list[bytes] | SpecialCommand | BackendExchange | None:
        statement = normalize_statement(text)
        if not statement:
            return [ok(status)]
        if statement == SHUTDOWN:
            return SpecialCommand.SHUT_DOWN
        if statement.startswith("show") and statement.split() == _SHOW_STATES:
            return BackendExchange(self._migration.show_states)
        last_statement = self._migration.tracker.last_statement
        if last_statement is not None:
            warnings = last_statement.answer_show_warnings(
                statement, status, deprecate_eof=self.deprecate_eof
            )
            if warnings is not None:
                return warnings
        row = answer_builtin(statement, self._node, self.client)
        return None if row is None else single_row_result(row, status, deprecate_eof=self.deprecate_eof)
