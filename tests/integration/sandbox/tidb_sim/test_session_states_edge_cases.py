"""A session that the test migrates between two simulated servers keeps state that is easily lost."""

from __future__ import annotations

import struct

import pytest

from sandbox.tidb_sim.packets import AUTOCOMMIT, Capability, MySqlCommand, eof, frame
from sandbox.tidb_sim.server import TidbSim
from tests.support.tidb_sim_clients import (
    CAPABILITIES,
    RawClient,
    error_code,
    migrated_session,
    raw_session,
    run_statement,
)
from tests.support.waiting import wait_until_read

ONE_SHOT_ISOLATION = "tx_isolation_one_shot"


async def migration_blocker(client: RawClient) -> str:
    """Return why the session cannot migrate."""
    refused = await client.query("show session_states")
    assert error_code(refused) == 8146
    return refused.partition(b"session: ")[2].decode()


# Variables.


async def test_keeps_exact_numbers_and_times_in_user_variables(source: TidbSim, target: TidbSim) -> None:
    values = {
        "@a": "-9223372036854775808",
        "@b": "0.1e0 + 0.2e0",
        "@c": "1.7976931348623157e308",
        "@d": "123456789012345678901234567890.123456789",
        "@e": "now()",
        "@f": "time'10:00:00.5'",
        "@g": "_utf16 x'0041'",
        "@h": "true",
        "@i": "1e-300",
    }
    query = "select " + ", ".join(f"{name}, collation({name}), {name} + 0" for name in values)
    statements = [f"set {name} = {value}" for name, value in values.items()]
    async with raw_session(source, *statements) as client:
        before = await client.rows(query)
        async with migrated_session(client, target) as other:
            assert await other.rows(query) == before


async def test_too_large_user_variable_blocks_migration(source: TidbSim) -> None:
    async with raw_session(
        source, "set @a = repeat('x', 40 << 20)", "select cast('12x' as unsigned)"
    ) as client:
        refused = await client.query("show session_states")
        assert error_code(refused) == 1301
        assert refused.endswith(b"@a is larger than half of max_allowed_packet")
        assert await client.rows("show count(*) warnings") == [("1",)]
        assert "12x" in str(await client.rows("show warnings"))
        assert await client.rows("select length(@a)") == [(str(40 << 20),)]


async def test_keeps_fixed_timestamp_and_random_sequence(source: TidbSim, target: TidbSim) -> None:
    async with raw_session(source) as client:
        assert "timestamp" not in (await client.export_states())[0]["sys-vars"]
        for statement in ("set timestamp = 100.25", "set rand_seed1 = 10000000, rand_seed2 = 1000000"):
            await run_statement(client, statement)
        states, _ = await client.export_states()
        assert float(states["sys-vars"]["timestamp"]) == 100.25
        async with migrated_session(client, target) as other:
            query = "select unix_timestamp(now(6)), rand(), rand()"
            assert await other.rows(query) == await client.rows(query)
            await run_statement(other, "set timestamp = default")
            async with migrated_session(other, source) as back:
                assert await back.rows("select now() > '2020-01-01'") == [("1",)]


async def test_keeps_value_if_global_value_changed(source: TidbSim, target: TidbSim) -> None:
    query = "select @@group_concat_max_len"
    async with raw_session(source) as client, raw_session(target) as admin:
        before = await client.rows(query)
        try:
            await run_statement(admin, "set global group_concat_max_len = 4711")
            async with migrated_session(client, target) as other:
                assert await other.rows(query) == before != [("4711",)]
        finally:
            await run_statement(admin, "set global group_concat_max_len = default")


@pytest.mark.parametrize(
    "names", ["set names binary", "set names latin1", "set character_set_results = ucs2", "set names gbk"]
)
async def test_keeps_character_sets(source: TidbSim, target: TidbSim, names: str) -> None:
    query = (
        "select hex(concat_ws(':', @@character_set_client, @@character_set_results, "
        "@@character_set_connection, @@collation_connection)), hex('x'), charset('x')"
    )
    async with raw_session(source, names) as client:
        before = await client.rows(query)
        async with migrated_session(client, target) as other, migrated_session(other, source) as back:
            assert await other.rows(query) == await back.rows(query) == before
        assert await client.rows(query) == before


@pytest.mark.parametrize("modes", ["ORACLE", "ANSI,NO_BACKSLASH_ESCAPES", "IGNORE_SPACE,PIPES_AS_CONCAT", ""])
async def test_keeps_sql_modes(source: TidbSim, target: TidbSim, modes: str) -> None:
    statements = (f"set sql_mode = '{modes}', @a = 'it''s'", "prepare s from 'select ''a'' '")
    async with raw_session(source, *statements) as client:
        before = await client.rows("select @@sql_mode, @a")
        async with migrated_session(client, target) as other, migrated_session(other, source) as back:
            assert await back.rows("select @@sql_mode, @a") == before
            assert await back.rows("execute s") == [("a",)]


# Transactions.


async def test_keeps_isolation_of_next_transaction(source: TidbSim, target: TidbSim, database: str) -> None:
    table = f"{database}.t"
    statements = (
        f"create table {table} (id int) engine = innodb",
        f"insert into {table} values (1)",
        "set transaction isolation level serializable",
        "set @a = 1",
    )

    async def is_locking(session: RawClient) -> bool:
        """Return whether a SELECT in a transaction locks its rows, as only the level SERIALIZABLE does."""
        await run_statement(session, "begin")
        await run_statement(session, f"select * from {table}")
        async with raw_session(target, "set innodb_lock_wait_timeout = 0") as writer:
            locked = (await writer.query(f"update {table} set id = id + 1"))[0] == 0xFF
        await run_statement(session, "rollback")
        return locked

    async with raw_session(source, *statements) as client:
        states, _ = await client.export_states()
        assert states["sys-vars"][ONE_SHOT_ISOLATION] == "SERIALIZABLE"
        async with migrated_session(client, target) as other, migrated_session(other, source) as back:
            for session in (back, client):
                assert [await is_locking(session), await is_locking(session)] == [True, False]
            states, _ = await back.export_states()
            assert ONE_SHOT_ISOLATION not in states["sys-vars"]


@pytest.mark.parametrize("level", ["", "SERIALIZABLE; drop", "NO-LEVEL"])
async def test_ignores_invalid_isolation_level(source: TidbSim, level: str) -> None:
    async with raw_session(source) as client:
        await client.export_states()
        assert (await client.set_states({"sys-vars": {ONE_SHOT_ISOLATION: level}}))[0] == 0x00
        assert ONE_SHOT_ISOLATION not in (await client.export_states())[0]["sys-vars"]


@pytest.mark.parametrize("autocommit", [0, 1])
async def test_keeps_autocommit_without_starting_transaction(
    source: TidbSim, target: TidbSim, database: str, autocommit: int
) -> None:
    statements = (f"create table {database}.t (id int) engine = innodb", f"set autocommit = {autocommit}")
    async with raw_session(source, *statements) as client, migrated_session(client, target) as other:
        # Neither exporting nor restoring the states has started a transaction.
        assert await other.rows("select @@autocommit, @@in_transaction") == [(str(autocommit), "0")]
        status = (await other.query(f"insert into {database}.t values (1)"))[3]
        assert status & 3 == (AUTOCOMMIT if autocommit else 1)
        if not autocommit:
            assert await migration_blocker(other) == "session has an active transaction"
        await run_statement(other, "rollback")
        count = await other.rows(f"select count(*) from {database}.t")
        assert count == [(str(autocommit),)]


# Results of the last statement.


async def test_keeps_found_rows_of_limited_select(source: TidbSim, target: TidbSim) -> None:
    select = "select sql_calc_found_rows seq from mysql.seq_1_to_9 limit 2"
    async with raw_session(source, select) as client, migrated_session(client, target) as other:
        assert await other.rows("select found_rows()") == [("9",)]
        assert await other.rows("select found_rows()") == [("1",)]


async def test_only_first_of_several_statements_sees_last_results(
    source: TidbSim, target: TidbSim, database: str
) -> None:
    statements = (
        f"create table {database}.t (id int)",
        f"insert into {database}.t values (1), (2), (3)",
    )
    async with raw_session(source, *statements) as client, migrated_session(client, target) as other:
        text = f"set @a = row_count(); update {database}.t set id = 9 where id < 3; select @a, row_count()"
        other.writer.write(frame(0, bytes((MySqlCommand.QUERY,)) + text.encode()))
        for _ in range(2):
            assert (await other.read_packet())[1][0] == 0x00
        answers = [await other.read_until_eof(5) for _ in range(2)]
        assert answers[1][0] == b"\x013\x012"


async def test_long_statement_sees_last_results(source: TidbSim, target: TidbSim, database: str) -> None:
    statements = (f"create table {database}.t (id int)", f"insert into {database}.t values (1), (2)")
    async with raw_session(source, *statements) as client, migrated_session(client, target) as other:
        assert await other.rows("select row_count()".ljust(300_000) + ", found_rows() >= 0") == [("2", "1")]


async def test_keeps_error_as_warning(source: TidbSim, target: TidbSim) -> None:
    async with raw_session(source) as client:
        assert error_code(await client.query("select * from mysql.nowhere")) == 1146
        async with migrated_session(client, target) as other:
            for statement in ("show errors", "show warnings"):
                ((level, number, text),) = await other.rows(statement)
                assert (level, number) == ("Error", "1146")
                assert "nowhere" in (text or "")
            assert await other.rows("select @@error_count, @@warning_count") == [("1", "1")]


# Status flags.


async def test_cursor_closed_unread_leaves_no_status_flag(source: TidbSim, target: TidbSim) -> None:
    """If the first EOF had the flag CURSOR_EXISTS, the client would expect no rows after this EOF."""
    async with raw_session(source) as client:
        number = await client.prepare(b"select seq from mysql.seq_1_to_5")
        assert await client.execute(number, flags=1) == []
        await client.close_statement(number)
        for statement in (b"select @@port", b"show session_states"):
            assert (await client.send_command(MySqlCommand.QUERY, statement))[0] in (1, 2)
            assert (
                (await client.read_until_eof(5))[-1]
                == (await client.read_until_eof(5))[-1]
                == eof(AUTOCOMMIT)
            )
        async with migrated_session(client, target) as other:
            assert (await other.export_states())[0]["status"] == AUTOCOMMIT


async def test_failed_batch_leaves_no_status_flag(source: TidbSim, target: TidbSim) -> None:
    """If a later response had the flag MORE_RESULTS, the client would wait forever for another result."""
    async with raw_session(source) as client:
        client.writer.write(frame(0, b"\x03do 0; select nonsense"))
        assert (await client.read_packet())[1][0] == 0x00
        assert error_code((await client.read_packet())[1]) == 1054
        assert (await client.export_states())[0]["status"] == AUTOCOMMIT
        assert (await client.send_command(MySqlCommand.QUERY, b"select @@port"))[0] == 1
        assert (await client.read_until_eof(5))[-1] == (await client.read_until_eof(5))[-1] == eof(AUTOCOMMIT)
        async with migrated_session(client, target):
            pass


# Statements.


@pytest.mark.parametrize("extra", [Capability(0), Capability.DEPRECATE_EOF])
async def test_keeps_parameter_types(source: TidbSim, target: TidbSim, extra: Capability) -> None:
    """Nine parameters need a NULL bitmap of two bytes. The first is unsigned, the eighth is NULL."""
    types = b"\x08\x80" + b"\x08\0" + b"\x05\0" + b"\x01\0" + b"\xfd\0" * 4 + b"\x03\0"
    values = struct.pack("<Qqdb", (1 << 64) - 1, -7, 1.5, -8) + b"\1a\1b\1c" + struct.pack("<i", 9)
    expected = b"18446744073709551615:-7:1.5:-8:a:b:c:9"
    nulls = b"\x80\0"
    capabilities = CAPABILITIES | extra
    async with raw_session(source, capabilities=capabilities) as client:
        number = await client.prepare(b"select concat_ws(':', ?, ?, ?, ?, ?, ?, ?, ?, ?)")
        (row,) = await client.execute(number, nulls + b"\1" + types + values)
        assert row[3:] == expected
        async with (
            migrated_session(client, target, capabilities=capabilities) as other,
            migrated_session(other, source, capabilities=capabilities) as back,
        ):
            for session in (back, other):
                (row,) = await session.execute(number, nulls + b"\0" + values)
                assert row[3:] == expected


async def test_statement_keeps_database_of_its_preparation(
    source: TidbSim, target: TidbSim, database: str
) -> None:
    statements = (f"use {database}", "create table t (id int)", "insert into t values (7)")
    async with raw_session(source, *statements) as client:
        assert await client.prepare(b"select id from t") == 1
        assert (await client.send_command(MySqlCommand.INIT_DB, b"mysql"))[0] == 0x00
        async with migrated_session(client, target) as other:
            assert (await other.execute(1))[0][2:] == struct.pack("<i", 7)
            assert await other.rows("select database()") == [("mysql",)]


async def test_migrates_session_whose_database_was_dropped(
    source: TidbSim, target: TidbSim, database: str
) -> None:
    async with raw_session(source, f"use {database}", f"drop database {database}") as client:
        assert await client.prepare(b"select 7") == 1
        states, _ = await client.export_states()
        assert "current-db" not in states
        async with migrated_session(client, target) as other:
            assert await other.rows("select database()") == [(None,)]
            assert (await other.execute(1))[0][2:] == struct.pack("<i", 7)


async def test_statements_on_dropped_tables_are_not_restored(
    source: TidbSim, target: TidbSim, database: str
) -> None:
    statements = (
        f"create table {database}.t (id int)",
        f"prepare s from 'select * from {database}.t'",
        f"drop table {database}.t",
    )
    async with raw_session(source, *statements) as client:
        states, token = await client.export_states()
        async with raw_session(target) as other:
            await other.export_states()
            assert error_code(await other.set_states(states)) == 1146
        assert token


async def test_long_statements_pin_session_and_are_kept(
    source: TidbSim, target: TidbSim, database: str
) -> None:
    columns = ", ".join(f"column_number_{number} int" for number in range(500))
    text = f"/* {'long ' * 2000} */ create temporary table x ({columns})".encode()
    async with raw_session(source, f"use {database}") as client:
        # The statement arrives in two parts, and the server must parse it as a whole.
        packet = frame(0, bytes((MySqlCommand.QUERY,)) + text)
        client.writer.write(packet[:6000])
        await wait_until_read(client.writer)
        client.writer.write(packet[6000:])
        assert (await client.read_packet())[1][0] == 0x00
        assert await migration_blocker(client) == "session has local temporary tables"
        await run_statement(client, "drop table x")
        await run_statement(client, f"prepare s from 'select length(\\'{'y' * 100_000}\\')'")
        async with migrated_session(client, target) as other:
            assert await other.rows("execute s") == [("100000",)]


async def test_unknown_statement_text_pins_session(source: TidbSim, target: TidbSim) -> None:
    async with raw_session(source) as client:
        client.writer.write(frame(0, b"\x03set @a = 'select 5'; prepare s from @a; set @a = 'gone'"))
        for _ in range(3):
            assert (await client.read_packet())[1][0] == 0x00
        assert await migration_blocker(client) == "the text of the prepared statement s is not known"
        await run_statement(client, "deallocate prepare s")
        async with migrated_session(client, target):
            pass


# Locks.


async def expect_only_last_statement_unpins(client: RawClient, *statements: str) -> None:
    """Check that only the last of these statements releases the session's last lock."""
    for statement in statements:
        assert await migration_blocker(client) == "session has advisory locks"
        await run_statement(client, statement)


async def test_lock_pins_session_with_any_name(source: TidbSim, target: TidbSim) -> None:
    async with raw_session(source, "set @name = 'pin_a'", "select get_lock(@name, 0)") as client:
        await expect_only_last_statement_unpins(
            client,
            "set @name = 'pin_b'",
            "select release_lock('pin_c')",
            "set @name = 'pin_a'",
            "select release_lock(@name)",
        )
        async with migrated_session(client, target):
            pass


async def test_locks_are_queried_by_name_in_any_mode(source: TidbSim, target: TidbSim) -> None:
    statements = ("select get_lock('it\\'s', 0), get_lock('pin_ü', 0)", "set sql_mode = 'ANSI,ORACLE'")
    async with raw_session(source, *statements) as client, raw_session(target) as stranger:
        await expect_only_last_statement_unpins(
            client, "select release_lock('it''s')", "select release_lock('pin_ü')"
        )
        await run_statement(stranger, "select get_lock('pin_ü', 0)")
        async with migrated_session(client, target):
            pass
