"""mysql-connector-python, twice: with its C extension (libmysqlclient) and in pure Python."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from typing import Any

from tests.clients.python.session import Rows, Session

_connector: Any = importlib.import_module("mysql.connector")
_FETCH = 10_000  # rows
_READ_ONLY_CURSOR = 1  # CURSOR_TYPE_READ_ONLY of COM_STMT_EXECUTE
_LAST_ROW_SENT = 128  # SERVER_STATUS_LAST_ROW_SENT


class ConnectorSession(Session):
    """One connection with the C extension."""

    pure = False

    def connect(self) -> None:
        tls: dict[str, Any] = {"ssl_disabled": True}
        if self.plan.ca:
            tls = {"ssl_ca": self.plan.ca, "ssl_verify_cert": True, "ssl_verify_identity": True}
        self._connection = _connector.connect(
            host=self.plan.host,
            port=self.plan.port,
            user=self.user,
            password=self.password,
            database=self.plan.database,
            charset="utf8mb4",
            collation="utf8mb4_general_ci",
            autocommit=True,
            allow_local_infile=True,
            use_pure=self.pure,
            **tls,
        )

    @classmethod
    def code(cls, error: Exception) -> int | None:
        # The C extension lets some errors of its own through, which are no errors of the package.
        code = getattr(error, "errno", None)
        return code if isinstance(code, int) else None

    def close(self) -> None:
        self._connection.close()

    def text(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        return self._all(self._connection.cursor(), sql, parameters)

    def prepared(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        return self._all(self._connection.cursor(prepared=True), sql, parameters)

    def begin(self) -> None:
        self._connection.start_transaction()

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()

    def multi(self, sql: str) -> list[Rows]:
        results = []
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            while True:
                if cursor.with_rows:
                    results.append(cursor.fetchall())
                if not cursor.nextset():
                    return results

    def stream(self, sql: str) -> tuple[int, int]:
        return self._sum(self._connection.cursor(), sql)

    def stream_prepared(self, sql: str) -> tuple[int, int]:
        return self._sum(self._connection.cursor(prepared=True), sql)

    def begin_stream(self, sql: str, rows: int) -> None:
        self._cursor = self._connection.cursor()
        self._cursor.execute(sql)
        assert len(self._cursor.fetchmany(rows)) == rows

    def change_user(self, user: str, password: str) -> None:
        self._connection.cmd_change_user(user, password, self.plan.database)

    def reset(self) -> None:
        self._connection.cmd_reset_connection()

    def ping(self) -> None:
        self._connection.ping(reconnect=False)

    def _all(self, cursor: Any, sql: str, parameters: Sequence[Any]) -> Rows:
        try:
            cursor.execute(sql.replace("?", "%s"), tuple(parameters))
            return cursor.fetchall() if cursor.with_rows else []
        finally:
            cursor.close()

    def _sum(self, cursor: Any, sql: str) -> tuple[int, int]:
        count = total = 0
        cursor.execute(sql)
        while rows := cursor.fetchmany(_FETCH):
            count += len(rows)
            total += sum(row[0] for row in rows)
        cursor.close()
        return count, total


class PureConnectorSession(ConnectorSession):
    """One connection in pure Python. Bytes go as COM_STMT_SEND_LONG_DATA when they are prepared."""

    pure = True
    misreads_large_binary = True

    def prepared(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        streamed = [io.BytesIO(value) if isinstance(value, bytes) else value for value in parameters]
        return super().prepared(sql, streamed)

    def cursor_fetch(self, sql: str, rows: int) -> tuple[int, int]:
        # Its cursor objects never ask for one, its commands do.
        connection = self._connection
        statement = connection.cmd_stmt_prepare(sql.encode())["statement_id"]
        _, columns, _ = connection.cmd_stmt_execute(statement, flags=_READ_ONLY_CURSOR)
        count = total = status = 0
        while not status & _LAST_ROW_SENT:
            connection.cmd_stmt_fetch(statement, rows)
            fetched, end = connection.get_rows(binary=True, columns=columns)
            assert len(fetched) <= rows
            count += len(fetched)
            total += sum(row[0] for row in fetched)
            status = end["status_flag"]
        connection.cmd_stmt_close(statement)
        return count, total
