"""Client connections for tests with real servers."""

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
    """Connect PyMySQL as root, with autocommit unless an option says otherwise."""
    defaults: dict[str, Any] = {"host": "127.0.0.1", "port": port, "user": "root", "autocommit": True}
    timeouts = dict.fromkeys(("connect_timeout", "read_timeout", "write_timeout"), _TIMEOUT_SECONDS)
    connection: Connection = pymysql.connect(**(defaults | timeouts | {"database": database} | options))
    return connection


def connect_directly(node: Tidb, database: str | None = None, **options: Any) -> Connection:
    """Connect to one node without Envoy."""
    return connect(node.port, database, **options)


def query_rows(connection: Connection, statement: str) -> list[tuple[Any, ...]]:
    """Return the rows of a statement."""
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


def query_value(connection: Connection, statement: str) -> Any:
    """Return the single value of a statement."""
    ((value,),) = query_rows(connection, statement)
    return value


def session_port(connection: Connection) -> int:
    """Return the SQL port of the session's node. The query changes the session's warnings and ROW_COUNT()."""
    return int(query_value(connection, "select @@port"))


def close_if_open(connection: Connection) -> None:
    """Close a connection that the test or the driver may have closed."""
    if connection.open:
        connection.close()


class TrackedSessions:
    """Opens connections to one database, and closes them at the end."""

    def __init__(self, stack: LocalCluster, database: str | None) -> None:
        self._stack = stack
        self._database = database
        self._open = ExitStack()

    def through_envoy(self, **options: Any) -> Connection:
        """Open a session through Envoy. `options` are those of `connect`."""
        return self._tracked(connect(self._stack.sql_port, self._database, **options))

    def direct(self, node: Tidb) -> Connection:
        """Open a session at a node without Envoy."""
        return self._tracked(connect_directly(node, self._database))

    def on_node(self, node: Tidb, **options: Any) -> Connection:
        """Open a session through Envoy that is on this node. `options` are those of `connect`."""
        for _ in range(_MAX_ATTEMPTS):
            connection = self.through_envoy(**options)
            if session_port(connection) == node.port:
                return connection
        raise AssertionError(f"none of {_MAX_ATTEMPTS} sessions is on {node.address}")

    def close(self) -> None:
        self._open.close()

    def _tracked(self, connection: Connection) -> Connection:
        self._open.callback(close_if_open, connection)
        return connection
