"""The statement log: which statements it has, what its entries show, and what is never in it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.module.envoy import with_timeout
from tests.support.module.login_log import change_user, log_in_as, read_lines, subset, wait_for_lines
from tests.support.module.statement_log import SLOW_SECONDS, serve_statements, statement_log
from tests.support.module.switchable_envoy import SwitchableEnvoy, run_switchable
from tests.support.tidb_sim_clients import RawClient, error_code
from tests.support.waiting import wait_until

WRITTEN, DROPPED = ("statement_log_lines", "written"), ("statement_log_lines", "dropped")
WRITE_ERRORS = ("statement_log_write_errors",)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "statements.log"


@asynccontextmanager
async def run_logging(log: Path, **changes: Any) -> AsyncIterator[SwitchableEnvoy]:
    """Run an Envoy that logs all statements, unless `changes` of the settings say otherwise."""
    async with run_switchable(serve_statements, log.parent, statement_log(log, **changes)) as switchable:
        yield switchable


async def query(client: RawClient, *statements: str) -> list[int]:
    """Run statements one after the other. Return the error codes, which are 0 without an error."""
    codes = []
    for statement in statements:
        answer = await with_timeout(client.send_command(MySqlCommand.QUERY, statement.encode()))
        codes.append(error_code(answer))
    return codes


def content(log: Path) -> str:
    return log.read_text()


def texts(log: Path) -> list[str]:
    return [line["text"] for line in read_lines(log)]


async def test_line_has_all_fields(log: Path) -> None:
    async with run_logging(log) as switchable:
        started_at = time.time()
        client, _ = await log_in_as(switchable.envoy, b"app", b"Shop")
        await query(client, "select 'slow'")
        (line,) = await wait_for_lines(log, 1)
        host, port = client.writer.get_extra_info("sockname")[:2]
        await switchable.envoy.wait_for_metrics({WRITTEN: 1, DROPPED: 0, WRITE_ERRORS: 0})
    assert started_at - 0.001 <= datetime.fromisoformat(line.pop("time")).timestamp() <= time.time()
    assert SLOW_SECONDS * 1000 <= line.pop("duration_ms") < 20_000
    assert line.pop("connection_id") > 0
    assert line == {
        "kind": "query",
        "result": "ok",
        "error_code": None,
        "user": "app",
        "database": "Shop",
        "client": f"{host}:{port}",
        "node": "n",
        "node_connection_id": 7,
        "moves": 0,
        "in_transaction": False,
        "rows": 0,
        "request_bytes": 18,
        "response_bytes": 11,
        "digest": "e1c71d1661ae46e09b7aaec1c390957f0d6260410df4e4bc71b9c8d681021471",
        "text": "select ?",
        "text_bytes": 8,
        "text_cut": False,
        "redacted": True,
    }


async def test_only_slow_statements_are_logged(log: Path) -> None:
    async with run_logging(log, threshold=SLOW_SECONDS / 2) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        assert await query(client, "select 1", "select slow", "fail", "fail slow") == [0, 0, 1064, 1064]
        lines = await wait_for_lines(log, 2)
    assert [subset(line, "text", "result", "error_code") for line in lines] == [
        ("select slow", "ok", None),
        ("`fail` slow", "failed", 1064),
    ]


async def test_failed_statements_are_logged_if_they_are_wanted(log: Path) -> None:
    async with run_logging(log, threshold=60, sample=0, errors=True) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, "select 1", "fail")
        answer = await with_timeout(client.send_command(MySqlCommand.STMT_PREPARE, b"fail ?"))
        assert error_code(answer) == 1064
        lines = await wait_for_lines(log, 2)
    assert [subset(line, "kind", "text", "error_code") for line in lines] == [
        ("query", "`fail`", 1064),
        ("prepare", "`fail` ?", 1064),
    ]


async def test_rule_puts_statements_into_the_log(log: Path) -> None:
    rules = {"rules": [{"name": "wanted", "pattern": "wanted", "log": True}]}
    live_settings = statement_log(log, threshold=60, sample=0) | rules
    async with run_switchable(serve_statements, log.parent, live_settings) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, "select 1", "select wanted", "select 2")
        number = await with_timeout(client.prepare(b"update wanted set a = ?"))
        body = number.to_bytes(4, "little") + b"\0\1\0\0\0"
        await with_timeout(client.send_command(MySqlCommand.STMT_EXECUTE, body))
        await query(client, "select 3")
        await switchable.apply(statement_log(log))
        await query(client, "select a")
        lines = await wait_for_lines(log, 4)
    assert [subset(line, "kind", "text") for line in lines] == [
        ("query", "select `wanted`"),
        ("prepare", "update `wanted` set `a` = ?"),
        ("execute", "update `wanted` set `a` = ?"),
        ("query", "select `a`"),
    ]


async def test_sample_of_all_statements_is_logged(log: Path) -> None:
    async with run_logging(log, sample=0.5) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, *["select 1"] * 200)

        async def is_written() -> bool:
            return len(read_lines(log)) == (await switchable.envoy.metrics()).get(
                ("statement_log_lines", ("written",))
            )

        await wait_until(is_written)
    assert 60 < len(read_lines(log)) < 140  # a chance of 1 in 100,000,000 that this fails


async def test_literals_and_secrets_do_not_reach_the_file(log: Path) -> None:
    async with run_logging(log) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, "select 'hidden', 4711")
        await switchable.apply(statement_log(log, redact=False))
        await query(client, "select 'shown'", "create user u identified by 'hidden'")
        await query(client, "prepare s from 'alter user u identified by ''hidden'''")
        await query(client, "import into t from 's3://b/p?access-key=hidden'")
        lines = await wait_for_lines(log, 5)
    assert [subset(line, "text", "redacted") for line in lines] == [
        ("select ...", True),
        ("select 'shown'", False),
        ("create user `u` identified by ?", True),
        ("prepare `s` from ?", True),
        ("import into `t` from ?", True),
    ]
    assert "hidden" not in content(log)
    assert "4711" not in content(log)


async def test_prepared_statement_has_its_text_and_no_parameters(log: Path) -> None:
    async with run_logging(log, redact=False, threshold=SLOW_SECONDS / 2) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        number = await with_timeout(client.prepare(b"insert into t values ('x', ?)"))
        parameters = b"\0\x01\xfe\0\x0eslow parameter"
        body = number.to_bytes(4, "little") + b"\0\1\0\0\0" + parameters
        assert error_code(await with_timeout(client.send_command(MySqlCommand.STMT_EXECUTE, body))) == 0
        (line,) = await wait_for_lines(log, 1)
    assert subset(line, "kind", "text", "request_bytes") == (
        *("execute", "insert into t values ('x', ?)"),
        4 + 1 + len(body),
    )
    assert "parameter" not in content(log)


async def test_long_text_is_cut(log: Path) -> None:
    long = f"select '{'a' * 5000}'"
    async with run_logging(log, redact=False) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, long)
        (line,) = await wait_for_lines(log, 1)
    assert subset(line, "text", "text_bytes", "text_cut") == (long[:4096], len(long), True)


async def test_database_user_and_transaction_are_those_of_the_session(log: Path) -> None:
    async with run_logging(log) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, "select 1", "use shop", "begin", "select 1", "commit", "select 1")
        await change_user(client, b"other", b"Archive")
        await query(client, "select 1")
        await with_timeout(client.send_command(MySqlCommand.INIT_DB, b"stock"))
        await query(client, "select 1")
        lines = await wait_for_lines(log, 8)
    assert [subset(line, "text", "user", "database", "in_transaction") for line in lines] == [
        ("select ?", "app", None, False),
        ("use `shop`", "app", None, False),
        ("begin", "app", "shop", True),
        ("select ?", "app", "shop", True),
        ("commit", "app", "shop", True),
        ("select ?", "app", "shop", False),
        ("select ?", "other", "Archive", False),
        ("select ?", "other", "stock", False),
    ]


async def test_entries_have_the_format_of_tidb(log: Path) -> None:
    async with run_logging(log, format="tidb", redact=False) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app", b"shop")
        await query(client, "select\n1", "fail")
        await switchable.envoy.wait_for_metrics({WRITTEN: 2})
    first, second = content(log).split("# Time: ")[1:]
    assert first.splitlines()[1] == "# User@Host: app[app] @ 127.0.0.1 [127.0.0.1]"
    assert first.endswith("\nselect 1;\n")
    assert {"# DB: shop", "# Succ: true", "# Prepared: false"} <= set(first.splitlines())
    assert {"# Succ: false", "# Tidevoy_error_code: 1064", "fail;"} <= set(second.splitlines())


async def test_log_is_switched_while_sessions_go_on(log: Path) -> None:
    async with run_switchable(serve_statements, log.parent) as switchable:
        envoy = switchable.envoy
        client, _ = await log_in_as(envoy, b"app", b"shop")
        await query(client, "select a")
        threads = envoy.thread_names()
        assert "tidevoy-stmts" not in threads
        other = log.with_name("other.log")
        for live_settings, statement in [
            (statement_log(log), "select b"),
            (statement_log(log, threshold=60), "select c"),  # the same file and thread
            (statement_log(other), "select d"),
            ({}, "select e"),
            (statement_log(log), "select f"),
        ]:
            await switchable.apply(live_settings)
            assert await query(client, statement) == [0]
        await wait_until(lambda: texts(log) == ["select `b`", "select `f`"])
        assert texts(other) == ["select `d`"]
        assert read_lines(log)[0]["database"] == "shop"  # also if the session began before the log
        await envoy.wait_for_metrics({WRITTEN: 3, DROPPED: 0, WRITE_ERRORS: 0})
        await switchable.apply({})
        await wait_until(lambda: envoy.thread_names() == threads)


async def test_rotation_keeps_entries_whole(log: Path) -> None:
    async with run_logging(log, format="tidb", max_bytes=2000, keep=2) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, *["select 1"] * 20)
        await switchable.envoy.wait_for_metrics({WRITTEN: 20})
    files = sorted(log.parent.glob(f"{log.name}*"))
    assert [file.name for file in files] == [log.name, f"{log.name}.1", f"{log.name}.2"]
    for file in files:
        text = file.read_text()
        assert text.startswith("# Time: ")
        assert text.endswith("\nselect ?;\n")
        assert len(text) <= 2000


async def test_file_that_cannot_be_written_stops_no_session(log: Path) -> None:
    async with run_switchable(serve_statements, log.parent, statement_log("/dev/full")) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        assert await query(client, *["select 1"] * 3) == [0, 0, 0]

        async def has_failed() -> bool:
            return (await switchable.envoy.metrics()).get(("statement_log_write_errors", ()), 0) > 0

        await wait_until(has_failed)
        assert "statements cannot be logged to /dev/full" in switchable.envoy.log
        await switchable.apply({})
        await switchable.envoy.wait_for_metrics({WRITTEN: 0, DROPPED: 3})
