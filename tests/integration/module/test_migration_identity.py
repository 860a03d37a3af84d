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
from sandbox.tidb_sim.greeting import Login, parse_response
from sandbox.tidb_sim.packets import Capability, Command, frame
from tests.support.clients.server import Certificates
from tests.support.fake_servers import listening
from tests.support.migration.fleet import Fleet, Made, connection_to, fleet, unmoved
from tests.support.migration.sql_client import Failed, Ok, Prepared, Rows, Wire, request
from tests.support.module.bootstrap import Parts
from tests.support.module.envoy import OK, greets
from tests.support.tidb_sim_clients import CAPABILITIES, Raw
from tests.support.waiting import taken, until


@dataclass
class Taker:
    """A node that takes all sessions, whatever they bring, and keeps how they have logged in."""

    logins: list[Login] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A handler (tests.support.fake_servers)."""
        node = Raw(reader, writer)
        writer.write(greets())
        sequence, response = await node.packet()
        self.logins.append(parse_response(response))
        writer.write(frame(sequence + 1, OK))
        while True:
            _, request = await node.packet()
            if request.startswith(b"\x03SET SESSION_STATES"):
                self.states.append(request)
            writer.write(frame(1, OK))


@dataclass
class Seen:
    """Nodes, and one more that sees how sessions log in. Everything is plain."""

    nodes: Fleet
    taker: Taker

    async def login(self) -> Login:
        """All sessions go to it; the login of the last one."""
        self.nodes.drain(*self.nodes.nodes)
        await self.nodes.settled(0, 0)
        return self.taker.logins[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb) -> AsyncIterator[Seen]:
    taker = Taker()
    async with (
        listening(taker.serve) as peer,
        fleet(tmp_path_factory.mktemp("seen"), mariadb, others=[peer.endpoint]) as all_,
    ):
        yield Seen(all_, taker)


@pytest_asyncio.fixture(loop_scope="module")
async def seen(watched: Seen) -> AsyncIterator[Seen]:
    """Sessions begin at its nodes, and not at the one that takes all."""
    watched.nodes.drain(*watched.nodes.others)
    yield watched
    await watched.nodes.empty()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def accounts(mariadb: MariaDb) -> AsyncIterator[dict[str, str]]:
    """Passwords by names."""
    made = {"moves_open": "", "moves_locked": "Geheim & 'süß'"}
    async with unmoved(mariadb) as admin:
        for name, password in made.items():
            await run(
                admin, f"create user {name}@'%' identified by '{password.replace(chr(39), chr(39) * 2)}'"
            )
        yield made
        for name in made:
            await run(admin, f"drop user {name}@'%'")


asynchronous = pytest.mark.asyncio(loop_scope="module")


async def run(wire: Wire, statement: str) -> None:
    (part,) = await wire.query(statement)
    assert not isinstance(part, Failed), part


@asynchronous
@pytest.mark.parametrize("named", [None, {}, {"program": "süß", "long": "x" * 300, "": ""}], ids=str)
async def test_the_login_says_what_the_client_has_said(
    seen: Seen, database: str, named: dict[str, str] | None
) -> None:
    flags = CAPABILITIES | Capability.FOUND_ROWS | Capability.INTERACTIVE | Capability.DEPRECATE_EOF
    wire = await seen.nodes.wire(flags, attributes=named, database=database, collation=192)
    await seen.nodes.move()
    login = await seen.login()
    assert login.attributes == (named or {})
    assert (login.user, login.database, login.collation) == ("root", database, 192)
    kept = flags | (Capability(0) if named is None else Capability.CONNECT_ATTRS)
    needed = Capability.LENENC_AUTH | Capability.CONNECT_WITH_DB
    assert login.capabilities & ~needed == kept
    assert login.plugin == "tidb_session_token"
    assert await wire.ask(Command.PING)


@asynchronous
async def test_the_login_says_who_the_session_has_become(
    seen: Seen, database: str, accounts: dict[str, str]
) -> None:
    wire = await seen.nodes.wire(attributes={"former": "1"})
    await wire.change_user("moves_open", database="mysql")
    assert await wire.ask(Command.INIT_DB, database.encode()) == (Ok(2),)
    await seen.nodes.move()
    login = await seen.login()
    assert (login.user, login.database, login.attributes) == ("moves_open", database, {"changed": "yes"})


@asynchronous
async def test_the_database_of_the_login_is_kept(nodes: Fleet, database: str) -> None:
    wire = await nodes.wire(database=database)
    for _ in range(2):
        await nodes.move()
        assert await wire.one("select database()") == (database.encode(),)
    assert await wire.ask(Command.INIT_DB, b"mysql") == (Ok(2),)
    for _ in range(2):
        await nodes.move()
        assert await wire.one("select database()") == (b"mysql",)


@asynchronous
async def test_a_database_that_is_dropped_is_no_database(
    nodes: Fleet, mariadb: MariaDb, database: str
) -> None:
    wire = await nodes.wire(database=database)
    await run(wire, f"drop database {database}")
    assert await wire.one("select database()") == (None,)
    for _ in range(2):
        await nodes.move()
        assert await wire.one("select database()") == (None,)


async def changes_user(nodes: Fleet, accounts: dict[str, str], user: str, plugin: str) -> None:
    """To that user and back, with moves in between."""
    wire = await nodes.wire()
    await run(wire, "set @a = 1")
    await nodes.move()
    for name, password in ((user, accounts[user]), ("root", ""), (user, accounts[user])):
        await wire.change_user(name, password, "mysql", plugin=plugin)
        for _ in range(2):
            who = await wire.one("select user(), current_user(), @a, database()")
            account = "root@localhost" if name == "root" else f"{name}@%"
            assert who == (f"{name}@127.0.0.1".encode(), account.encode(), None, b"mysql")
            await run(wire, "set @b = 1")
            await nodes.move()
            assert await wire.one("select @b, user()") == (b"1", who[0])
        await run(wire, "set @a = 1")


@asynchronous
@pytest.mark.parametrize("plugin", ["mysql_native_password", "other_plugin"])
@pytest.mark.parametrize("user", ["moves_open", "moves_locked"])
async def test_a_change_of_user_is_kept(
    nodes: Fleet, accounts: dict[str, str], user: str, plugin: str
) -> None:
    await changes_user(nodes, accounts, user, plugin)


@asynchronous
async def test_a_change_of_user_is_kept_with_tls(
    tmp_path: Path, mariadb: MariaDb, accounts: dict[str, str]
) -> None:
    tls = Certificates.make(tmp_path / "certificates")
    async with fleet(tmp_path, mariadb, tls=tls) as nodes:
        await changes_user(nodes, accounts, "moves_locked", "mysql_native_password")


@asynchronous
async def test_a_connection_that_is_reset_stays_so(nodes: Fleet, database: str) -> None:
    wire = await nodes.wire(database=database)
    for _ in range(2):
        for statement in ("set @a = 1", "prepare s from 'select 1'", "set sql_mode = 'ANSI_QUOTES'"):
            await run(wire, statement)
        assert isinstance((await wire.ask(Command.STMT_PREPARE, b"select 1"))[0], Prepared)
        await nodes.move()
        assert await wire.ask(Command.RESET_CONNECTION) == (Ok(2),)
        await nodes.move()
        assert await wire.one("select @a, database(), @@sql_mode = @@global.sql_mode") == (
            *(None, database.encode(), b"1"),
        )
        (gone,) = await wire.query("execute s")
        assert isinstance(gone, Failed)
        assert isinstance((await wire.ask(Command.STMT_PREPARE, b"select 1"))[0], Prepared)
        assert wire.number == 1


@asynchronous
async def test_several_statements_in_one_text_stay_allowed_or_not(nodes: Fleet) -> None:
    multi = b"select 1; set @a = 1; select 2"
    wire = await nodes.wire(CAPABILITIES & ~Capability.MULTI_STATEMENTS)
    for allowed in (None, True, True, False, False, True):
        if allowed is not None:
            await wire.ask(Command.SET_OPTION, (not allowed).to_bytes(2, "little"))
        for _ in range(2):
            await nodes.move()
            kinds = [type(part) for part in await wire.query(multi)]
            assert kinds == ([Rows, Ok, Rows] if allowed else [Failed])


@asynchronous
async def test_an_option_that_does_not_exist_changes_nothing(nodes: Fleet) -> None:
    wire = await nodes.wire()
    (refused,) = await wire.ask(Command.SET_OPTION, b"\x07\0")
    assert isinstance(refused, Failed)
    await nodes.move()
    assert len(await wire.query("select 1; select 2")) == 2


async def waiting(nodes: Fleet, **options: Any) -> Wire:
    """A session in a transaction that is to leave its node: its target waits for it."""
    nodes.drain(nodes.nodes[1])
    wire, other = await nodes.wire(**options), await nodes.wire()
    await nodes.settled(2, 0)
    await run(wire, "begin")
    await run(wire, "select * from mysql.seq_1_to_2")
    nodes.drain(nodes.nodes[0])
    # When the other one has moved, it has been looked at as well.
    await nodes.settled(1, 1)
    assert await other.ask(Command.PING)
    return wire


@asynchronous
@pytest.mark.parametrize("user", ["moves_open", "root"])
async def test_a_change_of_user_while_the_target_waits(
    nodes: Fleet, accounts: dict[str, str], user: str
) -> None:
    wire = await waiting(nodes)
    await wire.change_user(user, accounts.get(user, ""))
    await nodes.settled(0, 2)
    assert await wire.one("select user()") == (f"{user}@127.0.0.1".encode(),)


@asynchronous
@pytest.mark.parametrize("allowed", [True, False])
async def test_an_option_that_is_set_while_the_target_waits(nodes: Fleet, allowed: bool) -> None:
    before = CAPABILITIES & ~Capability.MULTI_STATEMENTS if allowed else CAPABILITIES
    wire = await waiting(nodes, capabilities=before)
    await wire.ask(Command.SET_OPTION, (not allowed).to_bytes(2, "little"))
    await run(wire, "commit")
    await nodes.settled(0, 2)
    assert len(await wire.query("select 1; select 2")) == (2 if allowed else 1)


@asynchronous
@pytest.mark.parametrize("cut", [1, 4, 5])
async def test_an_option_that_comes_in_two_parts(nodes: Fleet, cut: int) -> None:
    wire = await nodes.wire()
    await nodes.move()
    packet = request(Command.SET_OPTION, b"\1\0")
    wire.writer.write(packet[:cut])
    await taken(wire.writer)
    wire.writer.write(packet[cut:])
    assert await wire.answer(Command.SET_OPTION) == (Ok(2),)
    await nodes.move()
    assert len(await wire.query("select 1; select 2")) == 1


@asynchronous
@pytest.mark.parametrize("cut", [1, 4, 5, 30])
async def test_a_change_of_user_that_comes_in_two_parts(
    nodes: Fleet, accounts: dict[str, str], cut: int
) -> None:
    wire = await nodes.wire()
    await nodes.move()
    await wire.change_user("moves_open", database="mysql", cut=cut)
    await nodes.move()
    assert await wire.one("select user(), database()") == (b"moves_open@127.0.0.1", b"mysql")


@asynchronous
async def test_an_option_among_other_commands(nodes: Fleet) -> None:
    """The session may stay where it is."""
    nodes.drain(nodes.nodes[1])
    wire, other = await nodes.wire(), await nodes.wire()
    await nodes.settled(2, 0)
    commands = [(Command.PING, b""), (Command.SET_OPTION, b"\1\0"), (Command.QUERY, b"select 1")]
    wire.writer.write(b"".join(request(*command) for command in commands))
    for command, _ in commands:
        assert not isinstance((await wire.answer(command))[0], Failed)
    nodes.drain(nodes.nodes[0])
    await until(lambda: nodes.sessions[1] > 0)
    await other.leave()
    for _ in range(3):
        assert len(await wire.query("select 1; select 2")) == 1


CLIENT = "127.0.0.5"
PROXIED = Parts(node={"proxy_protocol": "v2"})


@pytest.mark.parametrize("hosts", [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::1"), ("::1", "::1")], ids=str)
async def test_each_node_is_told_the_address_of_the_client(
    tmp_path: Path, mariadb: MariaDb, hosts: tuple[str, str]
) -> None:
    made = [Made(host=host, proxied=True) for host in hosts]
    async with fleet(tmp_path, mariadb, parts=PROXIED, made=made, drained=[1]) as nodes:
        wire = await nodes.wire(source=CLIENT)
        for _ in range(3):
            assert await wire.one("select user()") == (f"root@{CLIENT}".encode(),)
            await nodes.move()


async def test_sessions_move_between_nodes_of_both_families(tmp_path: Path, mariadb: MariaDb) -> None:
    async with fleet(tmp_path, mariadb, made=(Made(), Made(host="::1")), drained=[1]) as nodes:
        wire = await nodes.wire()
        await run(wire, "set @a = 7")
        for host in ("127.0.0.1", "::1", "127.0.0.1"):
            assert await wire.one("select @a, user()") == (b"7", f"root@{host}".encode())
            await nodes.move()


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
    async with fleet(tmp_path, mariadb, change=with_socket_options, drained=[1]) as nodes:
        wire = await nodes.wire()
        for node in (nodes.nodes[0], nodes.nodes[1], nodes.nodes[0]):
            assert await wire.ask(Command.PING) == (Ok(2),)
            with connection_to(nodes.proxy.pid, node.node.sql_port) as connection:
                assert {option: connection.getsockopt(*option) for option in OPTIONS} == OPTIONS
                assert os.get_blocking(connection.fileno()) is False
            await nodes.move()
