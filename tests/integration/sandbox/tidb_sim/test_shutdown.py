"""A stopping simulated server at first serves all commands but COM_PING, and later ends sessions by a FIN."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.compression import Compression
from sandbox.tidb_sim.packets import AUTOCOMMIT, IN_TRANSACTION, Capability, MySqlCommand, err, frame, ok
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.tls import SqlTlsFiles
from tests.support.load.client_packets import SSL_REQUEST, login
from tests.support.tidb_sim_clients import (
    CAPABILITIES,
    RawClient,
    error_code,
    migrated_session,
    raw_connection,
    raw_session,
    run_statement,
    session_rules,
)
from tests.support.waiting import assert_nothing_received, wait_until, wait_until_read

SHUTTING_DOWN = err(1053, "Server shutdown in progress", "08S01")
PING = bytes((MySqlCommand.PING,))


@asynccontextmanager
async def waiting_server(mariadb: MariaDb, signing: SessionCertificate) -> AsyncIterator[TidbSim]:
    """Yield a simulated server whose graceful wait lasts longer than any test."""
    sim = TidbSim(SimSettings(session_rules(mariadb), graceful_wait=600, **signing.settings))
    await sim.start()
    try:
        yield sim
        assert sim.node.is_reporting_shutdown
        assert not sim.node.is_ending_idle_sessions
        assert sim.node.violations == []
    finally:
        sim.crash()
        await sim.wait()


@asynccontextmanager
async def session_in_transaction(sim: TidbSim, database: str) -> AsyncIterator[RawClient]:
    """Yield a session in a transaction. A server that shuts down waits for the transaction's end."""
    statements = (f"use {database}", "create table t (id int)", "begin", "insert into t values (1)")
    async with raw_session(sim, *statements) as client:
        yield client


async def begin_closing(sim: TidbSim) -> None:
    sim.request_stop()
    await wait_until(lambda: sim.node.is_ending_idle_sessions)


async def expect_fin(client: RawClient) -> None:
    """Check that the client receives only a FIN, neither RST nor an ERR."""
    async with asyncio.timeout(10):
        assert await client.reader.read() == b""


# During the graceful wait.


async def test_ping_is_rejected_and_session_continues(
    mariadb: MariaDb, signing: SessionCertificate, database: str
) -> None:
    async with (
        waiting_server(mariadb, signing) as sim,
        raw_session(sim) as idle,
        session_in_transaction(sim, database) as busy,
    ):
        assert await idle.send_command(MySqlCommand.PING) == ok(AUTOCOMMIT)
        assert await busy.send_command(MySqlCommand.PING) == ok(AUTOCOMMIT | IN_TRANSACTION)
        sim.request_stop()
        await wait_until(lambda: sim.node.is_reporting_shutdown)
        for client in (idle, busy):
            for _ in range(2):
                assert await client.send_command(MySqlCommand.PING) == SHUTTING_DOWN
                assert await client.rows("select 1") == [("1",)]
        await run_statement(busy, "commit")
        assert await busy.rows("select count(*) from t") == [("1",)]
        # The client pipelines the ping behind a slow query.
        idle.writer.write(frame(0, b"\x03select sleep(0.05)") + frame(0, PING) + frame(0, b"\x03do 0"))
        await idle.read_until_eof(5)
        await idle.read_until_eof(5)
        assert [(await idle.read_packet())[1] for _ in range(2)] == [SHUTTING_DOWN, ok(AUTOCOMMIT)]


async def test_serves_everything_except_ping(
    mariadb: MariaDb, signing: SessionCertificate, database: str
) -> None:
    async with waiting_server(mariadb, signing) as sim, raw_session(sim) as client:
        number = await client.prepare(b"select seq, ? from mysql.seq_1_to_3")
        sim.request_stop()
        await wait_until(lambda: sim.node.is_reporting_shutdown)
        assert (await client.send_command(MySqlCommand.INIT_DB, database.encode()))[0] == 0x00
        assert len(await client.execute(number, b"\0\1\xfd\0\x01x")) == 3
        assert await client.execute(number, b"\0\1\xfd\0\x01x", flags=1) == []
        first = await client.send_command(MySqlCommand.STMT_FETCH, struct.pack("<II", number, 9))
        assert (first[0], len(await client.read_until_eof(5))) == (0x00, 3)
        assert (await client.send_command(MySqlCommand.STMT_RESET, struct.pack("<I", number)))[0] == 0x00
        await client.close_statement(number)
        assert await client.prepare(b"select 1") == number + 1
        assert b"Uptime" in await client.send_command(MySqlCommand.STATISTICS)
        assert (await client.send_command(MySqlCommand.SET_OPTION, b"\0\0"))[0] == 0xFE
        assert (await client.send_command(MySqlCommand.RESET_CONNECTION))[0] == 0x00
        body = b"root\0\0" + database.encode() + b"\0\x2d\0mysql_native_password\0"
        assert await client.send_command(MySqlCommand.CHANGE_USER, body) == ok(AUTOCOMMIT)
        assert await client.rows("select database()") == [(database,)]
        assert await client.send_command(MySqlCommand.PING) == SHUTTING_DOWN
        async with raw_session(sim) as newcomer:
            assert await newcomer.rows("select 2") == [("2",)]
            assert await newcomer.send_command(MySqlCommand.PING) == SHUTTING_DOWN
        client.writer.write(frame(0, bytes((MySqlCommand.QUIT,))))
        await expect_fin(client)


async def test_sessions_migrate_away_and_arrive(
    mariadb: MariaDb, signing: SessionCertificate, database: str
) -> None:
    async with (
        waiting_server(mariadb, signing) as sim,
        TidbSim(SimSettings(session_rules(mariadb), **signing.settings)) as other,
        raw_session(sim, f"use {database}", "set @a = 1") as client,
        session_in_transaction(sim, database) as busy,
    ):
        sim.request_stop()
        await wait_until(lambda: sim.node.is_reporting_shutdown)
        assert error_code(await busy.query("show session_states")) == 8146
        async with migrated_session(client, other) as away, migrated_session(away, sim) as back:
            assert await away.rows("select database(), @a") == [(database, "1")]
            assert await away.send_command(MySqlCommand.PING) == ok(AUTOCOMMIT)
            assert await back.rows("select database(), @a") == [(database, "1")]
            assert await back.send_command(MySqlCommand.PING) == SHUTTING_DOWN


async def test_ping_is_rejected_inside_compression(mariadb: MariaDb, signing: SessionCertificate) -> None:
    async with waiting_server(mariadb, signing) as sim, raw_connection(sim) as client:
        assert await client.login(CAPABILITIES | Capability.COMPRESS) == ok(AUTOCOMMIT)
        sim.request_stop()
        await wait_until(lambda: sim.node.is_reporting_shutdown)
        for request, answer in ((PING, SHUTTING_DOWN), (b"\x03do 0", ok(AUTOCOMMIT))):
            packed = Compression()
            client.writer.write(packed.compress(frame(0, request)))
            while (content := packed.next_content()) is None:
                packed.feed(await client.reader.read(1000))
            assert content == frame(1, answer)


# While closing.


async def test_idle_sessions_get_fin_without_error(mariadb: MariaDb, database: str) -> None:
    sim = TidbSim(SimSettings(session_rules(mariadb)))
    await sim.start()
    async with (
        raw_session(sim) as idle,
        raw_session(sim) as half,
        session_in_transaction(sim, database) as busy,
    ):
        half.writer.write(frame(0, b"\x03select 1")[:-1])
        await begin_closing(sim)
        await assert_nothing_received(idle.reader, 0.2)
        await run_statement(busy, "insert into t values (2)")
        assert await busy.send_command(MySqlCommand.PING) == SHUTTING_DOWN
        assert (await busy.query("commit"))[0] == 0x00
        for client in (busy, idle, half):
            await expect_fin(client)
        async with asyncio.timeout(10):
            await sim.wait()


@pytest.mark.parametrize(
    "request_",
    [
        b"\x03insert into t values (99)",
        b"\x03select @@port",
        b"\x03show session_states",
        PING,
        b"\x16select 1",
        b"\x02mysql",
        bytes((MySqlCommand.STMT_CLOSE,)) + bytes(4),
        b"\x03select '" + b"x" * 1_000_000 + b"'",
        struct.pack("<BIBI", MySqlCommand.STMT_EXECUTE, 1, 0, 1) + bytes(1_000_000),
        struct.pack("<BIH", MySqlCommand.STMT_SEND_LONG_DATA, 1, 0) + bytes(1_000_000),
    ],
)
async def test_next_command_is_dropped(
    mariadb: MariaDb, signing: SessionCertificate, database: str, request_: bytes
) -> None:
    sim = TidbSim(SimSettings(session_rules(mariadb), **signing.settings))
    await sim.start()
    async with session_in_transaction(sim, database) as busy, raw_session(sim, f"use {database}") as client:
        await begin_closing(sim)
        client.writer.write(frame(0, request_))
        await expect_fin(client)
        await run_statement(busy, "commit")
        await expect_fin(busy)
        await sim.wait()
    async with TidbSim(SimSettings(session_rules(mariadb))) as other, raw_session(other) as reader:
        assert await reader.rows(f"select id from {database}.t") == [("1",)]


async def test_running_request_is_answered_and_next_is_dropped(mariadb: MariaDb, database: str) -> None:
    sim = TidbSim(SimSettings(session_rules(mariadb)))
    await sim.start()
    async with raw_session(sim, f"use {database}", "create table t (id int)") as client:
        behind = b"\x03insert into t values (99)"
        client.writer.write(frame(0, b"\x03select sleep(0.3), 'done'") + frame(0, behind) + frame(0, PING))
        await wait_until_read(client.writer)
        await begin_closing(sim)
        await client.read_until_eof(5)
        assert (await client.read_until_eof(5))[0] == b"\x010\x04done"
        await expect_fin(client)
        await sim.wait()
    async with TidbSim(SimSettings(session_rules(mariadb))) as other, raw_session(other) as reader:
        assert await reader.rows(f"select count(*) from {database}.t") == [("0",)]


async def test_tls_session_gets_close_notify_before_fin(mariadb: MariaDb, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    issued.private_key_pem.write_to_path(tmp_path / "key")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    sim = TidbSim(SimSettings(session_rules(mariadb, tls=SqlTlsFiles(tmp_path / "cert", tmp_path / "key"))))
    await sim.start()
    response = login("root", tls=True)
    async with raw_connection(sim) as client:
        await client.read_packet()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trusting.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        client.writer.write(SSL_REQUEST)
        answer = b""
        while not answer:
            try:
                tls.do_handshake()
                if response:
                    tls.write(response)
                    response = b""
                answer = tls.read(1000)
            except ssl.SSLWantReadError:
                client.writer.write(outgoing.read())
                incoming.write(await client.reader.read(65_536))
        assert answer == frame(3, ok(AUTOCOMMIT))
        await sim.stop()
        incoming.write(await client.reader.read())
        incoming.write_eof()
        assert tls.read(1000) == b""  # An end without close_notify would raise.


async def test_client_that_does_not_read_does_not_delay_shutdown(mariadb: MariaDb) -> None:
    sim = TidbSim(SimSettings(session_rules(mariadb), drain_timeout=0.1))
    await sim.start()
    async with raw_session(sim) as client:
        transport = client.writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        client.writer.write(frame(0, b"\x03select repeat('x', 60000000)"))
        await wait_until_read(client.writer)
        async with asyncio.timeout(10):
            await sim.stop()
        transport.abort()
