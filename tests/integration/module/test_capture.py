"""A capture of traffic: what its files contain, what they never contain, and what a bad disk does."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.packets import MySqlCommand, frame
from tests.support.migration.fleet import NodeSpec, mariadb_session, run_fleet
from tests.support.migration.sql_client import AnswerClient
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import OK_PAYLOAD, connect_logged_in, greeting_packet, with_timeout
from tests.support.module.login_log import change_user, log_in_as
from tests.support.module.statement_log import serve_statements
from tests.support.module.statement_rules import RecordingNode, error_of
from tests.support.module.switchable_envoy import SwitchableEnvoy, run_switchable
from tests.support.small_disk import small_disk
from tests.support.tidb_sim_clients import RawClient, error_code
from tests.support.traffic.capture_reader import (
    CapturedRecord,
    capture,
    capture_files,
    read_all_records,
    read_records,
    read_results,
)
from tests.support.waiting import wait_until

WRITTEN, DROPPED, FILTERED = ("capture_records",), ("capture_dropped",), ("capture_filtered",)
ACTIVE, WRITE_ERRORS = ("capture_active",), ("capture_write_errors",)
WAITING = ("capture_sessions_waiting",)


async def query(client: RawClient, *statements: str) -> list[int]:
    """Run statements one after the other. Return the error codes, which are 0 without an error."""
    return [
        error_code(await with_timeout(client.send_command(MySqlCommand.QUERY, statement.encode())))
        for statement in statements
    ]


def send(client: RawClient, command: int, body: bytes = b"") -> None:
    """Send a command without waiting for a response."""
    client.writer.write(frame(0, bytes([command]) + body))


async def end_capture(switchable: SwitchableEnvoy, records: int) -> None:
    """End the capture, which must have written this many records."""
    await switchable.apply({})
    await switchable.envoy.wait_for_metrics({ACTIVE: 0, WRITTEN: records})


async def rows(client: AnswerClient, statement: bytes) -> list[Any]:
    """Run a statement. Return the rows of its results, without the definitions of columns."""
    return [getattr(answer, "rows", answer) for answer in await client.query(statement)]


def texts(records: list[CapturedRecord]) -> list[str]:
    return [f"{record.command} {record.payload.decode()}".strip() for record in records]


async def test_records_and_results_of_a_session(tmp_path: Path) -> None:
    async with run_switchable(serve_statements, tmp_path, capture(tmp_path)) as switchable:
        started_at = time.time()
        client, _ = await log_in_as(switchable.envoy, b"app", b"Shop")
        assert await query(client, "select 'a'", "fail", "select slow") == [0, 1064, 0]
        number = await with_timeout(client.prepare(b"update t\nset a = ?"))
        execution = number.to_bytes(4, "little") + b"\0\1\0\0\0"
        await with_timeout(client.send_command(MySqlCommand.STMT_EXECUTE, execution))
        send(client, MySqlCommand.STMT_CLOSE, number.to_bytes(4, "little"))
        await with_timeout(client.send_command(MySqlCommand.PING))
        await with_timeout(client.send_command(MySqlCommand.INIT_DB, b"Other"))
        send(client, MySqlCommand.QUIT)
        await switchable.envoy.wait_for_metrics({WRITTEN: 9, DROPPED: 0, WRITE_ERRORS: 0, ACTIVE: 1})
        await end_capture(switchable, 9)
    (file,) = capture_files(tmp_path)
    assert (file.parent.name[:4], file.suffix) == ("e_1-", ".gz")
    records, results = read_records(file), read_results(file)
    assert [record.command for record in records] == [
        *("InitDB", "Query", "Query", "Query", "StmtPrepare", "StmtExecute", "StmtClose", "InitDB", "Quit")
    ]
    assert [record.payload for record in records] == [
        *(b"Shop", b"select 'a'", b"fail", b"select slow", b"update t\nset a = ?"),
        *(execution, number.to_bytes(4, "little"), b"Other", b""),
    ]
    assert [record.is_success for record in records] == [True, True, False, *[True] * 6]
    assert [record.prepared_id for record in records] == [0, 0, 0, 0, number, number, number, 0, 0]
    assert [record.prepared_text for record in records if record.prepared_text] == ["update t\nset a = ?"]
    assert len({record.connection for record in records}) == 1
    assert [result["conn"] for result in results] == [record.connection for record in records]
    times = [result["time"] for result in results]
    assert times == sorted(set(times))
    assert started_at <= times[0] / 1e9 <= time.time()
    for record, at in zip(records, times, strict=True):
        recorded = datetime.fromisoformat(record.time[:26] + "+00:00")
        assert recorded.timestamp() == pytest.approx(at / 1e9, abs=1e-5)
    assert [result["error"] for result in results] == [0, 0, 1064, *[0] * 6]
    assert 200_000 <= results[3]["us"] < 20_000_000
    assert {result["user"] for result in results} == {"app"}
    assert {result["node"] for result in results} == {"n"}
    assert [result["database"] for result in results[-2:]] == ["Shop", "Other"]
    assert results[1]["digest"] == "e1c71d1661ae46e09b7aaec1c390957f0d6260410df4e4bc71b9c8d681021471"
    meta = json.loads((file.parent / "meta").read_text())
    assert (meta["Version"], meta["Cmds"]) == ("v1", 9)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


async def test_statements_with_secrets_and_passwords_are_left_out(tmp_path: Path) -> None:
    async with run_switchable(serve_statements, tmp_path, capture(tmp_path)) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, "create user u identified by 'hidden'", "select 1")
        number = await with_timeout(client.prepare(b"alter user u identified by 'hidden'"))
        body = number.to_bytes(4, "little") + b"\0\1\0\0\0"
        await with_timeout(client.send_command(MySqlCommand.STMT_EXECUTE, body))
        await query(client, "prepare s from 'set password = ''hidden'''", "select 2")
        await switchable.envoy.wait_for_metrics({WRITTEN: 2, FILTERED: 4})
        await end_capture(switchable, 2)
    assert texts(read_all_records(tmp_path)) == ["Query select 1", "Query select 2"]


async def test_change_of_user_becomes_a_reset(tmp_path: Path) -> None:
    users = capture(tmp_path, users=["app"])
    async with run_switchable(serve_statements, tmp_path, users) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"other")
        await query(client, "select 0")
        await change_user(client, b"app", b"shop")
        await query(client, "select 1")
        await change_user(client, b"other", b"")
        await query(client, "select 2")
        await end_capture(switchable, 4)
    (file,) = capture_files(tmp_path)
    assert texts(read_records(file)) == ["InitDB shop", "Query select 1", "ResetConnect", "Quit"]


async def test_pipelined_commands_keep_their_order(tmp_path: Path) -> None:
    async with run_switchable(serve_statements, tmp_path, capture(tmp_path)) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        number = await with_timeout(client.prepare(b"select slow"))
        identifier = number.to_bytes(4, "little")
        send(client, MySqlCommand.STMT_EXECUTE, identifier + b"\0\1\0\0\0")
        send(client, MySqlCommand.STMT_CLOSE, identifier)
        send(client, MySqlCommand.QUERY, b"select 1")
        for _ in range(2):
            await with_timeout(client.read_packet())
        await end_capture(switchable, 4)
    commands = [record.command for record in read_all_records(tmp_path)]
    assert commands == ["StmtPrepare", "StmtExecute", "StmtClose", "Query"]


async def test_command_of_a_client_that_leaves_is_counted_as_lost(tmp_path: Path) -> None:
    has_arrived = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = RawClient(reader, writer)
        writer.write(greeting_packet())
        await node.read_packet()
        writer.write(frame(2, OK_PAYLOAD))
        while b"never ends" not in (await node.read_packet())[1]:
            writer.write(frame(1, OK_PAYLOAD))
        has_arrived.set()
        await reader.read()

    async with run_switchable(serve, tmp_path, capture(tmp_path)) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, "select 1")
        send(client, MySqlCommand.QUERY, b"select 'never ends'")
        await with_timeout(has_arrived.wait())
        client.writer.transport.abort()
        await switchable.envoy.wait_for_metrics({DROPPED: 1, WRITTEN: 2})
        await end_capture(switchable, 2)
    assert texts(read_all_records(tmp_path)) == ["Query select 1", "Quit"]


async def test_capture_ends_by_its_size_and_asks_for_no_states_then(tmp_path: Path) -> None:
    node = RecordingNode()
    async with run_switchable(node.handler, tmp_path) as switchable:
        old, other = [await connect_logged_in(switchable.envoy) for _ in range(2)]
        assert error_of(await with_timeout(old.query("select 1"))) == 0
        await switchable.apply(capture(tmp_path, max_bytes=1))
        assert error_of(await with_timeout(other.query("select 2"))) == 0
        await switchable.envoy.wait_for_metrics({ACTIVE: 0, WRITTEN: 1, WAITING: 0})
        assert error_of(await with_timeout(old.query("select 3"))) == 0
    assert b"\x03SHOW SESSION_STATES" not in node.requests


async def test_capture_ends_by_itself(tmp_path: Path) -> None:
    async with run_switchable(serve_statements, tmp_path) as switchable:
        await switchable.apply(capture(tmp_path, until=time.time() + 2))
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, "select 1")
        await switchable.envoy.wait_for_metrics({WRITTEN: 1, ACTIVE: 0})
        await query(client, "select 2")
    assert texts(read_all_records(tmp_path)) == ["Query select 1"]


async def test_disk_that_cannot_be_written_loses_records_and_no_client_waits(tmp_path: Path) -> None:
    blocked = tmp_path / "captures"
    blocked.write_text("a file, where a directory should be")
    async with run_switchable(serve_statements, tmp_path, capture(blocked)) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        text = "select '" + "x" * 900_000 + "'"
        assert await query(client, *[text] * 55) == [0] * 55

        async def counts(*names: tuple[str]) -> list[int]:
            metrics = await switchable.envoy.metrics()
            return [metrics.get((name, ()), 0) for (name,) in names]

        async def has_dropped() -> bool:
            return all(await counts(DROPPED, WRITE_ERRORS))

        async def has_written() -> bool:
            return all(await counts(WRITTEN))

        await wait_until(has_dropped)
        assert await counts(WRITTEN) == [0]
        blocked.unlink()
        await wait_until(has_written)
        await query(client, "select 1", "select 2")
        (dropped,) = await counts(DROPPED)
        await end_capture(switchable, 57 - dropped)
    (file,) = capture_files(blocked)
    marks = [line["dropped"] for line in read_results(file) if "dropped" in line]
    assert sum(marks) == dropped
    assert len(read_records(file)) == 57 - dropped


async def test_open_session_does_not_wait_for_room_for_its_states(tmp_path: Path, mariadb: MariaDb) -> None:
    blocked = tmp_path / "captures"
    blocked.write_text("a file, where a directory should be")
    async with run_fleet(tmp_path, mariadb) as fleet:
        busy, late = [await fleet.connect_answer_client() for _ in range(2)]
        await late.query(b"set @a = 7")
        fleet.live_settings = capture(blocked)
        fleet.drain()
        await fleet.proxy.wait_for_metrics({ACTIVE: 1})

        async def dropped() -> int:
            return (await fleet.proxy.metrics()).get(("capture_dropped", ()), 0)

        for size in (900_000, 90_000, 9_000, 900, 90, 9):  # until there is no room for a short statement
            before = await dropped()
            while await dropped() == before:
                await busy.query(b"select length('" + b"x" * size + b"')")
        for _ in range(3):
            assert await with_timeout(rows(late, b"select @a")) == [(b"\x017",)]
        await fleet.proxy.wait_for_metrics({WAITING: 1})


async def test_full_disk_loses_nothing_that_the_queue_can_hold(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        async with run_switchable(serve_statements, tmp_path, capture(disk.path)) as switchable:
            client, _ = await log_in_as(switchable.envoy, b"app")
            await query(client, "select 1")
            await switchable.envoy.wait_for_metrics({WRITTEN: 1, WRITE_ERRORS: 0})
            disk.fill()
            statements = [f"select '{random.randbytes(4000).hex()}'" for _ in range(50)]
            assert await query(client, *statements) == [0] * 50

            async def has_failed() -> bool:
                return (await switchable.envoy.metrics())[("capture_write_errors", ())] > 0

            await wait_until(has_failed)
            (file,) = capture_files(disk.path)
            assert [record.payload for record in read_records(file)] == [b"select 1"]
            disk.free()
            await end_capture(switchable, 51)
        assert [record.payload.decode() for record in read_all_records(disk.path)] == [
            "select 1",
            *statements,
        ]


async def test_what_was_reported_as_written_is_in_the_files(tmp_path: Path) -> None:
    """Nothing that Envoy does later is needed, so a kill loses none of it."""
    async with run_switchable(serve_statements, tmp_path, capture(tmp_path)) as switchable:
        client, _ = await log_in_as(switchable.envoy, b"app")
        await query(client, *[f"select {number}" for number in range(100)])
        await switchable.envoy.wait_for_metrics({WRITTEN: 100})
        copy = Path(shutil.copytree(tmp_path / "test", tmp_path / "copy"))
    (file,) = capture_files(tmp_path, copy.name)
    assert file.suffix == ".open"
    assert len(read_records(file)) == len(read_results(file)) == 100


async def test_open_session_begins_with_its_states(tmp_path: Path, mariadb: MariaDb) -> None:
    """They are exported at its node: it does not move, and its answers are those of a direct session."""
    statements = (
        *(b"set @a = 'it''s kept'", b"create temporary table mysql.t (a int)"),
        *(
            b"insert into mysql.t values (1), (2)",
            b"drop temporary table mysql.t",
            b"select 1 union select 2",
        ),
    )
    reads = (b"select @a, found_rows()", b"select 1 / 0", b"show warnings")
    async with run_fleet(tmp_path, mariadb) as fleet, mariadb_session(mariadb) as direct:
        client = await fleet.connect_answer_client()
        for statement in statements:
            assert await client.query(statement) == await direct.query(statement)
        sessions = fleet.sessions
        fleet.live_settings = capture(tmp_path)
        fleet.drain()
        await fleet.proxy.wait_for_metrics({ACTIVE: 1})
        for read in reads:
            assert await rows(client, read) == await rows(direct, read), read
        await fleet.proxy.wait_for_metrics({WRITTEN: 3 + len(reads)})
        assert fleet.sessions == sessions
        fleet.live_settings = {}
        fleet.drain()
        await fleet.proxy.wait_for_metrics({ACTIVE: 0})
    (file,) = capture_files(tmp_path)
    preparation, states, completion, *others = read_records(file)
    assert preparation.payload.startswith(b"SET @@")
    assert states.payload.startswith(b"SET SESSION_STATES '")
    assert b"it's kept".hex().encode() in states.payload
    assert completion.payload.startswith(b"SET SESSION_STATES '")
    assert [record.payload for record in others] == list(reads)
    assert b"token" not in states.payload


async def test_session_with_a_secret_in_its_states_is_left_out(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb) as fleet:
        prepared, variable, other = [await fleet.connect_answer_client() for _ in range(3)]
        secret = b"alter user u identified by 'hidden'"
        await prepared.send_command(MySqlCommand.STMT_PREPARE, secret)
        await variable.query(b"set @x = 'identified by hidden'")
        await other.query(b"set @x = 'a'")
        fleet.live_settings = capture(tmp_path)
        fleet.drain()
        await fleet.proxy.wait_for_metrics({ACTIVE: 1})
        for client in (prepared, variable, other):
            await client.query(b"select 1")
        await fleet.proxy.wait_for_metrics({WRITTEN: 1 + 1 + 4, FILTERED: 6, WAITING: 0})
    payloads = [record.payload for record in read_all_records(tmp_path)]
    assert not any(b"hidden" in payload or b"hidden".hex().encode() in payload for payload in payloads)
    assert payloads.count(b"select 1") == 1


async def test_request_that_has_waited_for_a_limit_gets_its_own_answer(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    """Then it waits for the export of the session's states, and nothing ends that wait early."""
    rule = {"name": "slow", "pattern": "slow", "limit": {"concurrent": 1, "wait": 30}}
    settings = {"idle_timeout": 3, "rules": [rule]}  # its deadline passes within the export
    spec = NodeSpec(migration=MigrationRules(export_delay_seconds=6))
    config = ModuleConfig(live_settings=settings)
    async with run_fleet(tmp_path, mariadb, config=config, specs=(spec,)) as fleet:
        one, two = [await fleet.connect_answer_client() for _ in range(2)]
        await two.query(b"create or replace table mysql.slow (a int)")
        running = asyncio.create_task(one.query(b"select sleep(4), 'slow'"))
        hits = ("rule_hits", "false", "slow")
        await fleet.proxy.wait_for_metrics({hits: 2})
        waiting = asyncio.create_task(two.query(b"insert into mysql.slow values (1), (2)"))
        await fleet.proxy.wait_for_metrics({hits: 3})
        fleet.live_settings = settings | capture(tmp_path)
        fleet.drain()
        await running
        (answer,) = await waiting
    assert getattr(answer, "affected", answer) == 2


async def test_session_in_a_transaction_begins_after_it(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb) as fleet:
        client = await fleet.connect_answer_client()
        await client.query(b"begin")
        fleet.live_settings = capture(tmp_path)
        fleet.drain()
        await fleet.proxy.wait_for_metrics({ACTIVE: 1})
        for statement in (b"select 1", b"commit", b"select 2"):
            await client.query(statement)
        await fleet.proxy.wait_for_metrics({WRITTEN: 4})
    records = read_all_records(tmp_path)
    assert [record.payload for record in records[3:4]] == [b"select 2"]


async def test_checksum_of_rows_does_not_depend_on_their_order(tmp_path: Path, mariadb: MariaDb) -> None:
    config = ModuleConfig(live_settings=capture(tmp_path))
    async with run_fleet(tmp_path, mariadb, config=config) as fleet:
        client = await fleet.connect_answer_client()
        for text in (
            *("select 1 union select 2 order by 1", "select 1 union select 2 order by 1 desc", "select 1"),
            *(
                "select 1 from dual where 1 = 0",
                "set @a = 1",
                "select repeat('x', 20000000)",
                "select 1; select 2",
            ),
        ):
            await client.query(text.encode())
        await fleet.proxy.wait_for_metrics({WRITTEN: 7})
    (file,) = capture_files(tmp_path)
    results = read_results(file)[:7]
    checksums = [result["checksum"] for result in results]
    assert checksums[0] == checksums[1] == checksums[6] != checksums[2]
    assert checksums[3:5] == ["0000000000000000", None]
    assert len(set(checksums)) == 5
    assert [result["rows"] for result in results] == [2, 2, 1, 0, 0, 1, 2]
