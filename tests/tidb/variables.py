"""Global variables of a TiDB cluster, for the length of a test."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.tidb.sessions import direct, rows


class GlobalVariables:
    """`set` changes one; at the end all have the values that they had."""

    def __init__(self, cluster: TidbCluster) -> None:
        self._cluster = cluster
        self._before: dict[tuple[Tidb, str], Any] = {}

    def set(self, name: str, wanted: object, *nodes: Tidb) -> None:
        """Set it on `nodes`, or on all of them. Some variables are a node's own (max_connections)."""
        concerned = nodes or tuple(self._cluster.tidb)
        # All are read first: most variables are the cluster's.
        for node in concerned:
            if (node, name) not in self._before:
                with direct(node) as connection:
                    ((_, before),) = rows(connection, f"show global variables like '{name}'")
                self._before[node, name] = before
        for node in concerned:
            _set(node, name, wanted)

    def restore(self) -> None:
        """Set all back."""
        for (node, name), before in self._before.items():
            _set(node, name, int(before) if before.lstrip("-").isdigit() else before)
        self._before.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def _set(node: Tidb, name: str, wanted: object) -> None:
    with direct(node) as connection, connection.cursor() as cursor:
        cursor.execute(f"set global {name} = %s", (wanted,))
