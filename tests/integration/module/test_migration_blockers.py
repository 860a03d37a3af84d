"""Sessions that cannot move, or not now: they go on where they are as if nothing had been tried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.migration_rules import MoveRules
from sandbox.tidb_sim.packets import AUTOCOMMIT, IN_TRANSACTION, Capability, Command
from tests.support.clients.server import Certificates
from tests.support.fake_servers import closed_port, full_backlog, listening
from tests.support.migration.differential import untyped
from tests.support.migration.fleet import THREE, Fleet, Made, fleet, unmoved
from tests.support.migration.sql_client import Answer, Failed, Ok, Rows, Wire, executed, request
from tests.support.module.bootstrap import Parts
from tests.support.module.envoy import OK, greets, response, within
from tests.support.tidb_sim_clients import CAPABILITIES, Raw
from tests.support.waiting import until


async def _never_restores(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A node that takes a login, and then says nothing."""
    node = Raw(reader, writer)
    writer.write(greets())
    await node.packet()


@asynccontextmanager
async def _silent() -> AsyncIterator[str]:
    async with listening(_never_restores) as peer:
        yield peer.endpoint


@asynccontextmanager
async def _closed() -> AsyncIterator[str]:
    with closed_port() as endpoint:
        yield endpoint


@asynccontextmanager
async def _full() -> AsyncIterator[str]:
    with full_backlog() as endpoint:
        yield endpoint


GOOD = Made()


@dataclass(frozen=True)
class Failure:
    """Why a move fails. `other`: what is the target instead of a stand-in, by its endpoint."""

    name: str
    reason: str
    source: Made = GOOD
    target: Made = GOOD
    other: Callable[[], AbstractAsyncContextManager[str]] | None = None
    lasting: bool = False
    """The session can move nowhere."""


UNCERTIFIED = Made(signs=False)
FAILURES = (
    Failure("the target does not know the states", "not_restored", target=Made(MoveRules(refuse=True))),
    Failure("the target cannot check tokens", "denied", target=UNCERTIFIED),
    Failure("the target is not there", "unreachable", other=_closed),
    Failure("the target does not answer", "slow", other=_full),
    Failure("the target takes the login and no more", "slow", other=_silent),
    Failure(
        "a token cannot be signed, and there is none",
        "no_token",
        source=replace(UNCERTIFIED, release="v9.0.0"),
        lasting=True,
    ),
    Failure("the states come too late", "slow", source=Made(MoveRules(delay=2.5)), lasting=True),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path_factory.mktemp("stays"), mariadb, drained=[1]) as all_:
        yield all_


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(running: Fleet) -> AsyncIterator[Fleet]:
    """Two of them; sessions begin at the first one."""
    running.drain(running.nodes[1])
    yield running
    await running.empty()
    assert running.take_violations() == []


shared = pytest.mark.asyncio(loop_scope="module")
"""Of tests with these nodes: to start an Envoy for each would take longer than all of them."""


@asynccontextmanager
async def failing(
    directory: Path, mariadb: MariaDb, failure: Failure, *, tls: Certificates | None = None
) -> AsyncIterator[tuple[Fleet, Callable[[], None]]]:
    """Sessions begin at the first node; what is returned has it drained. The last one takes all."""
    async with AsyncExitStack() as running:
        others = [] if failure.other is None else [await running.enter_async_context(failure.other())]
        nodes = [failure.source, failure.target, Made()]
        whole = await running.enter_async_context(
            fleet(directory, mariadb, made=nodes, tls=tls, others=others, drained=(1, 2))
        )
        first, second, third = whole.nodes

        def drain() -> None:
            whole.drain(first, third, *([second] if others else []))

        yield whole, drain


async def leave_behind(wire: Wire, table: str) -> None:
    """Something to ask for."""
    for statement in (
        f"create table {table} (id int primary key)",
        "select seq from mysql.seq_1_to_7",
        f"insert ignore into {table} values (1), (2), ('x')",
    ):
        (part,) = await wire.query(statement)
        assert not isinstance(part, Failed), part


async def left_behind(wire: Wire) -> list[Answer]:
    asked = ("select row_count(), found_rows(), @@warning_count", "show warnings")
    return [untyped(await wire.query(question)) for question in asked]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
async def test_a_move_that_fails_is_not_seen(
    tmp_path: Path, mariadb: MariaDb, database: str, failure: Failure
) -> None:
    """Whether SHOW SESSION_STATES changes what the next statement sees is not known: here it does."""
    async with unmoved(mariadb, database=database) as control:
        await leave_behind(control, "t")
        expected = await left_behind(control)
        await control.query("drop table t")
    source = replace(failure.source, moves=replace(failure.source.moves, disturb=True))
    async with failing(tmp_path, mariadb, replace(failure, source=source)) as (nodes, drain):
        wire = await nodes.wire(database=database)
        await wire.query("set @a = 'kept'")
        await leave_behind(wire, "t")
        drain()
        await nodes.stayed(failure.reason)
        assert await left_behind(wire) == expected
        # And so it goes on, while it is tried again.
        for number in range(20):
            assert await wire.one(f"select {number}, @a") == (b"%d" % number, b"kept")
        assert nodes.sessions[0] == 1
        if not failure.lasting:
            nodes.drain(*nodes.nodes[:2], *nodes.others)
            await nodes.settled(0, 0, 1)
            assert await wire.one("select @a, database()") == (b"kept", database.encode())


async def test_a_statement_that_is_prepared_after_a_failed_move_gets_a_new_number(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    """Numbers are not reused."""
    async with failing(tmp_path, mariadb, FAILURES[0]) as (nodes, drain):
        wire = await nodes.wire()
        await wire.ask(Command.STMT_PREPARE, b"select 'first'")
        first = wire.number
        drain()
        await nodes.stayed(FAILURES[0].reason)
        await wire.ask(Command.STMT_PREPARE, b"select 'second'")
        assert wire.number == first + 1
        for number, text in ((first, b"first"), (first + 1, b"second")):
            (answer,) = await wire.ask(Command.STMT_EXECUTE, executed(number, ()))
            assert isinstance(answer, Rows)
            assert answer.rows[0].endswith(text)


async def test_a_refusal_is_not_seen(tmp_path: Path, mariadb: MariaDb, database: str) -> None:
    """What a node that refuses with ERR has changed nobody could put back."""
    async with unmoved(mariadb, database=database) as control:
        await leave_behind(control, "t")
        expected = await left_behind(control)
        await control.query("drop table t")
    failure = Failure("", "", source=UNCERTIFIED)
    async with failing(tmp_path, mariadb, failure) as (nodes, drain):
        wire = await nodes.wire(database=database)
        await leave_behind(wire, "t")
        drain()
        await nodes.stayed("refused")
        assert await left_behind(wire) == expected
        assert nodes.sessions == [1, 0, 0]


async def test_a_move_that_fails_is_not_seen_with_tls(
    tmp_path: Path, mariadb: MariaDb, database: str
) -> None:
    tls = Certificates.make(tmp_path / "certificates")
    async with failing(tmp_path, mariadb, FAILURES[0], tls=tls) as (nodes, drain):
        wire = await nodes.wire(database=database)
        await wire.query("set @a = 'kept'")
        drain()
        await nodes.stayed(FAILURES[0].reason)
        for number in range(20):
            assert await wire.one(f"select {number}, @a") == (b"%d" % number, b"kept")
        assert nodes.sessions[0] == 1


async def test_a_statement_that_comes_while_a_move_fails_is_executed_once(
    tmp_path: Path, mariadb: MariaDb, database: str
) -> None:
    """All of its time the node is asked for states, and gives them too late."""
    failure = replace(FAILURES[-1], source=Made(MoveRules(delay=2.2)))
    async with failing(tmp_path, mariadb, failure) as (nodes, drain):
        wire = await nodes.wire(database=database)
        await wire.query("create table counted (id int auto_increment primary key)")
        drain()
        for number in range(300):
            (part,) = await wire.query("insert into counted values ()")
            assert part == Ok(AUTOCOMMIT, 1, number + 1)
            if await nodes.ended("stayed", "slow"):
                break
        assert await wire.one("select count(*) from counted") == (b"%d" % (number + 1),)


@pytest.mark.parametrize(
    ("charset", "codec", "text", "disturb"),
    [("gbk", "gbk", "中文", False), ("latin1", "cp1252", "süß€", True)],
    ids=["gbk", "latin1, when SHOW disturbs"],
)
async def test_text_that_its_character_set_may_lose_is_not_moved(
    tmp_path: Path, mariadb: MariaDb, database: str, charset: str, codec: str, text: str, disturb: bool
) -> None:
    """A node tells states in the character set that its client wants answers in."""
    async with fleet(
        tmp_path, mariadb, made=[Made(MoveRules(disturb=disturb)), Made()], drained=[1]
    ) as nodes:
        wire = await nodes.wire(database=database)
        await wire.query(f"set names {charset}")
        await wire.query(f"prepare named from 'select ''{text}'' as x'".encode(codec))
        await wire.query("create table t (id int primary key)")
        await wire.query("select seq from mysql.seq_1_to_7")
        await wire.query("insert into t values (1), (2)")
        nodes.drain(nodes.nodes[0])
        await nodes.stayed("states")
        assert await wire.one("select row_count(), found_rows()") == (b"2", b"7")
        assert await wire.one("execute named") == (text.encode(codec),)
        await wire.query("deallocate prepare named")
        await nodes.settled(0, 1)
        assert await wire.one(f"select '{text}'".encode(codec)) == (text.encode(codec),)


@dataclass(frozen=True)
class Pin:
    """What keeps a session where it is; `frees` lets it go. `refused`: the node says so when it is asked."""

    name: str
    pins: tuple[str, ...]
    frees: str
    refused: bool = False


PINS = (
    Pin("transaction", ("begin", "insert into t values (1)"), "commit"),
    Pin("transaction that is undone", ("start transaction", "select * from t"), "rollback"),
    Pin("autocommit=0", ("set autocommit = 0", "insert into t values (1)"), "commit"),
    Pin("transaction that DDL ends", ("begin", "insert into t values (1)"), "create table u (id int)"),
    Pin(
        "temporary table",
        ("create temporary table x (id int)", "insert into x values (7)"),
        "drop temporary table x",
        refused=True,
    ),
    Pin("lock", ("select get_lock('pin', 0)",), "select release_lock('pin')", refused=True),
    Pin("locked table", ("lock tables t write",), "unlock tables", refused=True),
)


async def go_on(wire: Wire, nodes: Fleet) -> None:
    """It is served where it is, while others have left."""
    for number in range(10):
        assert await wire.one(f"select {number}") == (b"%d" % number,)
    assert nodes.sessions == [1, 1]


@shared
@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
async def test_a_session_that_is_pinned_moves_when_it_is_free(nodes: Fleet, database: str, pin: Pin) -> None:
    wire, other = await nodes.wire(database=database), await nodes.wire()
    await nodes.settled(2, 0)
    await wire.query("create table t (id int)")
    for statement in pin.pins:
        assert not isinstance((await wire.query(statement))[-1], Failed)
    refused = await nodes.ended("stayed", "refused")
    nodes.drain(nodes.nodes[0])
    # When the other one has moved, it has been looked at as well.
    await nodes.settled(1, 1)
    await go_on(wire, nodes)
    if pin.refused:
        await nodes.stayed("refused", refused + 1)
    else:
        await nodes.pinned("transaction")
    assert not isinstance((await wire.query(pin.frees))[-1], Failed)
    await nodes.settled(0, 2)
    assert await wire.one("select database()") == (database.encode(),)
    assert await other.one("select 1") == (b"1",)


async def test_a_session_that_cannot_be_understood_stays(tmp_path: Path, mariadb: MariaDb) -> None:
    """One that is compressed."""
    compressed = Parts(client={"compression": "passthrough"})
    async with fleet(tmp_path, mariadb, parts=compressed, drained=[1]) as nodes:
        await nodes.wire(CAPABILITIES | Capability.COMPRESS)
        other = await nodes.wire()
        nodes.drain(nodes.nodes[0])
        await nodes.settled(1, 1)
        assert await other.ask(Command.PING) == (Ok(AUTOCOMMIT),)
        await nodes.pinned("opaque")
        assert nodes.sessions == [1, 1]


async def test_several_that_are_pinned_by_turns_all_leave(tmp_path: Path, mariadb: MariaDb) -> None:
    async with fleet(tmp_path, mariadb, made=THREE, drained=[1, 2]) as nodes:
        wires = [await nodes.wire() for _ in range(20)]
        for wire in wires:
            await wire.query("begin")
        nodes.drain(nodes.nodes[0])
        for wire in wires:
            assert await wire.one("select 1") == (b"1",)
            assert await wire.query("commit") == (Ok(AUTOCOMMIT),)
        await until(lambda: not nodes.sessions[0])
        assert sum(nodes.sessions) == 20


STOPS = (Made(graceful_wait=60), Made())


@asynccontextmanager
async def stopping(nodes: Fleet) -> AsyncIterator[None]:
    """The first node is in its graceful wait; its end is not waited for."""
    first = nodes.nodes[0]
    first.begin_stop()
    try:
        await until(lambda: first.node.stopping)
        yield
        assert nodes.sessions[0] == 0
    finally:
        first.crash()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_ping_moves_the_sessions_of_a_node_that_stops(
    tmp_path: Path, mariadb: MariaDb, tls: bool
) -> None:
    certificates = Certificates.make(tmp_path / "certificates") if tls else None
    async with fleet(tmp_path, mariadb, made=STOPS, tls=certificates, drained=[1]) as nodes:
        wire, other = await nodes.wire(), await nodes.wire()
        await wire.query("set @a = 7, autocommit = 0")
        assert await wire.ask(Command.PING) == (Ok(0),)
        async with stopping(nodes):
            nodes.drain()
            assert await wire.ask(Command.PING) == (Ok(0),)
            await nodes.settled(0, 2)
            for _ in range(3):
                assert await wire.ask(Command.PING) == (Ok(0),)
                assert await other.ask(Command.PING) == (Ok(AUTOCOMMIT),)
            assert await wire.one("select @a") == (b"7",)


async def test_a_ping_in_a_transaction_moves_it_afterwards(
    tmp_path: Path, mariadb: MariaDb, database: str
) -> None:
    async with fleet(tmp_path, mariadb, made=STOPS, drained=[1]) as nodes:
        wire = await nodes.wire(database=database)
        await wire.query("create table t (id int)")
        await wire.query("begin")
        await wire.query("insert into t values (1)")
        async with stopping(nodes):
            nodes.drain()
            for _ in range(3):
                assert await wire.ask(Command.PING) == (Ok(AUTOCOMMIT | IN_TRANSACTION),)
                assert await wire.one("select count(*) from t") == (b"1",)
            assert nodes.sessions == [1, 0]
            await wire.query("commit")
            await nodes.settled(0, 1)
            assert await wire.one("select count(*) from t") == (b"1",)


async def test_a_ping_is_answered_where_there_is_no_other_node(tmp_path: Path, mariadb: MariaDb) -> None:
    async with fleet(tmp_path, mariadb, made=STOPS, drained=[1]) as nodes:
        wire = await nodes.wire()
        async with stopping(nodes):
            for _ in range(3):
                assert await wire.ask(Command.PING) == (Ok(AUTOCOMMIT),)
                assert await wire.one("select 1") == (b"1",)
            nodes.drain()
            await nodes.settled(0, 1)


async def test_pings_among_other_commands_are_answered_in_order(tmp_path: Path, mariadb: MariaDb) -> None:
    commands = [
        (Command.PING, b""),
        (Command.QUERY, b"set @a = 1"),
        (Command.PING, b""),
        (Command.QUERY, b"select @a"),
        (Command.PING, b""),
    ]
    async with fleet(tmp_path, mariadb, made=STOPS, drained=[1]) as nodes:
        wire = await nodes.wire()
        expected = [await wire.ask(command, body) for command, body in commands]
        async with stopping(nodes):
            nodes.drain()
            wire.writer.write(b"".join(request(command, body) for command, body in commands))
            assert [await wire.answer(command) for command, _ in commands] == expected
            await nodes.settled(0, 1)
            assert await wire.one("select @a") == (b"1",)


@shared
async def test_a_session_that_logs_in_while_its_node_is_drained_leaves_it(nodes: Fleet) -> None:
    other = await nodes.wire()
    await nodes.settled(1, 0)
    late = await nodes.proxy.client()
    await late.packet()
    nodes.drain(nodes.nodes[0])
    # When the other one has moved, the worker has heard of it.
    await nodes.settled(0, 1)
    late.writer.write(response())
    assert (await within(late.packet()))[1] == OK
    await nodes.settled(0, 2)
    assert await other.ask(Command.PING) == (Ok(AUTOCOMMIT),)
