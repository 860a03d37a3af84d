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
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.packets import AUTOCOMMIT, IN_TRANSACTION, Capability, MySqlCommand
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import full_backlog, refusing_port, run_fake_server
from tests.support.migration.differential import without_types
from tests.support.migration.fleet import THREE_NODES, MigratingFleet, NodeSpec, mariadb_session, run_fleet
from tests.support.migration.sql_client import (
    Answer,
    AnswerClient,
    ErrorAnswer,
    OkAnswer,
    RowsAnswer,
    encode_command,
    execute_body,
)
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import OK_PAYLOAD, greeting_packet, login_packet, with_timeout
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient
from tests.support.waiting import wait_until


async def _never_restores(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A node that takes a login, and then says nothing."""
    node = RawClient(reader, writer)
    writer.write(greeting_packet())
    await node.read_packet()


@asynccontextmanager
async def _silent() -> AsyncIterator[str]:
    async with run_fake_server(_never_restores) as peer:
        yield peer.endpoint


@asynccontextmanager
async def _closed() -> AsyncIterator[str]:
    with refusing_port() as endpoint:
        yield endpoint


@asynccontextmanager
async def _full() -> AsyncIterator[str]:
    with full_backlog() as endpoint:
        yield endpoint


GOOD = NodeSpec()


@dataclass(frozen=True)
class Failure:
    """Why a move fails. `other`: what is the target instead of a stand-in, by its endpoint."""

    name: str
    reason: str
    source: NodeSpec = GOOD
    target: NodeSpec = GOOD
    other: Callable[[], AbstractAsyncContextManager[str]] | None = None
    lasting: bool = False
    """The session can move nowhere."""


UNCERTIFIED = NodeSpec(has_signing_certificate=False)
FAILURES = (
    Failure(
        "the target does not know the states",
        "not_restored",
        target=NodeSpec(MigrationRules(rejects_set_states=True)),
    ),
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
    Failure(
        "the states come too late",
        "slow",
        source=NodeSpec(MigrationRules(export_delay_seconds=2.5)),
        lasting=True,
    ),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb
) -> AsyncIterator[MigratingFleet]:
    async with run_fleet(tmp_path_factory.mktemp("stays"), mariadb, drained=[1]) as all_:
        yield all_


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(running: MigratingFleet) -> AsyncIterator[MigratingFleet]:
    """Two of them; sessions begin at the first one."""
    running.drain(running.nodes[1])
    yield running
    await running.close_sessions()
    assert running.pop_violations() == []


shared = pytest.mark.asyncio(loop_scope="module")
"""Of tests with these nodes: to start an Envoy for each would take longer than all of them."""


@asynccontextmanager
async def failing(
    directory: Path, mariadb: MariaDb, failure: Failure, *, tls: PemFiles | None = None
) -> AsyncIterator[tuple[MigratingFleet, Callable[[], None]]]:
    """Sessions begin at the first node; what is returned has it drained. The last one takes all."""
    async with AsyncExitStack() as running:
        others = [] if failure.other is None else [await running.enter_async_context(failure.other())]
        nodes = [failure.source, failure.target, NodeSpec()]
        whole = await running.enter_async_context(
            run_fleet(directory, mariadb, specs=nodes, tls=tls, others=others, drained=(1, 2))
        )
        first, second, third = whole.nodes

        def drain() -> None:
            whole.drain(first, third, *([second] if others else []))

        yield whole, drain


async def leave_behind(wire: AnswerClient, table: str) -> None:
    """Something to ask for."""
    for statement in (
        f"create table {table} (id int primary key)",
        "select seq from mysql.seq_1_to_7",
        f"insert ignore into {table} values (1), (2), ('x')",
    ):
        (part,) = await wire.query(statement)
        assert not isinstance(part, ErrorAnswer), part


async def left_behind(wire: AnswerClient) -> list[Answer]:
    asked = ("select row_count(), found_rows(), @@warning_count", "show warnings")
    return [without_types(await wire.query(question)) for question in asked]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
async def test_a_move_that_fails_is_not_seen(
    tmp_path: Path, mariadb: MariaDb, database: str, failure: Failure
) -> None:
    """Whether SHOW SESSION_STATES changes what the next statement sees is not known: here it does."""
    async with mariadb_session(mariadb, database=database) as control:
        await leave_behind(control, "t")
        expected = await left_behind(control)
        await control.query("drop table t")
    source = replace(failure.source, migration=replace(failure.source.migration, show_changes_row_count=True))
    async with failing(tmp_path, mariadb, replace(failure, source=source)) as (nodes, drain):
        wire = await nodes.connect_answer_client(database=database)
        await wire.query("set @a = 'kept'")
        await leave_behind(wire, "t")
        drain()
        await nodes.wait_stayed(failure.reason)
        assert await left_behind(wire) == expected
        # And so it goes on, while it is tried again.
        for number in range(20):
            assert await wire.query_row(f"select {number}, @a") == (b"%d" % number, b"kept")
        assert nodes.sessions[0] == 1
        if not failure.lasting:
            nodes.drain(*nodes.nodes[:2], *nodes.other_endpoints)
            await nodes.wait_session_counts(0, 0, 1)
            assert await wire.query_row("select @a, database()") == (b"kept", database.encode())


async def test_a_statement_that_is_prepared_after_a_failed_move_gets_a_new_number(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    """Numbers are not reused."""
    async with failing(tmp_path, mariadb, FAILURES[0]) as (nodes, drain):
        wire = await nodes.connect_answer_client()
        await wire.send_command(MySqlCommand.STMT_PREPARE, b"select 'first'")
        first = wire.statement_id
        drain()
        await nodes.wait_stayed(FAILURES[0].reason)
        await wire.send_command(MySqlCommand.STMT_PREPARE, b"select 'second'")
        assert wire.statement_id == first + 1
        for number, text in ((first, b"first"), (first + 1, b"second")):
            (answer,) = await wire.send_command(MySqlCommand.STMT_EXECUTE, execute_body(number, ()))
            assert isinstance(answer, RowsAnswer)
            assert answer.rows[0].endswith(text)


async def test_a_refusal_is_not_seen(tmp_path: Path, mariadb: MariaDb, database: str) -> None:
    """What a node that refuses with ERR has changed nobody could put back."""
    async with mariadb_session(mariadb, database=database) as control:
        await leave_behind(control, "t")
        expected = await left_behind(control)
        await control.query("drop table t")
    failure = Failure("", "", source=UNCERTIFIED)
    async with failing(tmp_path, mariadb, failure) as (nodes, drain):
        wire = await nodes.connect_answer_client(database=database)
        await leave_behind(wire, "t")
        drain()
        await nodes.wait_stayed("refused")
        assert await left_behind(wire) == expected
        assert nodes.sessions == [1, 0, 0]


async def test_a_move_that_fails_is_not_seen_with_tls(
    tmp_path: Path, mariadb: MariaDb, database: str
) -> None:
    tls = PemFiles.create(tmp_path / "certificates")
    async with failing(tmp_path, mariadb, FAILURES[0], tls=tls) as (nodes, drain):
        wire = await nodes.connect_answer_client(database=database)
        await wire.query("set @a = 'kept'")
        drain()
        await nodes.wait_stayed(FAILURES[0].reason)
        for number in range(20):
            assert await wire.query_row(f"select {number}, @a") == (b"%d" % number, b"kept")
        assert nodes.sessions[0] == 1


async def test_a_statement_that_comes_while_a_move_fails_is_executed_once(
    tmp_path: Path, mariadb: MariaDb, database: str
) -> None:
    """All of its time the node is asked for states, and gives them too late."""
    failure = replace(FAILURES[-1], source=NodeSpec(MigrationRules(export_delay_seconds=2.2)))
    async with failing(tmp_path, mariadb, failure) as (nodes, drain):
        wire = await nodes.connect_answer_client(database=database)
        await wire.query("create table counted (id int auto_increment primary key)")
        drain()
        for number in range(300):
            (part,) = await wire.query("insert into counted values ()")
            assert part == OkAnswer(AUTOCOMMIT, 1, number + 1)
            if await nodes.count_migrations("stayed", "slow"):
                break
        assert await wire.query_row("select count(*) from counted") == (b"%d" % (number + 1),)


@pytest.mark.parametrize(
    ("charset", "codec", "text", "disturb"),
    [("gbk", "gbk", "中文", False), ("latin1", "cp1252", "süß€", True)],
    ids=["gbk", "latin1, when SHOW disturbs"],
)
async def test_text_that_its_character_set_may_lose_is_not_moved(
    tmp_path: Path, mariadb: MariaDb, database: str, charset: str, codec: str, text: str, disturb: bool
) -> None:
    """A node tells states in the character set that its client wants answers in."""
    async with run_fleet(
        tmp_path,
        mariadb,
        specs=[NodeSpec(MigrationRules(show_changes_row_count=disturb)), NodeSpec()],
        drained=[1],
    ) as nodes:
        wire = await nodes.connect_answer_client(database=database)
        await wire.query(f"set names {charset}")
        await wire.query(f"prepare named from 'select ''{text}'' as x'".encode(codec))
        await wire.query("create table t (id int primary key)")
        await wire.query("select seq from mysql.seq_1_to_7")
        await wire.query("insert into t values (1), (2)")
        nodes.drain(nodes.nodes[0])
        await nodes.wait_stayed("states")
        assert await wire.query_row("select row_count(), found_rows()") == (b"2", b"7")
        assert await wire.query_row("execute named") == (text.encode(codec),)
        await wire.query("deallocate prepare named")
        await nodes.wait_session_counts(0, 1)
        assert await wire.query_row(f"select '{text}'".encode(codec)) == (text.encode(codec),)


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


async def go_on(wire: AnswerClient, nodes: MigratingFleet) -> None:
    """It is served where it is, while others have left."""
    for number in range(10):
        assert await wire.query_row(f"select {number}") == (b"%d" % number,)
    assert nodes.sessions == [1, 1]


@shared
@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
async def test_a_session_that_is_pinned_moves_when_it_is_free(
    nodes: MigratingFleet, database: str, pin: Pin
) -> None:
    wire, other = await nodes.connect_answer_client(database=database), await nodes.connect_answer_client()
    await nodes.wait_session_counts(2, 0)
    await wire.query("create table t (id int)")
    for statement in pin.pins:
        assert not isinstance((await wire.query(statement))[-1], ErrorAnswer)
    refused = await nodes.count_migrations("stayed", "refused")
    nodes.drain(nodes.nodes[0])
    # When the other one has moved, it has been looked at as well.
    await nodes.wait_session_counts(1, 1)
    await go_on(wire, nodes)
    if pin.refused:
        await nodes.wait_stayed("refused", refused + 1)
    else:
        await nodes.wait_pinned("transaction")
    assert not isinstance((await wire.query(pin.frees))[-1], ErrorAnswer)
    await nodes.wait_session_counts(0, 2)
    assert await wire.query_row("select database()") == (database.encode(),)
    assert await other.query_row("select 1") == (b"1",)


async def test_a_session_that_cannot_be_understood_stays(tmp_path: Path, mariadb: MariaDb) -> None:
    """One that is compressed."""
    compressed = ModuleConfig(client={"compression": "passthrough"})
    async with run_fleet(tmp_path, mariadb, parts=compressed, drained=[1]) as nodes:
        await nodes.connect_answer_client(CAPABILITIES | Capability.COMPRESS)
        other = await nodes.connect_answer_client()
        nodes.drain(nodes.nodes[0])
        await nodes.wait_session_counts(1, 1)
        assert await other.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
        await nodes.wait_pinned("opaque")
        assert nodes.sessions == [1, 1]


async def test_several_that_are_pinned_by_turns_all_leave(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, specs=THREE_NODES, drained=[1, 2]) as nodes:
        wires = [await nodes.connect_answer_client() for _ in range(20)]
        for wire in wires:
            await wire.query("begin")
        nodes.drain(nodes.nodes[0])
        for wire in wires:
            assert await wire.query_row("select 1") == (b"1",)
            assert await wire.query("commit") == (OkAnswer(AUTOCOMMIT),)
        await wait_until(lambda: not nodes.sessions[0])
        assert sum(nodes.sessions) == 20


STOPS = (NodeSpec(graceful_wait=60), NodeSpec())


@asynccontextmanager
async def stopping(nodes: MigratingFleet) -> AsyncIterator[None]:
    """The first node is in its graceful wait; its end is not waited for."""
    first = nodes.nodes[0]
    first.request_stop()
    try:
        await wait_until(lambda: first.node.is_stopping)
        yield
        assert nodes.sessions[0] == 0
    finally:
        first.crash()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_ping_moves_the_sessions_of_a_node_that_stops(
    tmp_path: Path, mariadb: MariaDb, tls: bool
) -> None:
    certificates = PemFiles.create(tmp_path / "certificates") if tls else None
    async with run_fleet(tmp_path, mariadb, specs=STOPS, tls=certificates, drained=[1]) as nodes:
        wire, other = await nodes.connect_answer_client(), await nodes.connect_answer_client()
        await wire.query("set @a = 7, autocommit = 0")
        assert await wire.send_command(MySqlCommand.PING) == (OkAnswer(0),)
        async with stopping(nodes):
            nodes.drain()
            assert await wire.send_command(MySqlCommand.PING) == (OkAnswer(0),)
            await nodes.wait_session_counts(0, 2)
            for _ in range(3):
                assert await wire.send_command(MySqlCommand.PING) == (OkAnswer(0),)
                assert await other.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
            assert await wire.query_row("select @a") == (b"7",)


async def test_a_ping_in_a_transaction_moves_it_afterwards(
    tmp_path: Path, mariadb: MariaDb, database: str
) -> None:
    async with run_fleet(tmp_path, mariadb, specs=STOPS, drained=[1]) as nodes:
        wire = await nodes.connect_answer_client(database=database)
        await wire.query("create table t (id int)")
        await wire.query("begin")
        await wire.query("insert into t values (1)")
        async with stopping(nodes):
            nodes.drain()
            for _ in range(3):
                assert await wire.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT | IN_TRANSACTION),)
                assert await wire.query_row("select count(*) from t") == (b"1",)
            assert nodes.sessions == [1, 0]
            await wire.query("commit")
            await nodes.wait_session_counts(0, 1)
            assert await wire.query_row("select count(*) from t") == (b"1",)


async def test_a_ping_is_answered_where_there_is_no_other_node(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, specs=STOPS, drained=[1]) as nodes:
        wire = await nodes.connect_answer_client()
        async with stopping(nodes):
            for _ in range(3):
                assert await wire.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
                assert await wire.query_row("select 1") == (b"1",)
            nodes.drain()
            await nodes.wait_session_counts(0, 1)


async def test_pings_among_other_commands_are_answered_in_order(tmp_path: Path, mariadb: MariaDb) -> None:
    commands = [
        (MySqlCommand.PING, b""),
        (MySqlCommand.QUERY, b"set @a = 1"),
        (MySqlCommand.PING, b""),
        (MySqlCommand.QUERY, b"select @a"),
        (MySqlCommand.PING, b""),
    ]
    async with run_fleet(tmp_path, mariadb, specs=STOPS, drained=[1]) as nodes:
        wire = await nodes.connect_answer_client()
        expected = [await wire.send_command(command, body) for command, body in commands]
        async with stopping(nodes):
            nodes.drain()
            wire.writer.write(b"".join(encode_command(command, body) for command, body in commands))
            assert [await wire.read_answer(command) for command, _ in commands] == expected
            await nodes.wait_session_counts(0, 1)
            assert await wire.query_row("select @a") == (b"1",)


@shared
async def test_a_session_that_logs_in_while_its_node_is_drained_leaves_it(nodes: MigratingFleet) -> None:
    other = await nodes.connect_answer_client()
    await nodes.wait_session_counts(1, 0)
    late = await nodes.proxy.connect()
    await late.read_packet()
    nodes.drain(nodes.nodes[0])
    # When the other one has moved, the worker has heard of it.
    await nodes.wait_session_counts(0, 1)
    late.writer.write(login_packet())
    assert (await with_timeout(late.read_packet()))[1] == OK_PAYLOAD
    await nodes.wait_session_counts(0, 2)
    assert await other.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
