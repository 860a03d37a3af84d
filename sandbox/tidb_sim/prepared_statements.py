"""Prepared statements, where TiDB behaves differently from MariaDB (pingcap/tidb pkg/server/conn_stmt.go).

This module assigns the ids that clients see, as TiDB does. A statement keeps its id when the session
migrates, but MariaDB's own ids differ on each connection.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.tidb_sim.packets import CURSOR_EXISTS, LAST_ROW_SENT, MySqlCommand, err

_LONG_DATA_HEAD_BYTES = 7  # Command, statement id and parameter number of STMT_SEND_LONG_DATA, in bytes.
_EXECUTE_HEAD_BYTES = 10  # Command, statement id, flags and iterations of STMT_EXECUTE, in bytes.
_MAX_FETCH_ROWS = 1024  # FETCH returns this many rows at most.
_REQUESTS: dict[int, tuple[str, int, float]] = {
    MySqlCommand.STMT_SEND_LONG_DATA: ("stmt_send_longdata", _LONG_DATA_HEAD_BYTES, math.inf),
    MySqlCommand.STMT_EXECUTE: ("stmt_execute", _EXECUTE_HEAD_BYTES, math.inf),
    MySqlCommand.STMT_FETCH: ("stmt_fetch", 9, 9),
    MySqlCommand.STMT_RESET: ("stmt_reset", 5, math.inf),
}
"""Requests that need a known statement, each with TiDB's name of the request, and the sizes in bytes of the
shortest and the longest valid payload."""
_NO_BACKEND_ID = 0  # An id that no statement of MariaDB has.


@dataclass
class PreparedStatement:
    """One prepared statement.

    `name`: set if the statement was prepared by the SQL statement PREPARE. Then `backend_id` is not used.
    """

    text: bytes
    database: str
    backend_id: int = _NO_BACKEND_ID
    parameter_count: int = 0
    name: str = ""
    is_text_unknown: bool = False
    """Whether the text is unknown, for example because it came from a variable in a batch of statements."""
    affects_session: bool = False
    """Whether an execution may change the state that `session_tracker.py` tracks."""
    parameter_types: bytes = b""  # The parameter types that the client sent last.
    backend_knows_types: bool = True
    """Whether MariaDB has received the parameter types, or the client has not sent any yet."""
    has_long_data: bool = False
    has_unfetched_rows: bool = False


class PreparedStatements:
    """The prepared statements of one session. `last_id`: the id assigned last."""

    def __init__(self) -> None:
        self.last_id = 0
        self._by_id: dict[int, PreparedStatement] = {}
        self._running: tuple[int, PreparedStatement] | None = None

    @property
    def by_id(self) -> Mapping[int, PreparedStatement]:
        return self._by_id

    def add(self, statement: PreparedStatement) -> int:
        self.last_id = (self.last_id + 1) & 0xFFFFFFFF
        self._by_id[self.last_id] = statement
        return self.last_id

    def restore(self, statement_id: int, statement: PreparedStatement) -> None:
        """Add a statement that was prepared again with its old id."""
        self._by_id[statement_id] = statement
        self.last_id = max(self.last_id, statement_id)

    def find_named(self, name: str) -> PreparedStatement | None:
        """Return the statement that SQL has prepared under this name."""
        return next((statement for statement in self._by_id.values() if statement.name == name), None)

    def drop_named(self, name: str) -> None:
        """Remove the statement with this name, which SQL has deallocated."""
        self._by_id = {
            statement_id: statement
            for statement_id, statement in self._by_id.items()
            if statement.name != name
        }

    def migration_blocker(self) -> str | None:
        """Return why the session cannot be migrated; None if it can (pingcap/tidb pkg/server/driver_tidb.go).

        Only the simulated server has sessions with unknown texts: TiDB knows all texts.
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
        """Return the statement with the id in a request; None if unknown, or prepared by SQL PREPARE."""
        statement = self._by_id.get(_statement_id(payload))
        return None if statement is None or statement.name else statement

    def translate(self, payload: bytes) -> tuple[bytes, bytes | None]:
        """Return the request for MariaDB, and None. If the request is invalid, return an ERR instead of None.

        STMT_SEND_LONG_DATA has no response, but if it is invalid, TiDB sends ERR, which the client takes for
        the response to its next request.
        """
        command = payload[0]
        if command == MySqlCommand.STMT_CLOSE and len(payload) >= 5:
            statement = self.find(payload)
            if statement is not None:
                del self._by_id[_statement_id(payload)]
            return _with_backend_id(payload, statement), None
        if command not in _REQUESTS:
            return payload, None
        name, minimum, maximum = _REQUESTS[command]
        if not minimum <= len(payload) <= maximum:
            return payload, err(1105, "malform packet error", "HY000")
        statement = self.find(payload)
        if statement is None:
            # 1105 instead of 1243, because writeError in pkg/server/conn.go treats an SQLError as an unknown
            # error.
            text = f"Unknown prepared statement handler {_statement_id(payload)} given to {name}"
            return payload, err(1105, f"ERROR 1243 (HY000): {text}", "HY000")
        if command == MySqlCommand.STMT_SEND_LONG_DATA:
            statement.has_long_data = True
        elif command == MySqlCommand.STMT_RESET:
            statement.has_long_data = statement.has_unfetched_rows = False
        elif command == MySqlCommand.STMT_FETCH:
            self._running = (command, statement)
            payload = payload[:5] + struct.pack(
                "<I", min(int.from_bytes(payload[5:], "little"), _MAX_FETCH_ROWS)
            )
        else:
            if statement.parameter_count:
                payload = _ensure_types(payload, statement)
            self._running = (command, statement)
        return _with_backend_id(payload, statement), None

    def on_response_end(self, status: int, *, failed: bool) -> None:
        """Update the running statement after its response. `status`: the response's server status, if any."""
        if self._running is None:
            return
        (command, statement), self._running = self._running, None
        if command == MySqlCommand.STMT_EXECUTE:
            statement.has_long_data = False
            statement.has_unfetched_rows = not failed and bool(status & CURSOR_EXISTS)
        elif not failed:
            statement.has_unfetched_rows = not status & LAST_ROW_SENT


def _statement_id(payload: bytes) -> int:
    return int.from_bytes(payload[1:5], "little")


def _with_backend_id(payload: bytes, statement: PreparedStatement | None) -> bytes:
    statement_id = _NO_BACKEND_ID if statement is None else statement.backend_id
    if statement_id == _statement_id(payload):
        return payload
    return payload[:1] + statement_id.to_bytes(4, "little") + payload[5:]


def _types_offset(statement: PreparedStatement) -> int:
    """Return the offset of the parameter types, after the NULL bitmap and the byte that announces types."""
    return _EXECUTE_HEAD_BYTES + (statement.parameter_count + 7) // 8 + 1


def _ensure_types(payload: bytes, statement: PreparedStatement) -> bytes:
    """Record the parameter types in STMT_EXECUTE, or insert types that MariaDB lacks.

    MariaDB lacks them if the client sent them to another node, before the session migrated.
    """
    at, size = _types_offset(statement), 2 * statement.parameter_count
    if payload[at - 1 : at] == b"\1" and len(payload) >= at + size:
        statement.parameter_types, statement.backend_knows_types = payload[at : at + size], True
    elif payload[at - 1 : at] == b"\0" and not statement.backend_knows_types:
        payload = payload[: at - 1] + b"\1" + statement.parameter_types + payload[at:]
        statement.backend_knows_types = True
    return payload
