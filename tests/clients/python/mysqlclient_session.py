"""mysqlclient: the C library libmariadb behind Python's DB API."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from tests.clients.python.session import Rows, Session

_mysqldb: Any = importlib.import_module("MySQLdb")
_cursors: Any = importlib.import_module("MySQLdb.cursors")
_FETCH = 10_000  # rows


class MysqlclientSession(Session):
    """One connection of mysqlclient."""

    def connect(self) -> None:
        tls: dict[str, Any] = {}
        if self.plan.ca:
            # Without the mode, libmariadb goes on in plain text with a server that has no TLS.
            tls = {"ssl": {"ca": self.plan.ca}, "ssl_mode": "VERIFY_IDENTITY"}
        self._connection = _mysqldb.connect(
            host=self.plan.host,
            port=self.plan.port,
            user=self.user,
            password=self.password,
            database=self.plan.database,
            charset="utf8mb4",
            autocommit=True,
            local_infile=1,
            binary_prefix=True,
            **tls,
        )

    @classmethod
    def code(cls, error: Exception) -> int | None:
        return error.args[0] if isinstance(error, _mysqldb.MySQLError) and error.args else None

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
        results = []
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            while True:
                if cursor.description:
                    results.append(list(cursor.fetchall()))
                if not cursor.nextset():
                    return results

    def stream(self, sql: str) -> tuple[int, int]:
        count = total = 0
        with self._connection.cursor(_cursors.SSCursor) as cursor:
            cursor.execute(sql)
            while rows := cursor.fetchmany(_FETCH):
                count += len(rows)
                total += sum(row[0] for row in rows)
        return count, total

    def begin_stream(self, sql: str, rows: int) -> None:
        self._cursor = self._connection.cursor(_cursors.SSCursor)
        self._cursor.execute(sql)
        assert len(self._cursor.fetchmany(rows)) == rows

    def change_user(self, user: str, password: str) -> None:
        self._connection.change_user(user, password, self.plan.database)

    def ping(self) -> None:
        self._connection.ping()
