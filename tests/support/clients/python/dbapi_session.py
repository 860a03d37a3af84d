"""The common code of all synchronous drivers. They follow Python's DB API (PEP 249)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from tests.support.clients.python.session import FETCH_ROWS, DriverSession, Rows


class DbApiSession(DriverSession):
    """One connection of a driver that follows the DB API. `connect` must set `_connection`."""

    _connection: Any

    def close(self) -> None:
        self._connection.close()

    def text(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        return self._fetch_all(self._connection.cursor(), sql, parameters)

    def begin(self) -> None:
        self._connection.begin()

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()

    def multi_statement(self, sql: str) -> list[Rows]:
        results = []
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            while True:
                if cursor.description:
                    results.append(list(cursor.fetchall()))
                if not cursor.nextset():
                    return results

    def stream(self, sql: str) -> tuple[int, int]:
        return self._fetch_sum(self._streaming_cursor(), sql)

    def begin_stream(self, sql: str, rows: int) -> None:
        self._cursor = self._streaming_cursor()
        self._cursor.execute(sql)
        assert len(self._cursor.fetchmany(rows)) == rows

    def ping(self) -> None:
        self._connection.ping(reconnect=False)

    @abstractmethod
    def _streaming_cursor(self) -> Any:
        """Return a cursor for the text protocol that reads only the requested rows."""

    def _fetch_all(self, cursor: Any, sql: str, parameters: Sequence[Any]) -> Rows:
        """Return all rows of a statement; none if it has no result set. Closes the cursor."""
        with cursor:
            cursor.execute(sql.replace("?", "%s"), tuple(parameters) or None)
            return list(cursor.fetchall()) if cursor.description else []

    def _fetch_sum(self, cursor: Any, sql: str) -> tuple[int, int]:
        """Read one integer column in pieces. Return the number of rows and the sum. Closes the cursor."""
        count = total = 0
        with cursor:
            cursor.execute(sql)
            while rows := cursor.fetchmany(FETCH_ROWS):
                count += len(rows)
                total += sum(row[0] for row in rows)
        return count, total
