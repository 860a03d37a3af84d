"""mysqlclient: the C library libmariadb behind Python's DB API."""

from __future__ import annotations

import importlib
from typing import Any

from tests.support.clients.python.dbapi_session import DbApiSession

_mysqldb: Any = importlib.import_module("MySQLdb")
_cursors: Any = importlib.import_module("MySQLdb.cursors")


class MysqlclientSession(DbApiSession):
    def connect(self) -> None:
        tls: dict[str, Any] = {}
        if self.plan.ca:
            # Without `ssl_mode`, libmariadb continues in plain text with a server that has no TLS.
            tls = {"ssl": {"ca": self.plan.ca}, "ssl_mode": "VERIFY_IDENTITY"}
        self._connection = _mysqldb.connect(
            **self.connection_arguments(),
            local_infile=1,
            binary_prefix=True,
            **tls,
        )

    @classmethod
    def error_code(cls, error: Exception) -> int | None:
        return error.args[0] if isinstance(error, _mysqldb.MySQLError) and error.args else None

    def change_user(self, user: str, password: str) -> None:
        self._connection.change_user(user, password, self.plan.database)

    def ping(self) -> None:
        self._connection.ping()

    def _streaming_cursor(self) -> Any:
        return self._connection.cursor(_cursors.SSCursor)
