"""A simulated server supports TiDB's authentication plugins, tested by single packets and by drivers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import pymysql
import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import Capability, MySqlCommand, frame, ok
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.tidb_sim_clients import (
    CAPABILITIES,
    RawClient,
    connect_driver,
    error_code,
    raw_connection,
    session_rules,
)

SCRAMBLE = b"s" * 32

ACCOUNTS = {
    "p_native": "identified by 'geheim'",
    "p_empty": "identified by ''",
    "p_sha2": "identified with 'caching_sha2_password' by 'geheim'",
    "p_sha2_empty": "identified with 'caching_sha2_password'",
    "p_token": "identified with 'tidb_auth_token' by 'geheim'",
}


@pytest.fixture
async def sim(mariadb: MariaDb) -> AsyncIterator[TidbSim]:
    """Yield a server with an account for each plugin. At the end, check that it saw no protocol violation."""
    async with TidbSim(SimSettings(session_rules(mariadb))) as server:
        admin = await connect_driver(server)
        async with admin.cursor() as cursor:
            for name, identified in ACCOUNTS.items():
                await cursor.execute(f"create user {name}@'%' {identified}")
            yield server
            for name in ACCOUNTS:
                await cursor.execute(f"drop user {name}@'%'")
        await admin.ensure_closed()
        assert server.node.violations == []


async def log_in(client: RawClient, user: str, plugin: str, auth: bytes = b"") -> tuple[bytes, bytes]:
    """Send a login. Return the greeting's salt and the payload of the server's answer."""
    greeting = (await client.read_packet())[1]
    at = greeting.index(b"\0", 1) + 5
    salt = greeting[at : at + 8] + greeting[at + 27 : at + 39]
    head = struct.pack("<IIB23x", CAPABILITIES, 1 << 24, 45)
    body = user.encode() + b"\0" + bytes((len(auth),)) + auth + plugin.encode() + b"\0"
    client.writer.write(frame(1, head + body))
    return salt, (await client.read_packet())[1]


async def read_answer(client: RawClient, sequence: int, payload: bytes) -> bytes:
    client.writer.write(frame(sequence, payload))
    got, reply = await client.read_packet()
    assert got == sequence + 1
    return reply


@pytest.mark.parametrize("offered", ["auth_unknown_plugin", "mysql_native_password", "same"])
@pytest.mark.parametrize(
    ("user", "requested_plugin", "in_clear"),
    [
        ("p_sha2", "caching_sha2_password", True),
        ("p_token", "mysql_clear_password", False),
    ],
)
async def test_account_determines_plugin(
    sim: TidbSim, offered: str, user: str, requested_plugin: str, in_clear: bool
) -> None:
    """Even if the login uses the account's plugin, the server requests it: the greeting names another one."""
    for password, expected in ((b"geheim\0", None), (b"falsch\0", 1045)):
        async with raw_connection(sim) as client:
            plugin = requested_plugin if offered == "same" else offered
            salt, question = await log_in(client, user, plugin, SCRAMBLE)
            assert question == b"\xfe" + requested_plugin.encode() + b"\0" + salt + b"\0"
            sequence = 3
            if in_clear:
                assert await read_answer(client, sequence, SCRAMBLE) == b"\x01\x04"
                sequence += 2
            reply = await read_answer(client, sequence, password)
            assert (reply == ok(2)) if expected is None else (error_code(reply) == expected)


async def test_has_no_rsa_key(sim: TidbSim) -> None:
    async with raw_connection(sim) as client:
        await log_in(client, "p_sha2", "auth_unknown_plugin")
        assert await read_answer(client, 3, SCRAMBLE) == b"\x01\x04"
        denied = await read_answer(client, 5, b"\x02")  # a request for an RSA key counts as a password
        assert denied.startswith(b"\xff\x15\x04#28000Access denied for user 'p_sha2'@'127.0.0.1'")
        assert denied.endswith(b"(using password: YES)")


@pytest.mark.parametrize("user", ["p_empty", "p_sha2_empty"])
async def test_requests_empty_password_too(sim: TidbSim, user: str) -> None:
    async with raw_connection(sim) as client:
        _, question = await log_in(client, user, "auth_unknown_plugin")
        assert question[:1] == b"\xfe"
        assert await read_answer(client, 3, b"") == ok(2)
    async with raw_connection(sim) as client:
        # An empty reply does not replace the wrong password in the login.
        await log_in(client, user, "auth_unknown_plugin", b"x" * 20)
        client.writer.write(frame(3, b""))
        reply = (await client.read_packet())[1]
        if user == "p_sha2_empty":
            assert reply == b"\x01\x04"
            reply = await read_answer(client, 5, b"x\0")
        assert error_code(reply) == 1045


async def test_denies_unknown_user_without_request(sim: TidbSim) -> None:
    async with raw_connection(sim) as client:
        denied = (await log_in(client, "nobody_knows", "auth_unknown_plugin", SCRAMBLE))[1]
        assert denied[:9] == b"\xff\x15\x04#28000"
        assert await client.reader.read() == b""


async def test_client_without_plugins_can_only_use_native(sim: TidbSim) -> None:
    head = struct.pack("<IIB23x", CAPABILITIES & ~Capability.PLUGIN_AUTH, 1 << 24, 45)
    for user, expected in ((b"p_empty", ok(2)), (b"p_sha2", None)):
        async with raw_connection(sim) as client:
            await client.read_packet()
            client.writer.write(frame(1, head + user + b"\0\0"))
            reply = (await client.read_packet())[1]
            if expected is None:
                assert reply[:9] == b"\xff\xe3\x04#08004"
            else:
                assert reply == expected


async def test_wrong_sequence_of_reply_is_violation(mariadb: MariaDb, sim: TidbSim) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as strict, raw_connection(strict) as client:
        await log_in(client, "p_sha2", "auth_unknown_plugin")
        client.writer.write(frame(4, SCRAMBLE))
        assert await client.read_packet() == (5, b"\xff\x74\x1f#HY000invalid sequence 4 != 3")
        assert len(strict.node.violations) == 1


async def test_change_user_never_requests_clear_password(sim: TidbSim) -> None:
    def request(user: bytes) -> bytes:
        return user + b"\0\0\0\x2d\0auth_unknown_plugin\0"

    async with raw_connection(sim) as client:
        assert await client.login() == ok(2)
        for user, reply in ((b"p_token", b"geheim\0"), (b"p_sha2_empty", b"")):
            assert (await client.send_command(MySqlCommand.CHANGE_USER, request(user)))[:1] == b"\xfe"
            assert await read_answer(client, 2, reply) == ok(2)
            assert await client.send_command(MySqlCommand.QUERY, b"select user()") == b"\x01"
            assert user in (await client.read_until_eof(5), await client.read_until_eof(5))[1][0]
        assert (await client.send_command(MySqlCommand.CHANGE_USER, request(b"p_sha2")))[:1] == b"\xfe"
        assert error_code(await read_answer(client, 2, SCRAMBLE)) == 1045


@pytest.mark.parametrize("user", ["p_native", "p_sha2"])
async def test_drivers_log_in(sim: TidbSim, user: str) -> None:
    """PyMySQL cannot use caching_sha2_password without TLS, because it needs an RSA key, which TiDB lacks."""

    def try_it(password: str) -> Any:
        host, port = sim.sql_address.split(":")
        with pymysql.connect(
            host=host, port=int(port), user=user, password=password, ssl_disabled=True
        ) as connection:
            cursor = connection.cursor()
            cursor.execute("select current_user()")
            return cursor.fetchone()

    if user == "p_native":
        assert await asyncio.to_thread(try_it, "geheim") == ("p_native@%",)
    with pytest.raises(pymysql.err.OperationalError) as denied:
        await asyncio.to_thread(try_it, "falsch" if user == "p_native" else "geheim")
    assert denied.value.args[0] == 1045


async def test_long_data_for_unknown_statement_gets_error(sim: TidbSim) -> None:
    text = b"Unknown prepared statement handler 99 given to stmt_send_longdata"
    error = b"\xff\x51\x04#HY000ERROR 1243 (HY000): " + text
    async with raw_connection(sim) as client:
        await client.login()
        for size in (10, 100_000, 17 << 20):
            body = bytes((MySqlCommand.STMT_SEND_LONG_DATA,)) + struct.pack("<IH", 99, 0) + bytes(size)
            at = min(len(body), 0xFFFFFF)
            client.writer.write(len(body[:at]).to_bytes(3, "little") + b"\0" + body[:at])
            if at == 0xFFFFFF:
                client.writer.write(frame(1, body[at:]))
            assert await client.read_packet() == (1, error)
            assert (await client.send_command(MySqlCommand.PING))[0] == 0


async def test_builtin_statements_can_be_prepared(sim: TidbSim) -> None:
    async with raw_connection(sim) as client:
        await client.login(CAPABILITIES | Capability.DEPRECATE_EOF)
        prepared = await client.send_command(MySqlCommand.STMT_PREPARE, b"SELECT @@port")
        await client.read_packet()
        execute = prepared[1:5] + struct.pack("<BI", 0, 1)
        assert await client.send_command(MySqlCommand.STMT_EXECUTE, execute) == b"\x01"
        rows = await client.read_until_eof(9)
        assert int.from_bytes(rows[1][2:], "little") == sim.node.sql_port
