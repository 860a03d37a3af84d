"""PyMySQL, pure Python."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any

import pymysql
from pymysql.constants import CLIENT
from pymysql.cursors import Cursor, SSCursor

from tests.clients.python.session import Rows, Session

_FETCH = 10_000  # rows


class PyMySqlSession(Session):
    """One connection of PyMySQL."""

    def connect(self) -> None:
        self._connection: Any = pymysql.connect(
            host=self.plan.host,
            port=self.plan.port,
            user=self.user,
            password=self.password,
            database=self.plan.database,
            charset="utf8mb4",
            autocommit=True,
            local_infile=True,
            client_flag=CLIENT.MULTI_STATEMENTS,
            max_allowed_packet=128 << 20,
            ssl=ssl.create_default_context(cafile=self.plan.ca) if self.plan.ca else None,
            ssl_disabled=not self.plan.ca,
        )

    @classmethod
    def code(cls, error: Exception) -> int | None:
        return error.args[0] if isinstance(error, pymysql.MySQLError) and error.args else None

    def close(self) -> None:
        self._connection.close()

    def text(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        with self._connection.cursor() as cursor:
            cursor.execute(sql.replace("?", "%s"), tuple(parameters) or None)
            return list(cursor.fetchall())

    def begin(self) -> None:
        self._connection.begin()

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()

    def multi(self, sql: str) -> list[Rows]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            return _all_results(cursor)

    def stream(self, sql: str) -> tuple[int, int]:
        count = total = 0
        with self._connection.cursor(SSCursor) as cursor:
            cursor.execute(sql)
            while rows := cursor.fetchmany(_FETCH):
                count += len(rows)
                total += sum(row[0] for row in rows)
        return count, total

    def begin_stream(self, sql: str, rows: int) -> None:
        self._cursor = self._connection.cursor(SSCursor)
        self._cursor.execute(sql)
        assert len(self._cursor.fetchmany(rows)) == rows

    def ping(self) -> None:
        self._connection.ping(reconnect=False)


def _all_results(cursor: Cursor) -> list[Rows]:
    results = []
    while True:
        if cursor.description:
            results.append(list(cursor.fetchall()))
        if not cursor.nextset():
            return results
