"""Who a session is and what its client may do, after moves."""

from __future__ import annotations

import asyncio
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
class Taker:
    """A node that takes all sessions, whatever they bring, and keeps how they have logged in."""

    logins: list[ClientLogin] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A handler (tests.support.fake_servers)."""
        node = RawClient(reader, writer)
        writer.write(greeting_packet())
        sequence, response = await node.read_packet()
        self.logins.append(parse_handshake_response(response))
        writer.write(frame(sequence + 1, OK_PAYLOAD))
        while True:
            _, request = await node.read_packet()
            if request.startswith(b"\x03SET SESSION_STATES"):
                self.states.append(request)
            writer.write(frame(1, OK_PAYLOAD))


@dataclass
class Seen:
    """Nodes, and one more that sees how sessions log in. Everything is plain."""

    nodes: MigratingFleet
    taker: Taker

    async def login(self) -> ClientLogin:
        """All sessions go to it; the login of the last one."""
        self.nodes.drain(*self.nodes.nodes)
        await self.nodes.wait_session_counts(0, 0)
        return self.taker.logins[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb) -> AsyncIterator[Seen]:
    taker = Taker()
    async with (
        run_fake_server(taker.serve) as peer,
        run_fleet(tmp_path_factory.mktemp("seen"), mariadb, others=[peer.endpoint]) as all_,
    ):
        yield Seen(all_, taker)


@pytest_asyncio.fixture(loop_scope="module")
async def seen(watched: Seen) -> AsyncIterator[Seen]:
    """Sessions begin at its nodes, and not at the one that takes all."""
    watched.nodes.drain(*watched.nodes.other_endpoints)
    yield watched
    await watched.nodes.close_sessions()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def accounts(mariadb: MariaDb) -> AsyncIterator[dict[str, str]]:
    """Passwords by names."""
    made = {"moves_open": "", "moves_locked": "Geheim & 'süß'"}
    async with mariadb_session(mariadb) as admin:
        for name, password in made.items():
            await run(
                admin, f"create user {name}@'%' identified by '{password.replace(chr(39), chr(39) * 2)}'"
            )
        yield made
        for name in made:
            await run(admin, f"drop user {name}@'%'")


asynchronous = pytest.mark.asyncio(loop_scope="module")


async def run(wire: AnswerClient, statement: str) -> None:
    (part,) = await wire.query(statement)
    assert not isinstance(part, ErrorAnswer), part


@asynchronous
@pytest.mark.parametrize("named", [None, {}, {"program": "süß", "long": "x" * 300, "": ""}], ids=str)
async def test_the_login_says_what_the_client_has_said(
    seen: Seen, database: str, named: dict[str, str] | None
) -> None:
    flags = CAPABILITIES | Capability.FOUND_ROWS | Capability.INTERACTIVE | Capability.DEPRECATE_EOF
    wire = await seen.nodes.connect_answer_client(flags, attributes=named, database=database, collation=192)
    await seen.nodes.migrate_all()
    login = await seen.login()
    assert login.attributes == (named or {})
    assert (login.user, login.database, login.collation) == ("root", database, 192)
    kept = flags | (Capability(0) if named is None else Capability.CONNECT_ATTRS)
    needed = Capability.LENENC_AUTH | Capability.CONNECT_WITH_DB
    assert login.capabilities & ~needed == kept
    assert login.plugin == "tidb_session_token"
    assert await wire.send_command(MySqlCommand.PING)


@asynchronous
async def test_the_login_says_who_the_session_has_become(
    seen: Seen, database: str, accounts: dict[str, str]
) -> None:
    wire = await seen.nodes.connect_answer_client(attributes={"former": "1"})
    await wire.change_user("moves_open", database="mysql")
    assert await wire.send_command(MySqlCommand.INIT_DB, database.encode()) == (OkAnswer(2),)
    await seen.nodes.migrate_all()
    login = await seen.login()
    assert (login.user, login.database, login.attributes) == ("moves_open", database, {"changed": "yes"})


@asynchronous
async def test_the_database_of_the_login_is_kept(nodes: MigratingFleet, database: str) -> None:
    wire = await nodes.connect_answer_client(database=database)
    for _ in range(2):
        await nodes.migrate_all()
        assert await wire.query_row("select database()") == (database.encode(),)
    assert await wire.send_command(MySqlCommand.INIT_DB, b"mysql") == (OkAnswer(2),)
    for _ in range(2):
        await nodes.migrate_all()
        assert await wire.query_row("select database()") == (b"mysql",)


@asynchronous
async def test_a_database_that_is_dropped_is_no_database(
    nodes: MigratingFleet, mariadb: MariaDb, database: str
) -> None:
    wire = await nodes.connect_answer_client(database=database)
    await run(wire, f"drop database {database}")
    assert await wire.query_row("select database()") == (None,)
    for _ in range(2):
        await nodes.migrate_all()
        assert await wire.query_row("select database()") == (None,)


async def changes_user(nodes: MigratingFleet, accounts: dict[str, str], user: str, plugin: str) -> None:
    """To that user and back, with moves in between."""
    wire = await nodes.connect_answer_client()
    await run(wire, "set @a = 1")
    await nodes.migrate_all()
    for name, password in ((user, accounts[user]), ("root", ""), (user, accounts[user])):
        await wire.change_user(name, password, "mysql", plugin=plugin)
        for _ in range(2):
            who = await wire.query_row("select user(), current_user(), @a, database()")
            account = "root@localhost" if name == "root" else f"{name}@%"
            assert who == (f"{name}@127.0.0.1".encode(), account.encode(), None, b"mysql")
            await run(wire, "set @b = 1")
            await nodes.migrate_all()
            assert await wire.query_row("select @b, user()") == (b"1", who[0])
        await run(wire, "set @a = 1")


@asynchronous
@pytest.mark.parametrize("plugin", ["mysql_native_password", "other_plugin"])
@pytest.mark.parametrize("user", ["moves_open", "moves_locked"])
async def test_a_change_of_user_is_kept(
    nodes: MigratingFleet, accounts: dict[str, str], user: str, plugin: str
) -> None:
    await changes_user(nodes, accounts, user, plugin)


@asynchronous
async def test_a_change_of_user_is_kept_with_tls(
    tmp_path: Path, mariadb: MariaDb, accounts: dict[str, str]
) -> None:
    tls = PemFiles.create(tmp_path / "certificates")
    async with run_fleet(tmp_path, mariadb, tls=tls) as nodes:
        await changes_user(nodes, accounts, "moves_locked", "mysql_native_password")


@asynchronous
async def test_a_connection_that_is_reset_stays_so(nodes: MigratingFleet, database: str) -> None:
    wire = await nodes.connect_answer_client(database=database)
    for _ in range(2):
        for statement in ("set @a = 1", "prepare s from 'select 1'", "set sql_mode = 'ANSI_QUOTES'"):
            await run(wire, statement)
        assert isinstance((await wire.send_command(MySqlCommand.STMT_PREPARE, b"select 1"))[0], PrepareAnswer)
        await nodes.migrate_all()
        assert await wire.send_command(MySqlCommand.RESET_CONNECTION) == (OkAnswer(2),)
        await nodes.migrate_all()
        assert await wire.query_row("select @a, database(), @@sql_mode = @@global.sql_mode") == (
            *(None, database.encode(), b"1"),
        )
        (gone,) = await wire.query("execute s")
        assert isinstance(gone, ErrorAnswer)
        assert isinstance((await wire.send_command(MySqlCommand.STMT_PREPARE, b"select 1"))[0], PrepareAnswer)
        assert wire.statement_id == 1


@asynchronous
async def test_several_statements_in_one_text_stay_allowed_or_not(nodes: MigratingFleet) -> None:
    multi = b"select 1; set @a = 1; select 2"
    wire = await nodes.connect_answer_client(CAPABILITIES & ~Capability.MULTI_STATEMENTS)
    for allowed in (None, True, True, False, False, True):
        if allowed is not None:
            await wire.send_command(MySqlCommand.SET_OPTION, (not allowed).to_bytes(2, "little"))
        for _ in range(2):
            await nodes.migrate_all()
            kinds = [type(part) for part in await wire.query(multi)]
            assert kinds == ([RowsAnswer, OkAnswer, RowsAnswer] if allowed else [ErrorAnswer])


@asynchronous
async def test_an_option_that_does_not_exist_changes_nothing(nodes: MigratingFleet) -> None:
    wire = await nodes.connect_answer_client()
    (refused,) = await wire.send_command(MySqlCommand.SET_OPTION, b"\x07\0")
    assert isinstance(refused, ErrorAnswer)
    await nodes.migrate_all()
    assert len(await wire.query("select 1; select 2")) == 2


async def waiting(nodes: MigratingFleet, **options: Any) -> AnswerClient:
    """A session in a transaction that is to leave its node: its target waits for it."""
    nodes.drain(nodes.nodes[1])
    wire, other = await nodes.connect_answer_client(**options), await nodes.connect_answer_client()
    await nodes.wait_session_counts(2, 0)
    await run(wire, "begin")
    await run(wire, "select * from mysql.seq_1_to_2")
    nodes.drain(nodes.nodes[0])
    # When the other one has moved, it has been looked at as well.
    await nodes.wait_session_counts(1, 1)
    assert await other.send_command(MySqlCommand.PING)
    return wire


@asynchronous
@pytest.mark.parametrize("user", ["moves_open", "root"])
async def test_a_change_of_user_while_the_target_waits(
    nodes: MigratingFleet, accounts: dict[str, str], user: str
) -> None:
    wire = await waiting(nodes)
    await wire.change_user(user, accounts.get(user, ""))
    await nodes.wait_session_counts(0, 2)
    assert await wire.query_row("select user()") == (f"{user}@127.0.0.1".encode(),)


@asynchronous
@pytest.mark.parametrize("allowed", [True, False])
async def test_an_option_that_is_set_while_the_target_waits(nodes: MigratingFleet, allowed: bool) -> None:
    before = CAPABILITIES & ~Capability.MULTI_STATEMENTS if allowed else CAPABILITIES
    wire = await waiting(nodes, capabilities=before)
    await wire.send_command(MySqlCommand.SET_OPTION, (not allowed).to_bytes(2, "little"))
    await run(wire, "commit")
    await nodes.wait_session_counts(0, 2)
    assert len(await wire.query("select 1; select 2")) == (2 if allowed else 1)


@asynchronous
@pytest.mark.parametrize("cut", [1, 4, 5])
async def test_an_option_that_comes_in_two_parts(nodes: MigratingFleet, cut: int) -> None:
    wire = await nodes.connect_answer_client()
    await nodes.migrate_all()
    packet = encode_command(MySqlCommand.SET_OPTION, b"\1\0")
    wire.writer.write(packet[:cut])
    await wait_until_read(wire.writer)
    wire.writer.write(packet[cut:])
    assert await wire.read_answer(MySqlCommand.SET_OPTION) == (OkAnswer(2),)
    await nodes.migrate_all()
    assert len(await wire.query("select 1; select 2")) == 1


@asynchronous
@pytest.mark.parametrize("cut", [1, 4, 5, 30])
async def test_a_change_of_user_that_comes_in_two_parts(
    nodes: MigratingFleet, accounts: dict[str, str], cut: int
) -> None:
    wire = await nodes.connect_answer_client()
    await nodes.migrate_all()
    await wire.change_user("moves_open", database="mysql", first_piece_bytes=cut)
    await nodes.migrate_all()
    assert await wire.query_row("select user(), database()") == (b"moves_open@127.0.0.1", b"mysql")


@asynchronous
async def test_an_option_among_other_commands(nodes: MigratingFleet) -> None:
    """The session may stay where it is."""
    nodes.drain(nodes.nodes[1])
    wire, other = await nodes.connect_answer_client(), await nodes.connect_answer_client()
    await nodes.wait_session_counts(2, 0)
    commands = [
        (MySqlCommand.PING, b""),
        (MySqlCommand.SET_OPTION, b"\1\0"),
        (MySqlCommand.QUERY, b"select 1"),
    ]
    wire.writer.write(b"".join(encode_command(*command) for command in commands))
    for command, _ in commands:
        assert not isinstance((await wire.read_answer(command))[0], ErrorAnswer)
    nodes.drain(nodes.nodes[0])
    await wait_until(lambda: nodes.sessions[1] > 0)
    await other.quit()
    for _ in range(3):
        assert len(await wire.query("select 1; select 2")) == 1


CLIENT = "127.0.0.5"
PROXIED = ModuleConfig(node={"proxy_protocol": "v2"})


@pytest.mark.parametrize("hosts", [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::1"), ("::1", "::1")], ids=str)
async def test_each_node_is_told_the_address_of_the_client(
    tmp_path: Path, mariadb: MariaDb, hosts: tuple[str, str]
) -> None:
    made = [NodeSpec(host=host, requires_proxy_header=True) for host in hosts]
    async with run_fleet(tmp_path, mariadb, parts=PROXIED, specs=made, drained=[1]) as nodes:
        wire = await nodes.connect_answer_client(source=CLIENT)
        for _ in range(3):
            assert await wire.query_row("select user()") == (f"root@{CLIENT}".encode(),)
            await nodes.migrate_all()


async def test_sessions_move_between_nodes_of_both_families(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, specs=(NodeSpec(), NodeSpec(host="::1")), drained=[1]) as nodes:
        wire = await nodes.connect_answer_client()
        await run(wire, "set @a = 7")
        for host in ("127.0.0.1", "::1", "127.0.0.1"):
            assert await wire.query_row("select @a, user()") == (b"7", f"root@{host}".encode())
            await nodes.migrate_all()


KEEPALIVE = {"keepalive_probes": 5, "keepalive_time": 61, "keepalive_interval": 4}
USER_TIMEOUT = 15_000  # milliseconds
OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 61,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 4,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): USER_TIMEOUT,
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
}


def with_socket_options(tree: dict[str, Any]) -> None:
    """Of connections to nodes."""
    (cluster,) = tree["static_resources"]["clusters"]
    option = {"level": socket.IPPROTO_TCP, "name": socket.TCP_USER_TIMEOUT, "int_value": USER_TIMEOUT}
    cluster["upstream_connection_options"] = {"tcp_keepalive": KEEPALIVE}
    cluster["upstream_bind_config"] = {"socket_options": [{**option, "state": "STATE_PREBIND"}]}


async def test_socket_options_are_the_same_before_and_after(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, change_bootstrap=with_socket_options, drained=[1]) as nodes:
        wire = await nodes.connect_answer_client()
        for node in (nodes.nodes[0], nodes.nodes[1], nodes.nodes[0]):
            assert await wire.send_command(MySqlCommand.PING) == (OkAnswer(2),)
            with socket_of_process(nodes.proxy.pid, node.node.sql_port) as connection:
                assert {option: connection.getsockopt(*option) for option in OPTIONS} == OPTIONS
                assert os.get_blocking(connection.fileno()) is False
            await nodes.migrate_all()
