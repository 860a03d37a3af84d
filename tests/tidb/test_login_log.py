"""The login log with real TiDB servers and a real client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pymysql
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb_cluster import TidbCluster
from tests.support.module.envoy import with_timeout
from tests.support.module.login_log import subset, wait_for_lines
from tests.support.tidb.node_operations import wait_until_can_log_in
from tests.support.tidb.sessions import connect, connect_directly
from tests.support.tidb_sim_clients import RawClient, error_code

USER, PASSWORD = "login_log", "correct horse"


@contextlib.contextmanager
def denied(code: int) -> Iterator[None]:
    """Expect that the client gets this error."""
    with pytest.raises(pymysql.err.OperationalError) as error:
        yield
    assert error.value.args[0] == code


async def test_log_has_the_logins_of_a_client(cluster: TidbCluster, database: str, tmp_path: Path) -> None:
    with connect_directly(cluster.tidb[0]) as connection, connection.cursor() as cursor:
        cursor.execute("create user %s@'%%' identified by %s", (USER, PASSWORD))
        cursor.execute(f"grant all on {database}.* to %s@'%%'", (USER,))
    await wait_until_can_log_in(cluster.tidb, USER, PASSWORD)
    log = tmp_path / "logins.log"
    settings = {"sql": {"login_log": {"path": str(log)}}}
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
        port = stack.sql_port
        with connect(port, database, user=USER, password=PASSWORD) as connection:
            pass
        with denied(1045):
            connect(port, database, user=USER, password="wrong")
        with denied(1049):
            connect(port, "missing", user="root")
        client = RawClient(*await asyncio.open_connection("127.0.0.1", port))
        assert error_code(await with_timeout(client.login())) == 0
        for user, code in ((b"root", 0), (USER.encode(), 1045)):
            change = user + b"\0\0" + database.encode() + b"\0-\0mysql_native_password\0"
            assert error_code(await with_timeout(client.send_command(0x11, change))) == code
        client.writer.close()
        lines = await wait_for_lines(log, 6)
        nodes = {tidb.address for tidb in cluster.tidb}
    fields = ("kind", "result", "reason", "error_code", "user", "database")
    assert [subset(line, *fields) for line in lines] == [
        ("login", "ok", None, None, USER, database),
        ("login", "failed", "denied", 1045, USER, database),
        ("login", "failed", "denied", 1049, "root", "missing"),
        ("login", "ok", None, None, "root", None),
        ("change_user", "ok", None, None, "root", database),
        ("change_user", "failed", "denied", 1045, USER, database),
    ]
    assert all(line["node"] in nodes and line["client"].startswith("127.0.0.1:") for line in lines)
    text = "\n".join(map(str, lines))
    assert PASSWORD not in text
    assert "wrong" not in text
