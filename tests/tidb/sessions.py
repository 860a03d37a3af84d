"""Client connections of the tests on real servers, and where their sessions are."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeAlias

import asyncmy
import pymysql
from pymysql.cursors import Cursor

from sandbox.stack import Stack
from sandbox.tidb import Tidb

Connection: TypeAlias = "pymysql.Connection[Cursor]"
_SECONDS = 30


def connect(port: int, database: str | None = None, **options: Any) -> Connection:
    """A connection of PyMySQL as root, with autocommit unless an option says otherwise."""
    usual: dict[str, Any] = {"host": "127.0.0.1", "port": port, "user": "root", "autocommit": True}
    limits = {"connect_timeout": _SECONDS, "read_timeout": _SECONDS, "write_timeout": _SECONDS}
    connection: Connection = pymysql.connect(**(usual | limits | {"database": database} | options))
    return connection


def direct(node: Tidb, database: str | None = None, **options: Any) -> Connection:
    """A connection to one node, past Envoy."""
    return connect(node.port, database, **options)


def rows(connection: Connection, statement: str) -> list[tuple[Any, ...]]:
    """What a statement gives."""
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


def value(connection: Connection, statement: str) -> Any:
    """The one value that a statement gives."""
    ((only,),) = rows(connection, statement)
    return only


def port_of(connection: Connection) -> int:
    """The SQL port of the node that answers; to ask changes warnings and ROW_COUNT()."""
    return int(value(connection, "select @@port"))


class Sessions:
    """Opens connections, and closes them at the end."""

    def __init__(self, stack: Stack, database: str) -> None:
        self._stack = stack
        self._database = database
        self._open = ExitStack()

    def through(self, **options: Any) -> Connection:
        """One through Envoy."""
        return self._kept(connect(self._stack.sql_port, self._database, **options))

    def direct(self, node: Tidb, **options: Any) -> Connection:
        """One to a node, past Envoy."""
        return self._kept(direct(node, self._database, **options))

    def on(self, node: Tidb, **options: Any) -> Connection:
        """One through Envoy that is on this node."""
        for _ in range(100):
            connection = self.through(**options)
            if port_of(connection) == node.port:
                return connection
        raise AssertionError(f"none of 100 sessions came to {node.address}")

    async def asyncmy(self, **options: Any) -> Any:
        """One of asyncmy through Envoy; the test closes it."""
        usual = {"host": "127.0.0.1", "port": self._stack.sql_port, "user": "root", "autocommit": True}
        return await asyncmy.connect(**(usual | {"database": self._database, **options}))

    def _kept(self, connection: Connection) -> Connection:
        self._open.callback(_close, connection)
        return connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def _close(connection: Connection) -> None:
    if connection.open:
        connection.close()
