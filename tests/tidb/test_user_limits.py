"""Limits of the connections of a user, with drivers and real TiDB servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pymysql
import pytest
from pymysql._auth import scramble_native_password

from sandbox.local_cluster import LocalCluster
from sandbox.tidb_cluster import TidbCluster
from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.tidb.node_operations import wait_until_can_log_in
from tests.support.tidb.sessions import connect_directly, query_rows
from tests.tidb.conftest import STACK_SETTINGS

PASSWORD = "correct horse"
# TiDB compares the names of users case-sensitively.
USERS = ("report", "Report", "other")
USER_LIMIT, ACCESS_DENIED = 1226, 1045
TEXT = "Tidevoy: user 'report' has exceeded the limit of connections 'reporting' (2)"


@pytest.fixture
def users(cluster: TidbCluster) -> Iterator[None]:
    names = ", ".join(f"{user}@'%'" for user in USERS)
    with connect_directly(cluster.tidb[0]) as root:
        for user in USERS:
            query_rows(root, f"create user {user}@'%' identified by '{PASSWORD}'")
        yield
        query_rows(root, f"drop user {names}")


def change_user(connection: Any, user: str) -> None:
    """Send COM_CHANGE_USER, which PyMySQL lacks. Raises OperationalError."""
    scramble = scramble_native_password(PASSWORD.encode(), connection.salt)
    body = user.encode() + b"\0" + bytes((len(scramble),)) + scramble + b"\0\x2d\0mysql_native_password\0"
    connection._execute_command(MySqlCommand.CHANGE_USER, body)
    assert connection._read_packet().is_ok_packet()


@pytest.mark.usefixtures("users")
async def test_connections_of_a_user_are_limited(tmp_path: Path, cluster: TidbCluster) -> None:
    for user in USERS:
        await wait_until_can_log_in(cluster.tidb, user, PASSWORD)
    rules = [{"name": "reporting", "user": "report", "max_connections": 2}]
    settings = {**STACK_SETTINGS, "limits": {"rules": rules}}
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
        with ExitStack() as exit_stack:
            address: dict[str, Any] = {"host": "127.0.0.1", "port": stack.sql_port}

            def connect(user: str, password: str = PASSWORD) -> Any:
                connection: Any = pymysql.connect(**address, user=user, password=password)
                exit_stack.callback(connection._force_close)  # it may be closed already
                return connection

            async def is_quota_known() -> bool:
                (limit,) = (await stack.api.get("/v1/limits")).json()["limits"]
                return [envoy["quota"] for envoy in limit["envoys"]] == [2]

            async def has_one_connection() -> bool:
                return bool((await stack.api.get("/v1/limits")).json()["limits"][0]["connections"] == 1)

            await stack.wait_until(is_quota_known, "the Envoy to report its quota")
            with pytest.raises(pymysql.OperationalError) as denied:
                connect("report", "not the password")
            assert denied.value.args[0] == ACCESS_DENIED
            first = connect("report")
            connect("report")
            with pytest.raises(pymysql.OperationalError) as refused:
                connect("report")
            assert refused.value.args[0] == USER_LIMIT
            assert refused.value.args[1].startswith(TEXT)
            connect("Report")

            other = connect("other")
            with pytest.raises(pymysql.OperationalError) as refused_change:
                change_user(other, "report")
            assert refused_change.value.args[0] == USER_LIMIT
            assert refused_change.value.args[1].startswith(TEXT)

            first.close()
            await stack.wait_until(has_one_connection, "the closed connection to be reported")
            changed = connect("other")
            change_user(changed, "report")
            assert query_rows(changed, "select current_user()") == [("report@%",)]
            with pytest.raises(pymysql.OperationalError):
                connect("report")
            change_user(changed, "other")
            connect("report")
        assert stack.violations() == []
        assert stack.bugs() == []
