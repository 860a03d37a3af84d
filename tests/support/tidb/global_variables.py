"""Global variables of a TiDB cluster, changed for the duration of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pymysql

from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.tidb.sessions import connect_directly, query_rows
from tests.support.waiting import wait_until

_TOO_MANY_CONNECTIONS = 1040


class GlobalVariables:
    """Sets variables and remembers their previous values."""

    def __init__(self, cluster: TidbCluster) -> None:
        self._cluster = cluster
        self._previous_values: dict[tuple[Tidb, str], Any] = {}

    def set(self, name: str, value: object, *nodes: Tidb) -> None:
        """Set a variable on `nodes`, by default on all. Some, like max_connections, belong to one node."""
        selected = nodes or tuple(self._cluster.tidb)
        # All values are read before the first is set, because most variables belong to the whole cluster.
        for node in selected:
            if (node, name) not in self._previous_values:
                with connect_directly(node) as connection:
                    ((_, previous),) = query_rows(connection, f"show global variables like '{name}'")
                self._previous_values[node, name] = previous
        for node in selected:
            _set(node, name, value)

    async def restore(self) -> None:
        """Set all variables to their previous values."""
        for (node, name), previous in self._previous_values.items():
            # A full node rejects this connection until it notices that the test's clients have disconnected.
            await wait_until(partial(_try_set, node, name, previous))
        self._previous_values.clear()


@asynccontextmanager
async def restoring_variables(cluster: TidbCluster) -> AsyncIterator[GlobalVariables]:
    """Yield variables that are restored at the end."""
    variables = GlobalVariables(cluster)
    try:
        yield variables
    finally:
        await variables.restore()


def _try_set(node: Tidb, name: str, previous: str) -> bool:
    try:
        _set(node, name, int(previous) if previous.lstrip("-").isdigit() else previous)
    except pymysql.err.OperationalError as error:
        if error.args[0] != _TOO_MANY_CONNECTIONS:
            raise
        return False
    return True


def _set(node: Tidb, name: str, value: object) -> None:
    with connect_directly(node) as connection, connection.cursor() as cursor:
        cursor.execute(f"set global {name} = %s", (value,))
