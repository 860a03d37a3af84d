"""Client connections of the tests on real servers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeAlias

import pymysql
from pymysql.cursors import Cursor

from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb

Connection: TypeAlias = "pymysql.Connection[Cursor]"
_TIMEOUT_SECONDS = 30
_MAX_ATTEMPTS = 100


def connect(port: int, database: str | None = None, **options: Any) -> Connection:
    """A PyMySQL connection as root, with autocommit unless an option says otherwise."""
    usual: dict[str, Any] = {"host": "127.0.0.1", "port": port, "user": "root", "autocommit": True}
    timeouts = dict.fromkeys(("connect_timeout", "read_timeout", "write_timeout"), _TIMEOUT_SECONDS)
    connection: Connection = pymysql.connect(**(usual | timeouts | {"database": database} | options))
    return connection


def connect_directly(node: Tidb, database: str | None = None, **options: Any) -> Connection:
    """A connection to one node, not through Envoy."""
    return connect(node.port, database, **options)


def query_rows(connection: Connection, statement: str) -> list[tuple[Any, ...]]:
    """The rows that a statement returns."""
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


def query_value(connection: Connection, statement: str) -> Any:
    """The single value that a statement returns."""
    ((only,),) = query_rows(connection, statement)
    return only


def session_port(connection: Connection) -> int:
    """The SQL port of the session's node. The question changes the session's warnings and ROW_COUNT()."""
    return int(query_value(connection, "select @@port"))


class TrackedSessions:
    """Opens connections to one database, and closes them at the end."""

    def __init__(self, stack: LocalCluster, database: str) -> None:
        self._stack = stack
        self._database = database
        self._open = ExitStack()

    def through_envoy(self) -> Connection:
        """One through Envoy."""
        return self._tracked(connect(self._stack.sql_port, self._database))

    def direct(self, node: Tidb) -> Connection:
        """One to a node, not through Envoy."""
        return self._tracked(connect_directly(node, self._database))

    def on_node(self, node: Tidb) -> Connection:
        """One through Envoy whose session is on this node."""
        for _ in range(_MAX_ATTEMPTS):
            connection = self.through_envoy()
            if session_port(connection) == node.port:
                return connection
        raise AssertionError(f"none of {_MAX_ATTEMPTS} sessions came to {node.address}")

    def close(self) -> None:
        """Close all."""
        self._open.close()

    def _tracked(self, connection: Connection) -> Connection:
        self._open.callback(_close, connection)
        return connection


def _close(connection: Connection) -> None:
    if connection.open:
        connection.close()
