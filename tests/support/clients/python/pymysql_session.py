"""PyMySQL, pure Python."""

from __future__ import annotations

import ssl
from typing import Any

import pymysql
from pymysql.constants import CLIENT
from pymysql.cursors import SSCursor

from tests.support.clients.python.dbapi_session import DbApiSession


class PyMySqlSession(DbApiSession):
    def connect(self) -> None:
        self._connection = pymysql.connect(
            **self.connection_arguments(),
            local_infile=True,
            client_flag=CLIENT.MULTI_STATEMENTS,
            max_allowed_packet=128 << 20,
            ssl=ssl.create_default_context(cafile=self.plan.ca) if self.plan.ca else None,
            ssl_disabled=not self.plan.ca,
        )

    @classmethod
    def error_code(cls, error: Exception) -> int | None:
        return error.args[0] if isinstance(error, pymysql.MySQLError) and error.args else None

    def _streaming_cursor(self) -> Any:
        return self._connection.cursor(SSCursor)
