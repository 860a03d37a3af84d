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
        for node in nodes or self._cluster.tidb:
            with direct(node) as connection:
                # A list of rows rather than @@global.name: the name may be one that only some releases have.
                ((_, before),) = rows(connection, f"show global variables like '{name}'")
                self._before.setdefault((node, name), before)
                with connection.cursor() as cursor:
                    cursor.execute(f"set global {name} = %s", (wanted,))

    def restore(self) -> None:
        """Set all back."""
        for (node, name), before in self._before.items():
            with direct(node) as connection, connection.cursor() as cursor:
                number = int(before) if before.lstrip("-").isdigit() else before
                cursor.execute(f"set global {name} = %s", (number,))
        self._before.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
