"""Prepared statements where TiDB treats them differently from MariaDB (pingcap/tidb pkg/server/conn_stmt.go).

Clients use ids of our own, which are assigned as TiDB assigns them and migrate with a session; MariaDB has
its own ids on each connection.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.tidb_sim.packets import CURSOR_EXISTS, LAST_ROW_SENT, MySqlCommand, err

_LONG_DATA_HEAD_BYTES = 7
"""Command, statement id and parameter number of STMT_SEND_LONG_DATA, in bytes."""
_EXECUTE_HEAD_BYTES = 10
"""Command, statement id, flags and iterations of STMT_EXECUTE, in bytes."""
_MAX_FETCH_ROWS = 1024
"""A FETCH never returns more rows than this, whatever it requests."""
_UNSUPPORTED_CURSOR_FLAGS = ((2, "CursorTypeForUpdate"), (4, "CursorTypeScrollable"))
_MALFORMED_ERROR = err(1105, "malform packet error", "HY000")
_NO_BACKEND_ID = 0
"""An id that no statement of MariaDB has."""


@dataclass
class PreparedStatement:
    """One prepared statement.

    `name`: set if it was prepared by SQL; such a statement has no id in MariaDB.
    """

    text: bytes
    database: str
    backend_id: int = _NO_BACKEND_ID
    parameter_count: int = 0
    name: str = ""
    is_text_unknown: bool = False
    """Whether its text is unknown, e.g. because it came from a variable in a batch of statements."""
    affects_session: bool = False
    """Whether executing it may change the state that `session_tracker.py` tracks."""
    parameter_types: bytes = b""
    """The parameter types that the client sent last."""
    backend_knows_types: bool = True
    """Whether MariaDB has received the types, or the client has not sent any yet."""
    has_long_data: bool = False
    has_unfetched_rows: bool = False


class PreparedStatements:
    """The statements of one session. `last_id`: the id assigned last."""

    def __init__(self) -> None:
        self.last_id = 0
        self._by_id: dict[int, PreparedStatement] = {}
        self._running: tuple[int, PreparedStatement] | None = None

    @property
    def by_id(self) -> Mapping[int, PreparedStatement]:
        """The statements by id."""
        return self._by_id

    def add(self, statement: PreparedStatement) -> int:
        """Add a prepared statement and return its id."""
        self.last_id = (self.last_id + 1) & 0xFFFFFFFF
        self._by_id[self.last_id] = statement
        return self.last_id

    def restore(self, statement_id: int, statement: PreparedStatement) -> None:
        """Add a statement that was prepared again and keeps its id."""
        self._by_id[statement_id] = statement
        self.last_id = max(self.last_id, statement_id)

    def find_named(self, name: str) -> PreparedStatement | None:
        """Return the statement that SQL has prepared under that name."""
        return next((statement for statement in self._by_id.values() if statement.name == name), None)

    def drop_named(self, name: str) -> None:
        """Remove the statement that SQL has deallocated."""
        self._by_id = {
            statement_id: statement
            for statement_id, statement in self._by_id.items()
            if statement.name != name
        }

    def migration_blocker(self) -> str | None:
        """Return why the session cannot be migrated, None if it can (pingcap/tidb pkg/server/driver_tidb.go).

        Unknown texts are our own reason: TiDB knows all texts.
        """
        for statement in self._by_id.values():
            if statement.is_text_unknown:
                return f"the text of the prepared statement {statement.name} is not known"
            if statement.has_long_data:
                return "prepared statements have bound params"
            if statement.has_unfetched_rows:
                return "prepared statements have unfetched rows"
        return None

    def find(self, payload: bytes) -> PreparedStatement | None:
        """Return the statement of a binary-protocol request."""
        statement = self._by_id.get(_statement_id(payload))
        return None if statement is None or statement.name else statement

    def required_bytes(self, head: bytes) -> int | None:
        """Return how many bytes of a long STMT_EXECUTE or STMT_SEND_LONG_DATA `translate` needs; None: all.

        `head`: the bytes received so far; the result is final from five bytes on.
        """
        if head[0] == MySqlCommand.STMT_SEND_LONG_DATA:
            return _LONG_DATA_HEAD_BYTES
        if len(head) < 5:
            return _EXECUTE_HEAD_BYTES
        statement = self.find(head)
        if statement is None or not statement.parameter_count:
            return _EXECUTE_HEAD_BYTES
        return (
            _types_offset(statement) + 2 * statement.parameter_count
            if statement.backend_knows_types
            else None
        )

    def translate(self, payload: bytes) -> tuple[bytes, bytes | None]:
        """Return a request for MariaDB, and the ERR that the client gets instead, if any.

        Of STMT_SEND_LONG_DATA the head is enough. TiDB sends ERR for it although it has no response: the
        client takes that for the response to its next request.
        """
        match payload[0]:
            case MySqlCommand.STMT_SEND_LONG_DATA:
                return self._translate_long_data(payload)
            case MySqlCommand.STMT_EXECUTE:
                return self._translate_execute(payload)
            case MySqlCommand.STMT_FETCH:
                return self._translate_fetch(payload)
            case MySqlCommand.STMT_RESET:
                return self._translate_reset(payload)
            case MySqlCommand.STMT_CLOSE if len(payload) >= 5:
                statement = self.find(payload)
                if statement is not None:
                    del self._by_id[_statement_id(payload)]
                return _with_backend_id(payload, statement), None
        return payload, None

    def on_response_end(self, status: int, *, failed: bool) -> None:
        """Update the running statement after its response, which had this server status if any."""
        if self._running is None:
            return
        (command, statement), self._running = self._running, None
        if command == MySqlCommand.STMT_EXECUTE:
            statement.has_long_data = False
            statement.has_unfetched_rows = not failed and bool(status & CURSOR_EXISTS)
        elif not failed:
            statement.has_unfetched_rows = not status & LAST_ROW_SENT

    def _translate_long_data(self, payload: bytes) -> tuple[bytes, bytes | None]:
        if len(payload) < _LONG_DATA_HEAD_BYTES:
            return payload, _MALFORMED_ERROR
        statement = self.find(payload)
        if statement is None:
            return payload, _unknown_statement_error(payload, "stmt_send_longdata")
        statement.has_long_data = True
        return _with_backend_id(payload, statement), None

    def _translate_execute(self, payload: bytes) -> tuple[bytes, bytes | None]:
        if len(payload) < _EXECUTE_HEAD_BYTES:
            return payload, _MALFORMED_ERROR
        statement = self.find(payload)
        if statement is None:
            return payload, _unknown_statement_error(payload, "stmt_execute")
        for bit, name in _UNSUPPORTED_CURSOR_FLAGS:
            if payload[5] & bit:
                return payload, err(1105, f"unsupported flag: {name}", "HY000")
        if statement.parameter_count:
            payload = _ensure_types(payload, statement)
        self._running = (MySqlCommand.STMT_EXECUTE, statement)
        return _with_backend_id(payload, statement), None

    def _translate_fetch(self, payload: bytes) -> tuple[bytes, bytes | None]:
        if len(payload) != 9:
            return payload, _MALFORMED_ERROR
        statement = self.find(payload)
        if statement is None:
            return payload, _unknown_statement_error(payload, "stmt_fetch")
        self._running = (MySqlCommand.STMT_FETCH, statement)
        rows = min(int.from_bytes(payload[5:], "little"), _MAX_FETCH_ROWS)
        return _with_backend_id(payload[:5] + struct.pack("<I", rows), statement), None

    def _translate_reset(self, payload: bytes) -> tuple[bytes, bytes | None]:
        if len(payload) < 5:
            return payload, _MALFORMED_ERROR
        statement = self.find(payload)
        if statement is None:
            return payload, _unknown_statement_error(payload, "stmt_reset")
        statement.has_long_data = statement.has_unfetched_rows = False
        return _with_backend_id(payload, statement), None


def _statement_id(payload: bytes) -> int:
    return int.from_bytes(payload[1:5], "little")


def _with_backend_id(payload: bytes, statement: PreparedStatement | None) -> bytes:
    """Return the request with MariaDB's statement id."""
    statement_id = _NO_BACKEND_ID if statement is None else statement.backend_id
    if statement_id == _statement_id(payload):
        return payload
    return payload[:1] + statement_id.to_bytes(4, "little") + payload[5:]


def _unknown_statement_error(payload: bytes, command: str) -> bytes:
    # TiDB sends code 1105, not 1243: writeError in pkg/server/conn.go treats an SQLError as an unknown error.
    text = f"Unknown prepared statement handler {_statement_id(payload)} given to {command}"
    return err(1105, f"ERROR 1243 (HY000): {text}", "HY000")


def _types_offset(statement: PreparedStatement) -> int:
    """Return where the parameter types are: after one bit for each NULL and the byte that announces them."""
    return _EXECUTE_HEAD_BYTES + (statement.parameter_count + 7) // 8 + 1


def _ensure_types(payload: bytes, statement: PreparedStatement) -> bytes:
    """Record the types, or insert those sent to another node: the client does not send them twice."""
    at, size = _types_offset(statement), 2 * statement.parameter_count
    if payload[at - 1 : at] == b"\1" and len(payload) >= at + size:
        statement.parameter_types, statement.backend_knows_types = payload[at : at + size], True
    elif payload[at - 1 : at] == b"\0" and not statement.backend_knows_types:
        payload = payload[: at - 1] + b"\1" + statement.parameter_types + payload[at:]
        statement.backend_knows_types = True
    return payload
