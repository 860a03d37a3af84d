"""A simulated server rejects invalid states and exports of pinned sessions, and reports violations."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from controlplane.errors import ConfigError
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.packets import MySqlCommand, frame
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.tidb_sim_clients import (
    error_code,
    migrated_session,
    raw_connection,
    raw_session,
    run_statement,
    session_rules,
)
from tests.support.waiting import wait_until, wait_until_read


@pytest.mark.parametrize(
    ("pins", "reason", "frees"),
    [
        (["begin", "insert into t values (1)"], "session has an active transaction", ["commit"]),
        (
            ["set autocommit = 0", "insert into t values (1)"],
            "session has an active transaction",
            ["rollback"],
        ),
        (
            ["create temporary table x (id int)"],
            "session has local temporary tables",
            ["drop temporary table x"],
        ),
        (["select get_lock('pin', 0)"], "session has advisory locks", ["select release_lock('pin')"]),
        (["lock tables t write"], "session has locked tables", ["unlock tables"]),
    ],
)
async def test_reports_why_session_is_pinned(
    source: TidbSim, target: TidbSim, database: str, pins: list[str], reason: str, frees: list[str]
) -> None:
    async with raw_session(source, f"use {database}", "create table t (id int)", *pins) as client:
        rejected = await client.query("show session_states")
        assert rejected == b"\xff\xd2\x1f#HY000cannot migrate the current session: " + reason.encode()
        for statement in frees:
            await run_statement(client, statement)
        async with migrated_session(client, target) as other:
            assert await other.rows("select database()") == [(database,)]


async def test_rejected_export_has_no_effect(source: TidbSim, database: str) -> None:
    async with raw_session(
        source, f"use {database}", "create table t (id int)", "begin", "insert into t values (1), (2)"
    ) as client:
        assert error_code(await client.query("show session_states")) == 8146
        assert await client.rows("select row_count()") == [("2",)]
        await run_statement(client, "rollback")
        assert await client.rows("select count(*) from t") == [("0",)]


async def test_bound_parameters_and_unfetched_rows_pin_session(source: TidbSim) -> None:
    async with raw_session(source) as client:
        number = await client.prepare(b"select seq, ? from mysql.seq_1_to_5")
        head = struct.pack("<BIH", MySqlCommand.STMT_SEND_LONG_DATA, number, 0)
        client.writer.write(frame(0, head + b"x"))
        assert b"bound params" in await client.query("show session_states")
        await client.execute(number, b"\0\1\xfd\0", flags=1)
        assert b"unfetched rows" in await client.query("show session_states")
        fetch = struct.pack("<II", number, 3)
        await client.send_command(MySqlCommand.STMT_FETCH, fetch)
        await client.read_until_eof(5)
        assert b"unfetched rows" in await client.query("show session_states")
        await client.send_command(MySqlCommand.STMT_FETCH, fetch)
        await client.read_until_eof(5)
        assert (await client.export_states())[0]["prepared-stmt-id"] == number


async def test_no_token_without_certificate(mariadb: MariaDb) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as old, raw_session(old) as client:
        rejected = await client.query("show session_states")
        assert rejected.endswith(b"session: no certificate or key file to sign the data")
    async with (
        TidbSim(SimSettings(session_rules(mariadb), release="v9.0.0")) as new,
        raw_session(new) as client,
    ):
        ((states, token),) = await client.rows("show session_states")
        assert states is not None
        assert token is None


async def test_states_can_be_slow_rejected_and_change_row_count(
    mariadb: MariaDb, signing: SessionCertificate, database: str
) -> None:
    rules = session_rules(
        mariadb, migration=MigrationRules(export_delay_seconds=0.3, rejects_set_states=True)
    )
    async with TidbSim(SimSettings(rules, **signing.settings)) as sim, raw_session(sim) as client:
        started = time.monotonic()
        states, _ = await client.export_states()
        assert time.monotonic() - started >= 0.3
        assert error_code(await client.set_states(states)) == 1064
        assert sim.node.violations == []
    rules = session_rules(mariadb, migration=MigrationRules(show_changes_row_count=True))
    statements = (
        f"create table {database}.t (id int)",
        "select seq from mysql.seq_1_to_7",
        f"insert into {database}.t values (1), (2)",
    )
    query = "select row_count(), found_rows()"
    async with (
        TidbSim(SimSettings(rules, **signing.settings)) as sim,
        raw_session(sim, *statements) as client,
    ):
        states, _ = await client.export_states()
        results = {key: states[key] for key in ("affected-rows", "found-rows")}
        assert results["affected-rows"] == 2
        assert await client.rows(query) == [("-1", "1")]
        # These states contain no variables, so SET SESSION_STATES restores the results and keeps @a.
        await run_statement(client, "set @a = 1")
        assert (await client.set_states(results))[0] == 0x00
        assert await client.rows(f"{query}, @a") == [("2", str(results["found-rows"]), "1")]
        assert sim.node.violations == []


# Protocol violations by a proxy.


@pytest.mark.parametrize(
    "command", [b"\x0e", b"\x03select 1", b"\x02mysql", b"\x03set global time_zone='SYSTEM'"]
)
async def test_command_before_states_is_violation(source: TidbSim, target: TidbSim, command: bytes) -> None:
    async with raw_session(source) as client, raw_connection(target) as other:
        _, token = await client.export_states()
        await other.login_by_token(token)
        assert (await other.query("set sql_mode = ''"))[0] == 0x00
        assert target.node.violations == []
        await other.send_command(command[0], command[1:])
        assert len(target.node.violations) == 1
        assert "between a login by token and SET SESSION_STATES" in target.node.violations[0]
        target.node.violations.clear()


async def test_states_for_session_without_token_are_violation(source: TidbSim) -> None:
    async with raw_session(source) as client:
        assert (await client.set_states({"found-rows": 3}))[0] == 0x00
        assert len(source.node.violations) == 1
        assert "neither logged in by token nor shown its states" in source.node.violations[0]
        source.node.violations.clear()


async def test_restoring_two_whole_sessions_is_violation(source: TidbSim, target: TidbSim) -> None:
    async with raw_session(source) as client, migrated_session(client, target) as other:
        states, _ = await client.export_states()
        assert (await other.set_states({"affected-rows": 1}))[0] == 0x00
        assert target.node.violations == []
        assert (await other.set_states(states))[0] == 0x00
        assert len(target.node.violations) == 1
        assert "for the second time" in target.node.violations[0]
        target.node.violations.clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("set session_states '{'", 1105),
        ("set session_states '[]'", 1105),
        ('set session_states \'{"found-rows": "x"}\'', 1105),
        ("set session_states", 1064),
        ("set session_states {}", 1064),
        ("set session_states '{}' x", 1064),
        ("set session_states '{}", 1064),
        ('set session_states \'{"prepared-stmts": {"5": {"text": "nonsense"}}}\'', 1064),
        ('set session_states \'{"current-db": "nowhere"}\'', 1049),
    ],
)
async def test_rejects_invalid_states(source: TidbSim, text: str, expected: int) -> None:
    async with raw_session(source) as client:
        await client.export_states()
        assert error_code(await client.query(text)) == expected
        assert await client.rows("select 1") == [("1",)]


@pytest.mark.parametrize(
    "text",
    [
        'SET SESSION_STATES \'{"sys-vars": {"no_such": "1", "lc_time_names": "de_DE"}}\';',
        'set session_states "{}"',
    ],
)
async def test_ignores_unknown_states(source: TidbSim, text: str) -> None:
    async with raw_session(source) as client:
        await client.export_states()
        assert (await client.query(text))[0] == 0x00
        if "lc_time_names" in text:
            assert await client.rows("select @@lc_time_names") == [("de_DE",)]


async def test_server_with_bad_certificate_does_not_start(
    mariadb: MariaDb, signing: SessionCertificate, tmp_path: Path
) -> None:
    settings = SimSettings(
        session_rules(mariadb), signing_cert=str(signing.cert), signing_key=str(tmp_path / "nowhere")
    )
    with pytest.raises(ConfigError, match="not a private key"):
        await TidbSim(settings).start()


async def test_client_disconnects_while_waiting_for_states(
    mariadb: MariaDb, signing: SessionCertificate
) -> None:
    rules = session_rules(mariadb, migration=MigrationRules(export_delay_seconds=60))
    async with TidbSim(SimSettings(rules, **signing.settings)) as sim:
        async with raw_session(sim) as client:
            client.writer.write(frame(0, b"\x03show session_states"))
            await wait_until_read(client.writer)
        await wait_until(lambda: not sim.node.connections)
