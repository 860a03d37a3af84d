"""A session that the test itself migrates between two simulated servers keeps its state."""

from __future__ import annotations

import struct

import pytest

from sandbox.tidb_sim.packets import AUTOCOMMIT, NO_BACKSLASH_ESCAPES, Capability, MySqlCommand, frame
from sandbox.tidb_sim.server import TidbSim
from tests.support.tidb_sim_clients import (
    CAPABILITIES,
    connect_driver,
    error_code,
    migrated_session,
    raw_connection,
    raw_session,
    run_statement,
)

LAST_STATEMENT_RESULTS = "select row_count(), found_rows(), last_insert_id()"


async def test_states_are_one_row_of_json(source: TidbSim, database: str) -> None:
    connection = await connect_driver(source, db=database)
    async with connection.cursor() as cursor:
        await cursor.execute("SHOW SESSION_STATES;")
        assert [(column[0], column[1]) for column in cursor.description] == [
            ("Session_states", 245),
            ("Session_token", 245),
        ]
        assert len(await cursor.fetchall()) == 1
    await connection.ensure_closed()
    async with raw_session(source) as client:
        states, token = await client.export_states()
        assert set(states["sys-vars"]) >= {
            *("sql_mode", "character_set_client", "character_set_results", "character_set_connection"),
            *("collation_connection", "autocommit", "time_zone", "tx_isolation"),
        }
        assert "current-db" not in states
        assert states["status"] == AUTOCOMMIT
        assert b'"username": "root"' in token


@pytest.mark.parametrize("extra", [Capability(0), Capability.DEPRECATE_EOF])
async def test_keeps_user_variables(source: TidbSim, target: TidbSim, extra: Capability) -> None:
    values = {
        "@a": "-5",
        "@b": "18446744073709551615",
        "@c": "1.50",
        "@d": "-1e100",
        "@e": "'süß'",
        "@f": "x'ff0041'",
        "@g": "NULL",
        "@h": "_latin1 x'e4' collate latin1_german1_ci",
        "@`o``d d ü`": "'it''s \\\\ \"'",
        "@i": "''",
    }
    query = "select " + ", ".join(f"{name}, hex({name}), collation({name})" for name in values)
    capabilities = CAPABILITIES | extra
    statements = [f"set {name} = {value}" for name, value in values.items()]
    async with raw_session(source, *statements, capabilities=capabilities) as client:
        before = await client.rows(query)
        async with migrated_session(client, target, capabilities=capabilities) as other:
            assert await other.rows(query) == before
            assert await other.rows("select @b + 0, @a + 0") == [("18446744073709551615", "-5")]


async def test_keeps_user_variable_of_megabytes(source: TidbSim, target: TidbSim) -> None:
    async with (
        raw_session(source, "set @a = repeat('tidevoy!', 700000)") as client,
        migrated_session(client, target) as other,
    ):
        assert await other.rows("select length(@a), right(@a, 8)") == [("5600000", "tidevoy!")]


async def test_keeps_system_variables(source: TidbSim, target: TidbSim) -> None:
    statements = (
        "set time_zone = '+03:00'",
        "set session transaction isolation level serializable",
        "set lc_time_names = 'de_DE'",
        "set group_concat_max_len = 77777",
        "set sql_select_limit = 1",
        "set names utf8mb4",
        "set character_set_results = NULL",
        "set sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'",
        "set autocommit = 0",
    )
    query = (
        "select @@time_zone, @@tx_isolation, @@lc_time_names, @@group_concat_max_len, @@sql_select_limit, "
        "@@character_set_client, @@character_set_results, @@character_set_connection, "
        "@@collation_connection, @@sql_mode, @@autocommit"
    )
    async with raw_session(source, *statements) as client:
        before = await client.rows(query)
        assert before[0][6] is None
        assert before[0][-1] == "0"
        states, token = await client.export_states()
        async with raw_connection(target) as other:
            await other.login_by_token(token)
            status = int.from_bytes((await other.set_states(states))[3:5], "little")
            assert status & (AUTOCOMMIT | NO_BACKSLASH_ESCAPES) == NO_BACKSLASH_ESCAPES
            assert await other.rows(query) == before
            # Migrate back, so that the export runs with these modes, too.
            async with migrated_session(other, source) as back:
                assert await back.rows(query) == before


async def test_restored_collation_is_the_default_until_it_is_set_again(
    source: TidbSim, target: TidbSim
) -> None:
    collation = "select @@collation_connection"
    async with raw_session(source, "set names utf8mb4 collate utf8mb4_unicode_ci") as client:
        states, token = await client.export_states()
        async with raw_connection(target) as other:
            await other.login_by_token(token)
            await other.set_states(states)
            assert await other.rows(collation) == [("utf8mb4_general_ci",)]
            await other.set_states({"sys-vars": {"collation_connection": "utf8mb4_unicode_ci"}})
            assert await other.rows(collation) == [("utf8mb4_unicode_ci",)]
    assert target.node.violations == []


async def test_parses_literal_by_mode_of_new_session(source: TidbSim, target: TidbSim) -> None:
    async with raw_session(source, "set @a = 'it''s \\\\ \"'") as client:
        states, token = await client.export_states()
        async with raw_connection(target) as other:
            await other.login_by_token(token)
            assert (await other.query("set sql_mode = 'NO_BACKSLASH_ESCAPES'"))[0] == 0x00
            # Doubled backslashes stay doubled in this mode, so the text is no longer JSON.
            assert error_code(await other.set_states({"current-db": 'a"b'})) == 1105
            await run_statement(other, "set sql_mode = ''")
            assert (await other.set_states(states))[0] == 0x00
            assert await other.rows("select @a") == [("it's \\ \"",)]
        assert target.node.violations == []


async def test_keeps_current_database(source: TidbSim, target: TidbSim, database: str) -> None:
    async with raw_session(source, f"use {database}") as client:
        assert (await client.export_states())[0]["current-db"] == database
        async with migrated_session(client, target) as other:
            assert await other.rows("select database()") == [(database,)]
    async with raw_session(source) as client, migrated_session(client, target) as other:
        assert await other.rows("select database()") == [(None,)]


async def test_keeps_named_statements(source: TidbSim, target: TidbSim, database: str) -> None:
    statements = (
        f"use {database}",
        "create table t (id int)",
        "insert into t values (7)",
        "prepare One from 'select id + ? as \\'it\\'\\'s\\' from t'",
        "set @text = 'select ''from a variable'''",
        "prepare two from @text",
        "set @text = 'gone', @by = 3",
        "prepare three from 'select 3'",
        "deallocate prepare three",
        "use mysql",
    )
    async with raw_session(source, *statements) as client:
        states, _ = await client.export_states()
        named = {number: stored.get("name") for number, stored in states["prepared-stmts"].items()}
        assert named == {"1": "one", "2": "two"}
        async with migrated_session(client, target) as other:
            assert await other.rows("execute one using @by") == [("10",)]
            assert await other.rows("execute TWO") == [("from a variable",)]
            assert error_code(await other.query("execute three")) == 1243
            await run_statement(other, "deallocate prepare one")
            assert error_code(await other.query("execute one using @by")) == 1243


def encode_parameters(number: int, text: bytes, *, types: bool) -> bytes:
    """Build the parameters of a statement: an INT and a string."""
    types_part = b"\1\x03\0\xfd\0" if types else b"\0"
    return b"\0" + types_part + struct.pack("<i", number) + b"\xfd" + len(text).to_bytes(3, "little") + text


@pytest.mark.parametrize("extra", [Capability(0), Capability.DEPRECATE_EOF])
async def test_keeps_statement_ids(source: TidbSim, target: TidbSim, extra: Capability) -> None:
    capabilities = CAPABILITIES | extra
    async with raw_session(source, capabilities=capabilities) as client:
        statement_ids = [
            await client.prepare(text)
            for text in (b"select 'closed'", b"select concat(?, ':', ?)", b"select 'third'")
        ]
        assert statement_ids == [1, 2, 3]
        await client.close_statement(1)
        assert (await client.execute(2, encode_parameters(5, b"abc", types=True)))[0][2:] == b"\x055:abc"
        states, _ = await client.export_states()
        assert states["prepared-stmt-id"] == 3
        assert set(states["prepared-stmts"]) == {"2", "3"}
        async with migrated_session(client, target, capabilities=capabilities) as other:
            # The client has sent the parameter types only to the first node.
            assert (await other.execute(2, encode_parameters(6, b"def", types=False)))[0][2:] == b"\x056:def"
            assert (await other.execute(2, encode_parameters(7, b"ghi", types=False)))[0][2:] == b"\x057:ghi"
            assert (await other.execute(3))[0][2:] == b"\x05third"
            body = struct.pack("<IBI", 1, 0, 1)
            assert error_code(await other.send_command(MySqlCommand.STMT_EXECUTE, body)) == 1105
            assert await other.prepare(b"select 'new'") == 4
            assert (await other.execute(4))[0][2:] == b"\x03new"
            async with migrated_session(other, source, capabilities=capabilities) as back:
                # This execution is longer than a TCP segment, and sends no parameter types.
                row = (await back.execute(2, encode_parameters(8, b"x" * 200_000, types=False)))[0]
                assert row[2:] == b"\xfd" + (200_002).to_bytes(3, "little") + b"8:" + b"x" * 200_000
                row = (await back.execute(2, encode_parameters(9, b"y" * 200_000, types=True)))[0]
                assert row[6:9] == b"9:y"
                assert await back.prepare(b"select '" + b"z" * 10_000 + b"'") == 5
                assert (await back.send_command(MySqlCommand.STMT_RESET, struct.pack("<I", 2)))[0] == 0


async def test_long_data_and_cursors_work_after_migration(source: TidbSim, target: TidbSim) -> None:
    async with raw_session(source) as client:
        number = await client.prepare(b"select seq, ? from mysql.seq_1_to_3")
        async with migrated_session(client, target) as other:
            long_data = struct.pack("<BIH", MySqlCommand.STMT_SEND_LONG_DATA, number, 0)
            other.writer.write(frame(0, long_data + b"long"))
            rows = await other.execute(number, b"\0\1\xfd\0")
            assert [row[-5:] for row in rows] == [b"\x04long"] * 3
            assert await other.execute(number, b"\0\1\xfd\0\x01x", flags=1) == []
            fetch = struct.pack("<II", number, 10)
            first = await other.send_command(MySqlCommand.STMT_FETCH, fetch)
            assert (first[0], len(await other.read_until_eof(5))) == (0, 3)


async def test_keeps_results_of_last_statement(source: TidbSim, target: TidbSim, database: str) -> None:
    def statements(table: str) -> tuple[str, ...]:
        return (
            f"create table {database}.{table} (id int auto_increment primary key, v int)",
            "select seq from mysql.seq_1_to_7",
            f"insert into {database}.{table} (v) values (1), (2)",
        )

    async with raw_session(source, *statements("a")) as control:
        expected = await control.rows(LAST_STATEMENT_RESULTS)
    assert (expected[0][0], expected[0][2]) == ("2", "1")
    async with raw_session(source, *statements("b")) as client:
        states, _ = await client.export_states()
        results = [states[key] for key in ("affected-rows", "found-rows", "last-insert-id")]
        assert [tuple(map(str, results))] == expected
        async with migrated_session(client, target) as other, migrated_session(other, source) as back:
            assert await back.rows(LAST_STATEMENT_RESULTS) == expected
            assert await back.rows("select row_count(), found_rows()") == [("-1", "1")]
        # Two exports have not changed the results.
        assert await client.rows(LAST_STATEMENT_RESULTS) == expected


async def test_missing_states_are_reset(source: TidbSim) -> None:
    """As in TiDB, SET SESSION_STATES also resets the last statement id, so the server reuses ids."""
    async with raw_session(source, "select last_insert_id(7)") as client:
        first = await client.prepare(b"select 1")
        await run_statement(client, "select seq from mysql.seq_1_to_7")
        await client.export_states()
        assert (await client.set_states({}))[0] == 0x00
        assert await client.rows(LAST_STATEMENT_RESULTS) == [("0", "0", "0")]
        assert await client.prepare(b"select 2") == first


async def test_keeps_64_bit_insert_id(source: TidbSim, target: TidbSim) -> None:
    async with raw_session(source, "select last_insert_id(18446744073709551615)") as client:
        async with migrated_session(client, target) as other:
            assert await other.rows("select last_insert_id()") == [("18446744073709551615",)]
        assert await client.rows("select last_insert_id()") == [("18446744073709551615",)]


async def test_keeps_warnings(source: TidbSim, target: TidbSim) -> None:
    faulty = "select cast('12x' as unsigned) + cast('ü' as unsigned)"
    async with raw_session(source, faulty) as control:
        expected = await control.rows("show warnings")
        counted = await control.rows("show count(*) warnings")
    assert "12x" in str(expected)
    async with raw_session(source, faulty) as client, migrated_session(client, target) as other:
        for session in (other, client):
            assert await session.rows("show warnings") == expected
            assert await session.rows("show count(*) warnings") == counted
            assert await session.rows("select @@warning_count") == counted
            assert await session.rows("show errors") == []
            await run_statement(session, "select count(*) from mysql.seq_1_to_2")
            assert await session.rows("show warnings") == []


async def test_keeps_text_in_gbk(source: TidbSim, target: TidbSim) -> None:
    async with raw_session(source, "set names gbk") as client:
        assert (await client.query("set @a = '中'".encode("gbk")))[0] == 0x00
        assert (await client.query("prepare s from 'select ''中'''".encode("gbk")))[0] == 0x00
        async with migrated_session(client, target, codec="gbk") as other:
            assert await other.rows("select @a, hex(@a), collation(@a)", "gbk") == [
                ("中", "D6D0", "gbk_chinese_ci")
            ]
            assert await other.rows("execute s", "gbk") == [("中",)]


async def test_reset_connection_migrates_as_fresh_session(
    source: TidbSim, target: TidbSim, database: str
) -> None:
    pins = ("create temporary table x (id int)", "prepare s from 'select 1'", "set @a = 1")
    async with raw_session(source, f"use {database}", *pins) as client:
        assert error_code(await client.query("show session_states")) == 8146
        assert (await client.send_command(MySqlCommand.RESET_CONNECTION))[0] == 0x00
        states, _ = await client.export_states()
        assert not {"prepared-stmts", "user-var-values"} & set(states)
        assert await client.prepare(b"select 'first'") == 1
        async with migrated_session(client, target) as other:
            assert (await other.execute(1))[0][2:] == b"\x05first"


async def test_pipelined_request_waits_for_export(source: TidbSim) -> None:
    async with raw_session(source) as client:
        client.writer.write(frame(0, b"\x03show session_states") + frame(0, b"\x03select 'behind'"))
        answers = [await client.read_until_eof(5) for _ in range(4)]
        assert answers[3][0] == b"\x06behind"
