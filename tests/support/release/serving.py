"""What the tests of all files of a release share: settings with one fake node, and whether it is served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pymysql

from sandbox.tidb_sim.server import TidbSim
from tests.support.tidb.sessions import connect, query_value
from tests.support.waiting import wait_until


def single(directory: Path, pattern: str) -> Path:
    """Return the only file in the directory that matches the pattern."""
    (file,) = directory.glob(pattern)
    return file


def settings_for(node: TidbSim, sql: int, api: int, xds: int) -> dict[str, Any]:
    """Return settings of a control plane whose only node is `node`, with these ports on loopback."""
    return {
        "sql": {"listen": f"127.0.0.1:{sql}"},
        "api": {"listen": f"127.0.0.1:{api}"},
        "xds": {"listen": f"127.0.0.1:{xds}"},
        "nodes": [{"address": node.sql_address, "status_address": node.status_address}],
    }


async def wait_until_serving(port: int) -> None:
    """Wait until a client can query a node through this port. Raises TimeoutError."""

    def query() -> object:
        with connect(port) as connection:
            return query_value(connection, "select 7")

    async def is_serving() -> bool:
        try:
            return await asyncio.to_thread(query) == 7
        except pymysql.MySQLError:
            return False

    await wait_until(is_serving, 120.0)
