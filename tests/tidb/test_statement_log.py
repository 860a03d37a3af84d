"""The statement log with real TiDB servers, one of which reads it as its slow log."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pymysql
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb_cluster import TidbCluster
from tests.support.module.login_log import read_lines, subset, wait_for_lines
from tests.support.tidb.node_operations import start_drain
from tests.support.tidb.sessions import Connection, connect, connect_directly, query_rows, query_value
from tests.support.waiting import wait_until

SECRET = "correct horse"


def settings(log: Path, **changes: Any) -> dict[str, Any]:
    return {"statements": {"log": {"path": str(log), "threshold": 0, **changes}}}


def run(connection: Connection, *statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def server_digests(cluster: TidbCluster, database: str) -> set[str]:
    """Return the digests of the statements that the servers have run in the database."""
    statement = f"select digest from information_schema.statements_summary where schema_name = '{database}'"
    digests: set[str] = set()
    for tidb in cluster.tidb:
        with connect_directly(tidb) as connection:
            digests.update(digest for (digest,) in query_rows(connection, statement))
    return digests


def run_workload(port: int, database: str) -> None:
    """Run slow, failed, confidential and multi-line statements, with a password among them."""
    with connect(port, database) as connection:
        run(connection, "create table t (a int primary key, b varchar(20))")
        run(connection, "begin", "insert into t values (1, 'one'), (2, 'two')", "commit")
        run(connection, "select\n  b, sleep(0.1) from t\n  where a < 3; ", f"use {database}")
        run(
            connection,
            f"create user '{database}'@'%' identified by '{SECRET}'",
            f"drop user '{database}'@'%'",
        )
        run(connection, f"prepare s from 'select ''{SECRET}'', ?'", "set @a = 1", "execute s using @a")
        with pytest.raises(pymysql.err.IntegrityError):
            run(connection, "insert into t values (1, 'again')")
    with connect(port, database) as connection, connection.cursor() as cursor:
        assert cursor.execute("select a from t where b like '%o%'") == 2


async def test_log_has_the_statements_of_a_client(
    cluster: TidbCluster, database: str, tmp_path: Path
) -> None:
    log = tmp_path / "statements.log"
    async with LocalCluster.start(
        tmp_path / "stack", cluster=cluster, settings=settings(log, redact=False)
    ) as stack:
        run_workload(stack.sql_port, database)
        await wait_until(lambda: any("like" in (line["text"] or "") for line in read_lines(log)))
        nodes = {tidb.address for tidb in cluster.tidb}
    lines = [line for line in read_lines(log) if line["database"] == database]
    assert all(line["node"] in nodes and line["user"] == "root" for line in lines)
    by_text = {line["text"]: line for line in lines}
    insert = by_text["insert into t values (1, 'one'), (2, 'two')"]
    assert subset(insert, "kind", "result", "in_transaction", "rows") == ("query", "ok", True, 0)
    slow = by_text["select\n  b, sleep(0.1) from t\n  where a < 3;"]
    assert subset(slow, "rows", "in_transaction", "moves") == (2, False, 0)
    assert slow["duration_ms"] >= 200
    again = by_text["insert into t values (1, 'again')"]
    assert subset(again, "result", "error_code") == ("failed", 1062)
    assert by_text["prepare `s` from ?"]["redacted"]
    assert any(text.startswith("create user") for text in by_text)
    assert SECRET not in str(lines)
    assert {line["digest"] for line in (insert, slow, again)} <= server_digests(cluster, database)


async def test_tidb_reads_the_log_as_its_slow_log(
    cluster: TidbCluster, database: str, tmp_path: Path
) -> None:
    log = tmp_path / "slow.log"
    async with LocalCluster.start(
        tmp_path / "stack", cluster=cluster, settings=settings(log, format="tidb", redact=False)
    ) as stack:
        run_workload(stack.sql_port, database)
        await wait_until(lambda: log.exists() and "like" in log.read_text())
    entries = log.read_text().count("# Time: ")
    assert SECRET not in log.read_text()
    with connect_directly(cluster.tidb[0]) as connection:
        run(connection, f"set tidb_slow_query_file = '{log}'")
        rows = query_rows(
            connection,
            "select query, query_time, user, host, db, digest, succ, prepared, result_rows, time"
            " from information_schema.slow_query",
        )
        assert query_rows(connection, "show warnings") == []
        last_hour = (
            "select count(*) from information_schema.slow_query"
            " where time between now() - interval 1 hour and now() + interval 1 hour"
            " and is_internal = false and user = 'root'"
        )
        assert query_value(connection, last_hour) == entries
    assert len(rows) == entries
    by_text = {row[0]: row[1:-1] for row in rows}
    (seconds, *slow) = by_text["select   b, sleep(0.1) from t   where a < 3;"]
    assert Decimal("0.2") <= Decimal(seconds) < 20
    assert slow[:3] == ["root", "127.0.0.1", database]
    assert slow[4:] == [1, 0, 2]
    again = by_text["insert into t values (1, 'again');"]
    assert again[5:7] == (0, 0)
    assert by_text["select a from t where b like '%o%';"][4] in server_digests(cluster, database)
    assert f" use {database};" in by_text


async def test_line_of_a_session_that_has_moved(cluster: TidbCluster, database: str, tmp_path: Path) -> None:
    log = tmp_path / "statements.log"
    migrate = {"rebalance": {"enabled": False}}
    async with LocalCluster.start(
        tmp_path / "stack", cluster=cluster, settings=settings(log) | migrate
    ) as stack:
        with connect(stack.sql_port, database) as connection:
            id_before = query_value(connection, "select connection_id()")
            (before,) = [line for line in await wait_for_lines(log, 2) if "connection_id" in line["text"]]
            await start_drain(stack, next(tidb for tidb in cluster.tidb if tidb.address == before["node"]))

            def has_moved() -> bool:
                run(connection, "select 1")
                return any(line["moves"] for line in read_lines(log))

            await wait_until(has_moved)
            id_after = query_value(connection, "select connection_id()")
        after = next(line for line in read_lines(log) if line["moves"])
    assert subset(after, "moves", "database", "connection_id") == (1, database, before["connection_id"])
    assert after["node"] != before["node"]
    assert (before["node_connection_id"], after["node_connection_id"]) == (id_before, id_after)
