"""Prepared statements as far as TiDB treats them unlike MariaDB (pingcap/tidb pkg/server/conn_stmt.go)."""

from __future__ import annotations

import struct

from sandbox.tidb_sim.packets import Command, err

LONG_DATA_HEAD = 7
"""Command, statement id and parameter number of STMT_SEND_LONG_DATA, in bytes."""
_MOST_ROWS = 1024
"""No FETCH returns more, whatever it asks for."""
_CURSORS = ((2, "CursorTypeForUpdate"), (4, "CursorTypeScrollable"))
_MALFORMED = err(1105, "malform packet error", "HY000")


class Statements:
    """Which statements of one session exist."""

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def add(self, statement: int) -> None:
        """It has been prepared."""
        self._ids.add(statement)

    def judge(self, payload: bytes) -> tuple[bytes, bytes | None]:
        """A request as MariaDB shall get it, and the ERR that the client gets instead, if any.

        Of STMT_SEND_LONG_DATA the head is enough. For it TiDB sends ERR although it has no answer: the client
        will take that for the answer to its next request.
        """
        command = payload[0]
        if command == Command.STMT_SEND_LONG_DATA:
            return payload, self._long_data(payload)
        if command == Command.STMT_EXECUTE and len(payload) >= 10 and _id(payload) in self._ids:
            for bit, name in _CURSORS:
                if payload[5] & bit:
                    return payload, err(1105, f"unsupported flag: {name}", "HY000")
        elif command == Command.STMT_FETCH:
            if len(payload) != 9:
                return payload, _MALFORMED
            rows = min(int.from_bytes(payload[5:], "little"), _MOST_ROWS)
            return payload[:5] + struct.pack("<I", rows), None
        elif command == Command.STMT_CLOSE and len(payload) >= 5:
            self._ids.discard(_id(payload))
        elif command == Command.RESET_CONNECTION:
            self._ids.clear()
        return payload, None

    def _long_data(self, payload: bytes) -> bytes | None:
        if len(payload) < LONG_DATA_HEAD:
            return _MALFORMED
        if _id(payload) not in self._ids:
            text = f"Unknown prepared statement handler ({_id(payload)}) given to stmt_send_longdata"
            return err(1243, text, "HY000")
        return None


def _id(payload: bytes) -> int:
    return int.from_bytes(payload[1:5], "little")
