"""Prepared statements as far as TiDB treats them unlike MariaDB (pingcap/tidb pkg/server/conn_stmt.go).

Clients know them by numbers of ours, which count as TiDB's do and go with a session that moves; MariaDB has
its own ones on each connection.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.tidb_sim.packets import CURSOR_EXISTS, LAST_ROW_SENT, Command, err

_LONG_DATA_HEAD = 7
"""Command, statement id and parameter number of STMT_SEND_LONG_DATA, in bytes."""
_EXECUTE_HEAD = 10
"""Command, statement id, flags and iterations of STMT_EXECUTE, in bytes."""
_MOST_ROWS = 1024
"""No FETCH returns more, whatever it asks for."""
_CURSORS = ((2, "CursorTypeForUpdate"), (4, "CursorTypeScrollable"))
_MALFORMED = err(1105, "malform packet error", "HY000")
_NOBODY = 0
"""A number that no statement of MariaDB's has."""


@dataclass
class Statement:
    """One prepared statement. `name`: of one that SQL has prepared; such a one has no number in MariaDB."""

    text: bytes
    database: str
    backing: int = _NOBODY
    parameters: int = 0
    name: str = ""
    unseen: bool = False
    """Whether its text is not known, for it was in a variable when others were executed with it, say."""
    matters: bool = False
    """Whether executing it may change what `ledger.py` knows."""
    types: bytes = b""
    """The types of the parameters as the client told them last."""
    typed: bool = True
    """Whether MariaDB has been told them, or the client has told none yet."""
    long_data: bool = False
    unfetched: bool = False


class Statements:
    """The statements of one session. `last`: the number given last."""

    def __init__(self) -> None:
        self.last = 0
        self._by_number: dict[int, Statement] = {}
        self._running: tuple[int, Statement] | None = None

    @property
    def all(self) -> Mapping[int, Statement]:
        """By their numbers."""
        return self._by_number

    def add(self, statement: Statement) -> int:
        """It has been prepared; its number."""
        self.last = (self.last + 1) & 0xFFFFFFFF
        self._by_number[self.last] = statement
        return self.last

    def restore(self, number: int, statement: Statement) -> None:
        """It has been prepared once more, and keeps its number."""
        self._by_number[number] = statement
        self.last = max(self.last, number)

    def named(self, name: str) -> Statement | None:
        """The statement that SQL has prepared under that name."""
        return next((one for one in self._by_number.values() if one.name == name), None)

    def drop_named(self, name: str) -> None:
        """SQL has let go of that name."""
        self._by_number = {number: one for number, one in self._by_number.items() if one.name != name}

    def obstacle(self) -> str | None:
        """Why the session cannot be moved, if it cannot (pingcap/tidb pkg/server/driver_tidb.go).

        Texts that are not known are no reason of TiDB's, which knows them all.
        """
        for statement in self._by_number.values():
            if statement.unseen:
                return f"the text of the prepared statement {statement.name} is not known"
            if statement.long_data:
                return "prepared statements have bound params"
            if statement.unfetched:
                return "prepared statements have unfetched rows"
        return None

    def of(self, payload: bytes) -> Statement | None:
        """The statement that a request of the binary protocol is about."""
        statement = self._by_number.get(_number(payload))
        return None if statement is None or statement.name else statement

    def needed(self, head: bytes) -> int | None:
        """How many bytes of a long STMT_EXECUTE or STMT_SEND_LONG_DATA `judge` must see; None: all.

        `head`: those that are there, five or more if the answer is to be final.
        """
        if head[0] == Command.STMT_SEND_LONG_DATA:
            return _LONG_DATA_HEAD
        if len(head) < 5:
            return _EXECUTE_HEAD
        statement = self.of(head)
        if statement is None or not statement.parameters:
            return _EXECUTE_HEAD
        return _types_at(statement) + 2 * statement.parameters if statement.typed else None

    def judge(self, payload: bytes) -> tuple[bytes, bytes | None]:
        """A request as MariaDB shall get it, and the ERR that the client gets instead, if any.

        Of STMT_SEND_LONG_DATA the head is enough. For it TiDB sends ERR although it has no answer: the client
        will take that for the answer to its next request.
        """
        match payload[0]:
            case Command.STMT_SEND_LONG_DATA:
                return self._long_data(payload)
            case Command.STMT_EXECUTE:
                return self._execute(payload)
            case Command.STMT_FETCH:
                return self._fetch(payload)
            case Command.STMT_RESET:
                return self._reset(payload)
            case Command.STMT_CLOSE if len(payload) >= 5:
                statement = self.of(payload)
                if statement is not None:
                    del self._by_number[_number(payload)]
                return _translated(payload, statement), None
        return payload, None

    def answered(self, status: int, *, failed: bool) -> None:
        """The answer has ended, with this server status if it told any."""
        if self._running is None:
            return
        (command, statement), self._running = self._running, None
        if command == Command.STMT_EXECUTE:
            statement.long_data = False
            statement.unfetched = not failed and bool(status & CURSOR_EXISTS)
        elif not failed:
            statement.unfetched = not status & LAST_ROW_SENT

    def _long_data(self, payload: bytes) -> tuple[bytes, bytes | None]:
        if len(payload) < _LONG_DATA_HEAD:
            return payload, _MALFORMED
        statement = self.of(payload)
        if statement is None:
            return payload, _unknown(payload, "stmt_send_longdata")
        statement.long_data = True
        return _translated(payload, statement), None

    def _execute(self, payload: bytes) -> tuple[bytes, bytes | None]:
        if len(payload) < _EXECUTE_HEAD:
            return payload, _MALFORMED
        statement = self.of(payload)
        if statement is None:
            return payload, _unknown(payload, "stmt_execute")
        for bit, name in _CURSORS:
            if payload[5] & bit:
                return payload, err(1105, f"unsupported flag: {name}", "HY000")
        if statement.parameters:
            payload = _with_types(payload, statement)
        self._running = (Command.STMT_EXECUTE, statement)
        return _translated(payload, statement), None

    def _fetch(self, payload: bytes) -> tuple[bytes, bytes | None]:
        if len(payload) != 9:
            return payload, _MALFORMED
        statement = self.of(payload)
        if statement is None:
            return payload, _unknown(payload, "stmt_fetch")
        self._running = (Command.STMT_FETCH, statement)
        rows = min(int.from_bytes(payload[5:], "little"), _MOST_ROWS)
        return _translated(payload[:5] + struct.pack("<I", rows), statement), None

    def _reset(self, payload: bytes) -> tuple[bytes, bytes | None]:
        if len(payload) < 5:
            return payload, _MALFORMED
        statement = self.of(payload)
        if statement is None:
            return payload, _unknown(payload, "stmt_reset")
        statement.long_data = statement.unfetched = False
        return _translated(payload, statement), None


def _number(payload: bytes) -> int:
    return int.from_bytes(payload[1:5], "little")


def _translated(payload: bytes, statement: Statement | None) -> bytes:
    """The request with MariaDB's number."""
    number = _NOBODY if statement is None else statement.backing
    if number == _number(payload):
        return payload
    return payload[:1] + number.to_bytes(4, "little") + payload[5:]


def _unknown(payload: bytes, command: str) -> bytes:
    # TiDB sends code 1105, not 1243: writeError in pkg/server/conn.go takes an SQLError for an unknown error.
    text = f"Unknown prepared statement handler {_number(payload)} given to {command}"
    return err(1105, f"ERROR 1243 (HY000): {text}", "HY000")


def _types_at(statement: Statement) -> int:
    """Where the types of the parameters are: behind a bit for each NULL and the byte that announces them."""
    return _EXECUTE_HEAD + (statement.parameters + 7) // 8 + 1


def _with_types(payload: bytes, statement: Statement) -> bytes:
    """Learn the types, or add those that the client told another node: it does not tell them twice."""
    at, size = _types_at(statement), 2 * statement.parameters
    if payload[at - 1 : at] == b"\1" and len(payload) >= at + size:
        statement.types, statement.typed = payload[at : at + size], True
    elif payload[at - 1 : at] == b"\0" and not statement.typed:
        payload = payload[: at - 1] + b"\1" + statement.types + payload[at:]
        statement.typed = True
    return payload
