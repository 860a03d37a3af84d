"""Clients log in to a simulated server, which uses a real MariaDB, and get every kind of response."""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pymysql
import pytest
from asyncmy.errors import OperationalError

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.greeting import NATIVE_PASSWORD, parse_greeting
from sandbox.tidb_sim.packets import Capability, MySqlCommand, eof, frame, ok
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.module.envoy import login_packet
from tests.support.tidb_sim_clients import (
    CAPABILITIES,
    connect_driver,
    query_rows,
    raw_connection,
    session_rules,
)


@pytest.fixture
async def sim(mariadb: MariaDb) -> AsyncIterator[TidbSim]:
    """Yield a simulated server in this process. After the test, check that it saw no protocol violation."""
    async with TidbSim(SimSettings(session_rules(mariadb))) as server:
        yield server
        assert server.node.violations == []
    assert server.node.connections == 0


async def test_client_logs_in_and_queries_its_node(sim: TidbSim) -> None:
    connection = await connect_driver(sim)
    assert await query_rows(connection, "select @@port") == [(sim.node.sql_port,)]
    assert await query_rows(connection, "select @@hostname") == [(sim.node.name,)]
    assert await query_rows(connection, "select version()") == [("8.0.11-TiDB-v8.5.3",)]
    assert connection.get_server_info() == "8.0.11-TiDB-v8.5.3"
    assert await query_rows(connection, "select connection_id()") == [(connection.thread_id(),)]
    assert sim.node.connections == 1
    await connection.ensure_closed()


async def test_accounts_are_shared_by_all_servers(mariadb: MariaDb, sim: TidbSim) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as other:
        admin = await connect_driver(sim)
        await query_rows(admin, "create user 'anna'@'%' identified by 'geheim'")
        try:
            connection = await connect_driver(other, user="anna", password="geheim")
            await connection.ensure_closed()
            for password, used in (("falsch", "YES"), ("", "NO")):
                with pytest.raises(OperationalError) as denied:
                    await connect_driver(other, user="anna", password=password)
                text = f"Access denied for user 'anna'@'127.0.0.1' (using password: {used})"
                assert denied.value.args == (1045, text)
            with pytest.raises(OperationalError) as denied:
                await connect_driver(other, user="nobody")
            assert denied.value.args[0] == 1045
        finally:
            await query_rows(admin, "drop user 'anna'@'%'")
            await admin.ensure_closed()


async def test_login_selects_database(sim: TidbSim, database: str) -> None:
    connection = await connect_driver(sim, db=database)
    assert await query_rows(connection, "select database()") == [(database,)]
    await connection.ensure_closed()
    with pytest.raises(OperationalError) as denied:
        await connect_driver(sim, db="nowhere")
    assert denied.value.args == (1049, "Unknown database 'nowhere'")


async def test_client_with_other_plugin_is_switched(sim: TidbSim) -> None:
    async with raw_connection(sim) as client:
        question = await client.login(plugin="auth_unknown_plugin")
        assert question[:1] == b"\xfe"
        plugin, _, rest = question[1:].partition(b"\0")
        assert (plugin, len(rest), rest[-1:]) == (NATIVE_PASSWORD.encode(), 21, b"\0")
        client.writer.write(frame(3, b""))
        assert await client.read_packet() == (4, bytes.fromhex("00000002000000"))


async def test_transfers_rows_and_requests_over_16_mib(sim: TidbSim) -> None:
    text = "tidevoy!" * (1 << 21) + "end"
    assert len(text) > 1 << 24

    def exchange() -> list[Any]:
        host, port = sim.sql_address.split(":")
        with pymysql.connect(
            host=host, port=int(port), user="root", max_allowed_packet=64 << 20
        ) as connection:
            cursor = connection.cursor()
            lengths = []
            for statement in (f"select '{text}' union all select 'x'", "select 'after'"):
                cursor.execute(statement)
                lengths.append([len(row[0]) for row in cursor.fetchall()])
            return lengths

    assert await asyncio.to_thread(exchange) == [[len(text), 1], [5]]


async def test_runs_several_statements_in_one_request(sim: TidbSim) -> None:
    connection = await connect_driver(sim, client_flag=Capability.MULTI_STATEMENTS)
    async with connection.cursor() as cursor:
        await cursor.execute("select 1; do 0; select 2 union select 3; select nonsense")
        assert await cursor.fetchall() == ((1,),)
        assert await cursor.nextset()
        assert await cursor.nextset()
        assert await cursor.fetchall() == ((2,), (3,))
        with pytest.raises(OperationalError, match="nonsense"):
            await cursor.nextset()
    assert await query_rows(connection, "select 4") == [(4,)]
    await connection.ensure_closed()


async def test_runs_load_data_local(sim: TidbSim, database: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("".join(f"{number},{'x' * 100}\n" for number in range(20_000)))

    def load() -> list[int]:
        host, port = sim.sql_address.split(":")
        with pymysql.connect(
            host=host, port=int(port), user="root", database=database, local_infile=True, autocommit=True
        ) as connection:
            cursor = connection.cursor()
            cursor.execute("create table t (id int, text varchar(100))")
            cursor.execute(f"load data local infile '{file}' into table t fields terminated by ','")
            with pytest.raises(pymysql.err.ProgrammingError, match="nowhere"):
                cursor.execute(f"load data local infile '{file}' into table nowhere")
            cursor.execute("select count(*), sum(id) from t")
            return [int(value) for value in cursor.fetchall()[0]]

    assert await asyncio.to_thread(load) == [20_000, 199_990_000]


@pytest.mark.parametrize("deprecate_eof", [Capability(0), Capability.DEPRECATE_EOF])
async def test_runs_prepared_statements_and_cursors(sim: TidbSim, deprecate_eof: Capability) -> None:
    """If the server missed the exact end of a response, the next request would fail."""
    end = 5 if not deprecate_eof else 9
    async with raw_connection(sim) as client:
        await client.login(CAPABILITIES | deprecate_eof)
        prepared = await client.send_command(
            MySqlCommand.STMT_PREPARE, b"select seq, ? from mysql.seq_1_to_5"
        )
        assert prepared[0] == 0
        columns, parameters = struct.unpack_from("<HH", prepared, 5)
        assert (columns, parameters) == (2, 1)
        for _ in range(columns + parameters + (0 if deprecate_eof else 2)):
            await client.read_packet()
        statement = prepared[1:5]
        client.writer.write(
            frame(0, bytes((MySqlCommand.STMT_SEND_LONG_DATA,)) + statement + b"\0\0" + b"long")
        )
        execute = statement + b"%c" + b"\x01\0\0\0" + b"\0" + b"\x01" + b"\xfd\0"
        assert await client.send_command(MySqlCommand.STMT_EXECUTE, execute % 0) == b"\x02"
        payloads = await client.read_until_eof(end)
        rows = (
            payloads[2 if deprecate_eof else 3 : -1]
            if deprecate_eof
            else (await client.read_until_eof(end))[:-1]
        )
        assert [row[-5:] for row in rows] == [b"\x04long"] * 5
        # With a cursor, the response to EXECUTE has no rows, and each FETCH returns some.
        client.writer.write(
            frame(0, bytes((MySqlCommand.STMT_SEND_LONG_DATA,)) + statement + b"\0\0" + b"more")
        )
        assert await client.send_command(MySqlCommand.STMT_EXECUTE, execute % 1) == b"\x02"
        await client.read_until_eof(end)
        first = await client.send_command(MySqlCommand.STMT_FETCH, statement + struct.pack("<I", 3))
        assert (first[0], len(await client.read_until_eof(end))) == (0, 3)
        assert (await client.send_command(MySqlCommand.STMT_RESET, statement))[0] == 0
        client.writer.write(frame(0, bytes((MySqlCommand.STMT_CLOSE,)) + statement))
        failed = await client.send_command(MySqlCommand.STMT_EXECUTE, execute % 0)
        assert (failed[0], struct.unpack_from("<H", failed, 1)[0]) == (0xFF, 1105)
        assert (await client.send_command(MySqlCommand.PING))[0] == 0


async def test_answers_other_commands(sim: TidbSim, database: str) -> None:
    async with raw_connection(sim) as client:
        await client.login()
        assert (await client.send_command(MySqlCommand.INIT_DB, database.encode()))[0] == 0
        assert await client.send_command(MySqlCommand.QUERY, b"create table t (id int, name text)") == ok(2)
        assert (await client.send_command(MySqlCommand.FIELD_LIST, b"t\0"))[:4] == b"\x03def"
        assert len(await client.read_until_eof(5)) == 2
        assert b"Uptime" in await client.send_command(MySqlCommand.STATISTICS)
        assert await client.send_command(MySqlCommand.SET_OPTION, b"\1\0") == eof(2)
        assert (await client.send_command(MySqlCommand.RESET_CONNECTION))[0] == 0
        assert await client.send_command(MySqlCommand.QUERY) == ok(2)
        assert await client.send_command(MySqlCommand.QUERY, b"begin") == ok(3)
        assert await client.send_command(MySqlCommand.QUERY, b" ; ") == ok(3)
        for unsupported in (0x0A, 0x0C, 0x0D, 0x12, 0x55):
            denied = await client.send_command(unsupported)
            assert denied == b"\xffQ\x04#HY000ERROR 1105 (HY000): command %d not supported now" % unsupported
        client.writer.write(frame(0, bytes((MySqlCommand.QUIT,))))
        assert await client.reader.read() == b""


async def test_change_user_starts_fresh_session(sim: TidbSim, database: str) -> None:
    async with raw_connection(sim) as client:
        await client.login()
        assert (await client.send_command(MySqlCommand.QUERY, b"set @a = 1"))[0] == 0
        body = b"root\0\0" + database.encode() + b"\0\x2d\0"
        assert (await client.send_command(MySqlCommand.CHANGE_USER, body + b"other_plugin\0"))[0] == 0xFE
        client.writer.write(frame(2, b""))
        assert await client.read_packet() == (3, ok(2))
        await client.send_command(MySqlCommand.QUERY, b"select concat(database(), ':', @a is null)")
        row = (await client.read_until_eof(5), await client.read_until_eof(5))[1][0]
        assert row[1:] == f"{database}:1".encode()
        assert sim.node.connections == 1
        denied = await client.send_command(
            MySqlCommand.CHANGE_USER, b"nobody\0\0\0\x2d\0mysql_native_password\0"
        )
        assert struct.unpack_from("<H", denied, 1)[0] == 1045
        assert await client.reader.read() == b""


async def test_committed_transactions_are_visible_at_another_server(
    mariadb: MariaDb, sim: TidbSim, database: str
) -> None:
    async with AsyncExitStack() as closing:
        other = await closing.enter_async_context(TidbSim(SimSettings(session_rules(mariadb))))
        writer, reader = await connect_driver(sim, db=database), await connect_driver(other, db=database)
        closing.push_async_callback(writer.ensure_closed)
        closing.push_async_callback(reader.ensure_closed)
        await query_rows(writer, "create table t (id int)")
        await query_rows(writer, "begin")
        await query_rows(writer, "insert into t values (1)")
        assert await query_rows(reader, "select count(*) from t") == [(0,)]
        await query_rows(writer, "commit")
        assert await query_rows(reader, "select count(*) from t") == [(1,)]


async def test_kill_ends_session_at_another_server(mariadb: MariaDb, sim: TidbSim) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as other, raw_connection(sim) as victim:
        connection_id = parse_greeting((await victim.read_packet())[1]).connection_id
        victim.writer.write(login_packet())
        assert await victim.read_packet() == (2, ok(2))
        killer = await connect_driver(other)
        await query_rows(killer, f"kill {connection_id}")
        assert await victim.reader.read() == b""  # FIN, no ERR
        await killer.ensure_closed()


async def test_incomplete_request_is_never_executed(sim: TidbSim, database: str) -> None:
    connection = await connect_driver(sim, db=database)
    await query_rows(connection, "create table t (id int)")
    async with raw_connection(sim) as client:
        await client.login()
        text = f"insert into {database}.t values (1)".encode().ljust(8192) + b";"
        client.writer.write(frame(0, b"\x03" + text)[:-5])
        await client.writer.drain()
    async with asyncio.timeout(10):
        while sim.node.connections > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await query_rows(connection, "select count(*) from t") == [(0,)]
    await connection.ensure_closed()


async def test_pipelined_requests_are_answered_in_order(sim: TidbSim) -> None:
    async with raw_connection(sim) as client:
        await client.login(CAPABILITIES | Capability.DEPRECATE_EOF)
        texts = [b"select sleep(0.05)", b"select @@port", b"select '" + b"x" * 5000 + b"'", b"select 2"] * 20
        client.writer.write(b"".join(frame(0, b"\x03" + text) for text in texts))
        for text in texts:
            rows = await client.read_until_eof(9)
            assert len(rows) == 4, text
        assert (await client.send_command(MySqlCommand.PING))[0] == 0


async def test_sysbench_runs_on_simulated_server(sim: TidbSim, database: str) -> None:
    sysbench = shutil.which("sysbench")
    assert sysbench is not None, "apt-get install sysbench"
    host, port = sim.sql_address.split(":")
    common = ["oltp_read_write", "--db-driver=mysql", f"--mysql-host={host}", f"--mysql-port={port}"]
    common += [
        "--mysql-user=root",
        f"--mysql-db={database}",
        "--tables=2",
        "--table-size=1000",
        "--threads=4",
    ]
    for action in (["prepare"], ["--time=3", "--rand-type=uniform", "run"]):
        process = await asyncio.create_subprocess_exec(
            sysbench, *common, *action, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
    assert "transactions:" in output.decode()
