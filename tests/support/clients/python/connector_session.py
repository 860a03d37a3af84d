"""mysql-connector-python with its C extension (libmysqlclient), and in pure Python."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from typing import Any

from tests.support.clients.python.dbapi_session import DbApiSession
from tests.support.clients.python.session import Rows

_connector: Any = importlib.import_module("mysql.connector")
_READ_ONLY_CURSOR = 1  # CURSOR_TYPE_READ_ONLY of COM_STMT_EXECUTE
_LAST_ROW_SENT = 128  # SERVER_STATUS_LAST_ROW_SENT


class ConnectorSession(DbApiSession):
    """One connection with the C extension."""

    pure = False

    def connect(self) -> None:
        tls: dict[str, Any] = {"ssl_disabled": True}
        if self.plan.ca:
            tls = {"ssl_ca": self.plan.ca, "ssl_verify_cert": True, "ssl_verify_identity": True}
        self._connection = _connector.connect(
            **self.connection_arguments(),
            collation="utf8mb4_general_ci",
            allow_local_infile=True,
            use_pure=self.pure,
            **tls,
        )

    @classmethod
    def error_code(cls, error: Exception) -> int | None:
        # The C extension also raises exceptions that are not subclasses of the package's exceptions.
        code = getattr(error, "errno", None)
        return code if isinstance(code, int) else None

    def prepared(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        return self._fetch_all(self._connection.cursor(prepared=True), sql, parameters)

    def begin(self) -> None:
        self._connection.start_transaction()

    def stream_prepared(self, sql: str) -> tuple[int, int]:
        return self._fetch_sum(self._connection.cursor(prepared=True), sql)

    def change_user(self, user: str, password: str) -> None:
        self._connection.cmd_change_user(user, password, self.plan.database)

    def reset(self) -> None:
        self._connection.cmd_reset_connection()

    def _streaming_cursor(self) -> Any:
        return self._connection.cursor()


class PureConnectorSession(ConnectorSession):
    """One connection in pure Python. Prepared statements send bytes as COM_STMT_SEND_LONG_DATA."""

    pure = True
    misreads_large_binary = True

    def prepared(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        streamed = [io.BytesIO(value) if isinstance(value, bytes) else value for value in parameters]
        return super().prepared(sql, streamed)

    def cursor_fetch(self, sql: str, rows: int) -> tuple[int, int]:
        # The driver's cursor objects never request a server-side cursor, but its command methods can.
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
