"""User, database, capabilities and socket options of a session after migrations."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.greeting import ClientLogin, parse_handshake_response
from sandbox.tidb_sim.packets import Capability, MySqlCommand, frame
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.migration.fleet import (
    MigratingFleet,
    NodeSpec,
    mariadb_session,
    run_fleet,
    socket_of_process,
)
from tests.support.migration.sql_client import (
    AnswerClient,
    ErrorAnswer,
    OkAnswer,
    PrepareAnswer,
    RowsAnswer,
    encode_command,
)
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import OK_PAYLOAD, greeting_packet
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient
from tests.support.waiting import wait_until, wait_until_read


@dataclass
class RecordingNode:
    """A node that records logins. Every session can migrate to it: it answers all commands with OK."""

    logins: list[ClientLogin] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle a connection (a handler for tests.support.fake_servers)."""
        node = RawClient(reader, writer)
        writer.write(greeting_packet())
        sequence, response = await node.read_packet()
        self.logins.append(parse_handshake_response(response))
        writer.write(frame(sequence + 1, OK_PAYLOAD))
        while True:
            await node.read_packet()
            writer.write(frame(1, OK_PAYLOAD))


@dataclass
class RecordedFleet:
    """A fleet without TLS, and one more node that records logins."""

    fleet: MigratingFleet
    recorder: RecordingNode

    async def migrate_to_recorder(self) -> ClientLogin:
        """Migrate all sessions to the recording node. Return the last recorded login."""
        self.fleet.drain(*self.fleet.nodes)
        await self.fleet.wait_session_counts(0, 0)
        return self.recorder.logins[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded_fleet(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb
) -> AsyncIterator[RecordedFleet]:
    recorder = RecordingNode()
    async with (
        run_fake_server(recorder.serve) as peer,
        run_fleet(tmp_path_factory.mktemp("seen"), mariadb, others=[peer.endpoint]) as fleet,
    ):
        yield RecordedFleet(fleet, recorder)


@pytest_asyncio.fixture(loop_scope="module")
async def recorded(recorded_fleet: RecordedFleet) -> AsyncIterator[RecordedFleet]:
    """Yield the fleet. The recording node is draining, so new sessions go to the other nodes."""
    recorded_fleet.fleet.drain(*recorded_fleet.fleet.other_endpoints)
    yield recorded_fleet
    await recorded_fleet.fleet.close_sessions()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def accounts(mariadb: MariaDb) -> AsyncIterator[dict[str, str]]:
    """Create accounts. Yield their passwords by user name."""
    passwords = {"passwordless": "", "with_password": "Geheim & 'süß'"}
    async with mariadb_session(mariadb) as admin:
        for name, password in passwords.items():
            await run(
                admin, f"create user {name}@'%' identified by '{password.replace(chr(39), chr(39) * 2)}'"
            )
        yield passwords
        for name in passwords:
            await run(admin, f"drop user {name}@'%'")


in_module = pytest.mark.asyncio(loop_scope="module")
"""Marks tests that share one fleet, because Envoy starts slowly."""


async def run(client: AnswerClient, statement: str) -> None:
    (part,) = await client.query(statement)
    assert not isinstance(part, ErrorAnswer), part


@in_module
@pytest.mark.parametrize("attributes", [None, {}, {"program": "süß", "long": "x" * 300, "": ""}], ids=str)
async def test_migration_login_repeats_the_clients_login(
    recorded: RecordedFleet, database: str, attributes: dict[str, str] | None
) -> None:
    flags = CAPABILITIES | Capability.FOUND_ROWS | Capability.INTERACTIVE | Capability.DEPRECATE_EOF
    client = await recorded.fleet.connect_answer_client(
        flags, attributes=attributes, database=database, collation=192
    )
    await recorded.fleet.migrate_all()
    login = await recorded.migrate_to_recorder()
    assert login.attributes == (attributes or {})
    assert (login.user, login.database, login.collation) == ("root", database, 192)
    expected = flags | (Capability(0) if attributes is None else Capability.CONNECT_ATTRS)
    added = Capability.LENENC_AUTH | Capability.CONNECT_WITH_DB
    assert login.capabilities & ~added == expected
    assert login.plugin == "tidb_session_token"
    assert await client.send_command(MySqlCommand.PING)


@in_module
async def test_migration_login_uses_the_sessions_current_user(
    recorded: RecordedFleet, database: str, accounts: dict[str, str]
) -> None:
    client = await recorded.fleet.connect_answer_client(attributes={"former": "1"})
    await client.change_user("passwordless", database="mysql")
    assert await client.send_command(MySqlCommand.INIT_DB, database.encode()) == (OkAnswer(2),)
    await recorded.fleet.migrate_all()
    login = await recorded.migrate_to_recorder()
    assert (login.user, login.database, login.attributes) == ("passwordless", database, {"changed": "yes"})


@in_module
async def test_database_of_the_login_survives_migrations(nodes: MigratingFleet, database: str) -> None:
    client = await nodes.connect_answer_client(database=database)
    for _ in range(2):
        await nodes.migrate_all()
        assert await client.query_row("select database()") == (database.encode(),)
    assert await client.send_command(MySqlCommand.INIT_DB, b"mysql") == (OkAnswer(2),)
    for _ in range(2):
        await nodes.migrate_all()
        assert await client.query_row("select database()") == (b"mysql",)


@in_module
async def test_dropped_database_stays_unset_after_migrations(
    nodes: MigratingFleet, mariadb: MariaDb, database: str
) -> None:
    client = await nodes.connect_answer_client(database=database)
    await run(client, f"drop database {database}")
    assert await client.query_row("select database()") == (None,)
    for _ in range(2):
        await nodes.migrate_all()
        assert await client.query_row("select database()") == (None,)


async def change_user_and_migrate(
    nodes: MigratingFleet, accounts: dict[str, str], user: str, plugin: str
) -> None:
    """Change to `user`, to root and to `user` again, and migrate the session after each change."""
    client = await nodes.connect_answer_client()
    await run(client, "set @a = 1")
    await nodes.migrate_all()
    for name, password in ((user, accounts[user]), ("root", ""), (user, accounts[user])):
        await client.change_user(name, password, "mysql", plugin=plugin)
        for _ in range(2):
            identity = await client.query_row("select user(), current_user(), @a, database()")
            account = "root@localhost" if name == "root" else f"{name}@%"
            assert identity == (f"{name}@127.0.0.1".encode(), account.encode(), None, b"mysql")
            await run(client, "set @b = 1")
            await nodes.migrate_all()
            assert await client.query_row("select @b, user()") == (b"1", identity[0])
        await run(client, "set @a = 1")


@in_module
@pytest.mark.parametrize("plugin", ["mysql_native_password", "other_plugin"])
@pytest.mark.parametrize("user", ["passwordless", "with_password"])
async def test_changed_user_survives_migrations(
    nodes: MigratingFleet, accounts: dict[str, str], user: str, plugin: str
) -> None:
    await change_user_and_migrate(nodes, accounts, user, plugin)


@in_module
async def test_changed_user_survives_migrations_with_tls(
    tmp_path: Path, mariadb: MariaDb, accounts: dict[str, str]
) -> None:
    tls = PemFiles.create(tmp_path / "certificates")
    async with run_fleet(tmp_path, mariadb, tls=tls) as nodes:
        await change_user_and_migrate(nodes, accounts, "with_password", "mysql_native_password")


@in_module
async def test_reset_connection_stays_reset_after_migrations(nodes: MigratingFleet, database: str) -> None:
    client = await nodes.connect_answer_client(database=database)
    for _ in range(2):
        for statement in ("set @a = 1", "prepare s from 'select 1'", "set sql_mode = 'ANSI_QUOTES'"):
            await run(client, statement)
        assert isinstance(
            (await client.send_command(MySqlCommand.STMT_PREPARE, b"select 1"))[0], PrepareAnswer
        )
        await nodes.migrate_all()
        assert await client.send_command(MySqlCommand.RESET_CONNECTION) == (OkAnswer(2),)
        await nodes.migrate_all()
        assert await client.query_row("select @a, database(), @@sql_mode = @@global.sql_mode") == (
            *(None, database.encode(), b"1"),
        )
        (missing,) = await client.query("execute s")
        assert isinstance(missing, ErrorAnswer)
        assert isinstance(
            (await client.send_command(MySqlCommand.STMT_PREPARE, b"select 1"))[0], PrepareAnswer
        )
        assert client.statement_id == 1


@in_module
async def test_multi_statements_option_survives_migrations(nodes: MigratingFleet) -> None:
    multi = b"select 1; set @a = 1; select 2"
    client = await nodes.connect_answer_client(CAPABILITIES & ~Capability.MULTI_STATEMENTS)
    for allowed in (None, True, True, False, False, True):
        if allowed is not None:
            await client.send_command(MySqlCommand.SET_OPTION, (not allowed).to_bytes(2, "little"))
        for _ in range(2):
            await nodes.migrate_all()
            kinds = [type(part) for part in await client.query(multi)]
            assert kinds == ([RowsAnswer, OkAnswer, RowsAnswer] if allowed else [ErrorAnswer])


@in_module
async def test_unknown_option_changes_nothing(nodes: MigratingFleet) -> None:
    client = await nodes.connect_answer_client()
    (error,) = await client.send_command(MySqlCommand.SET_OPTION, b"\x07\0")
    assert isinstance(error, ErrorAnswer)
    await nodes.migrate_all()
    assert len(await client.query("select 1; select 2")) == 2


async def connect_with_pending_migration(nodes: MigratingFleet, **options: Any) -> AnswerClient:
    """Return a session in a transaction on a draining node.

    The module has begun its migration: it connects to the target, and waits for the transaction's end.
    """
    nodes.drain(nodes.nodes[1])
    client, other = await nodes.connect_answer_client(**options), await nodes.connect_answer_client()
    await nodes.wait_session_counts(2, 0)
    await run(client, "begin")
    await run(client, "select * from mysql.seq_1_to_2")
    nodes.drain(nodes.nodes[0])
    # The module starts both migrations together: when `other` has migrated, that of `client` has begun.
    await nodes.wait_session_counts(1, 1)
    assert await other.send_command(MySqlCommand.PING)
    return client


@in_module
@pytest.mark.parametrize("user", ["passwordless", "root"])
async def test_user_changes_while_a_migration_is_pending(
    nodes: MigratingFleet, accounts: dict[str, str], user: str
) -> None:
    client = await connect_with_pending_migration(nodes)
    await client.change_user(user, accounts.get(user, ""))
    await nodes.wait_session_counts(0, 2)
    assert await client.query_row("select user()") == (f"{user}@127.0.0.1".encode(),)


@in_module
@pytest.mark.parametrize("allowed", [True, False])
async def test_option_changes_while_a_migration_is_pending(nodes: MigratingFleet, allowed: bool) -> None:
    before = CAPABILITIES & ~Capability.MULTI_STATEMENTS if allowed else CAPABILITIES
    client = await connect_with_pending_migration(nodes, capabilities=before)
    await client.send_command(MySqlCommand.SET_OPTION, (not allowed).to_bytes(2, "little"))
    await run(client, "commit")
    await nodes.wait_session_counts(0, 2)
    assert len(await client.query("select 1; select 2")) == (2 if allowed else 1)


@in_module
@pytest.mark.parametrize("migrates", [False, True], ids=["", "migrates between them"])
@pytest.mark.parametrize("cut", [1, 4, 5])
async def test_option_that_arrives_in_two_parts(nodes: MigratingFleet, cut: int, migrates: bool) -> None:
    client = await nodes.connect_answer_client()
    await nodes.migrate_all()
    packet = encode_command(MySqlCommand.SET_OPTION, b"\1\0")
    client.writer.write(packet[:cut])
    await wait_until_read(client.writer)
    if migrates:
        await nodes.migrate_all()
    client.writer.write(packet[cut:])
    assert await client.read_answer(MySqlCommand.SET_OPTION) == (OkAnswer(2),)
    await nodes.migrate_all()
    assert len(await client.query("select 1; select 2")) == 1


@in_module
@pytest.mark.parametrize("cut", [1, 4, 5, 30])
async def test_user_change_that_arrives_in_two_parts(
    nodes: MigratingFleet, accounts: dict[str, str], cut: int
) -> None:
    client = await nodes.connect_answer_client()
    await nodes.migrate_all()
    await client.change_user("passwordless", database="mysql", first_piece_bytes=cut)
    await nodes.migrate_all()
    assert await client.query_row("select user(), database()") == (b"passwordless@127.0.0.1", b"mysql")


@in_module
async def test_option_between_pipelined_commands_stays_in_effect(nodes: MigratingFleet) -> None:
    """After pipelined commands, the module may be unsure of the session's options. Then the session stays."""
    nodes.drain(nodes.nodes[1])
    client, other = await nodes.connect_answer_client(), await nodes.connect_answer_client()
    await nodes.wait_session_counts(2, 0)
    commands = [
        (MySqlCommand.PING, b""),
        (MySqlCommand.SET_OPTION, b"\1\0"),
        (MySqlCommand.QUERY, b"select 1"),
    ]
    client.writer.write(b"".join(encode_command(*command) for command in commands))
    for command, _ in commands:
        assert not isinstance((await client.read_answer(command))[0], ErrorAnswer)
    nodes.drain(nodes.nodes[0])
    await wait_until(lambda: nodes.sessions[1] > 0)
    await other.quit()
    for _ in range(3):
        assert len(await client.query("select 1; select 2")) == 1


CLIENT = "127.0.0.5"
PROXIED = ModuleConfig(node={"proxy_protocol": "v2"})


@pytest.mark.parametrize("hosts", [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::1"), ("::1", "::1")], ids=str)
async def test_every_node_receives_the_clients_address(
    tmp_path: Path, mariadb: MariaDb, hosts: tuple[str, str]
) -> None:
    specs = [NodeSpec(host=host, requires_proxy_header=True) for host in hosts]
    async with run_fleet(tmp_path, mariadb, config=PROXIED, specs=specs, drained=[1]) as nodes:
        client = await nodes.connect_answer_client(source=CLIENT)
        for _ in range(3):
            assert await client.query_row("select user()") == (f"root@{CLIENT}".encode(),)
            await nodes.migrate_all()


async def test_session_migrates_between_ipv4_and_ipv6_nodes(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, specs=(NodeSpec(), NodeSpec(host="::1")), drained=[1]) as nodes:
        client = await nodes.connect_answer_client()
        await run(client, "set @a = 7")
        for host in ("127.0.0.1", "::1", "127.0.0.1"):
            assert await client.query_row("select @a, user()") == (b"7", f"root@{host}".encode())
            await nodes.migrate_all()


KEEPALIVE = {"keepalive_probes": 5, "keepalive_time": 61, "keepalive_interval": 4}
USER_TIMEOUT = 15_000  # milliseconds
BUFFER_BYTES, TYPE_OF_SERVICE, PRIORITY = 90_000, 0x48, 3
TCP_INQ = 36
OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 61,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 4,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): USER_TIMEOUT,
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
    (socket.SOL_SOCKET, socket.SO_SNDBUF): 2 * BUFFER_BYTES,  # Linux doubles the size
    (socket.SOL_SOCKET, socket.SO_RCVBUF): 2 * BUFFER_BYTES,
    (socket.SOL_SOCKET, socket.SO_PRIORITY): PRIORITY,
    (socket.IPPROTO_IP, socket.IP_TOS): TYPE_OF_SERVICE,
    (socket.IPPROTO_TCP, TCP_INQ): 1,  # set by the module
}


def with_socket_options(bootstrap: dict[str, Any]) -> None:
    (cluster,) = bootstrap["static_resources"]["clusters"]
    options: list[dict[str, Any]] = [
        {"level": socket.IPPROTO_TCP, "name": socket.TCP_USER_TIMEOUT, "int_value": USER_TIMEOUT},
        {"level": socket.SOL_SOCKET, "name": socket.SO_SNDBUF, "int_value": BUFFER_BYTES},
        {"level": socket.SOL_SOCKET, "name": socket.SO_RCVBUF, "int_value": BUFFER_BYTES},
        {"level": socket.IPPROTO_IP, "name": socket.IP_TOS, "int_value": TYPE_OF_SERVICE},
        {"level": socket.SOL_SOCKET, "name": socket.SO_PRIORITY, "int_value": PRIORITY},
        {
            "level": socket.IPPROTO_TCP,
            "name": socket.TCP_CONGESTION,
            "buf_value": base64.b64encode(b"reno").decode(),
        },
    ]
    cluster["upstream_connection_options"] = {"tcp_keepalive": KEEPALIVE}
    cluster["upstream_bind_config"] = {
        "socket_options": [{**option, "state": "STATE_PREBIND"} for option in options]
    }


async def test_socket_options_survive_migrations(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, change_bootstrap=with_socket_options, drained=[1]) as nodes:
        client = await nodes.connect_answer_client()
        for node in (nodes.nodes[0], nodes.nodes[1], nodes.nodes[0]):
            assert await client.send_command(MySqlCommand.PING) == (OkAnswer(2),)
            with socket_of_process(nodes.proxy.pid, node.node.sql_port) as connection:
                assert {option: connection.getsockopt(*option) for option in OPTIONS} == OPTIONS
                algorithm = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert algorithm.rstrip(b"\0") == b"reno"
                assert os.get_blocking(connection.fileno()) is False
            await nodes.migrate_all()
