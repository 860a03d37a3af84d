"""Sessions that cannot migrate, or cannot migrate yet, continue on their node unchanged."""

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
from tests.support.migration.differential import keep_column_names
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


async def _accept_login_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Handle a node connection: accept the login, and then send nothing."""
    node = RawClient(reader, writer)
    writer.write(greeting_packet())
    await node.read_packet()


@asynccontextmanager
async def _silent_target() -> AsyncIterator[str]:
    async with run_fake_server(_accept_login_only) as peer:
        yield peer.endpoint


@asynccontextmanager
async def _closed_target() -> AsyncIterator[str]:
    with refusing_port() as endpoint:
        yield endpoint


@asynccontextmanager
async def _full_target() -> AsyncIterator[str]:
    with full_backlog() as endpoint:
        yield endpoint


GOOD = NodeSpec()


@dataclass(frozen=True)
class Failure:
    """A cause of failed migrations. `fake_target`, if set, runs a target and yields its endpoint."""

    name: str
    reason: str
    source: NodeSpec = GOOD
    target: NodeSpec = GOOD
    fake_target: Callable[[], AbstractAsyncContextManager[str]] | None = None
    is_permanent: bool = False
    """Whether migrations to a good node fail, too."""


UNCERTIFIED = NodeSpec(has_signing_certificate=False)
FAILURES = (
    Failure(
        "the target rejects the states",
        "not_restored",
        target=NodeSpec(MigrationRules(rejects_set_states=True)),
    ),
    Failure("the target cannot check tokens", "denied", target=UNCERTIFIED),
    Failure("the target refuses connections", "unreachable", fake_target=_closed_target),
    Failure("the target does not answer", "slow", fake_target=_full_target),
    Failure("the target is silent after the login", "slow", fake_target=_silent_target),
    Failure(
        "a token cannot be signed, and there is none",
        "no_token",
        source=replace(UNCERTIFIED, release="v9.0.0"),
        is_permanent=True,
    ),
    Failure(
        "the states come too late",
        "slow",
        source=NodeSpec(MigrationRules(export_delay_seconds=2.5)),
        is_permanent=True,
    ),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb
) -> AsyncIterator[MigratingFleet]:
    async with run_fleet(tmp_path_factory.mktemp("stays"), mariadb, drained=[1]) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(running: MigratingFleet) -> AsyncIterator[MigratingFleet]:
    """Yield two nodes. New sessions go to the first node, because the second one is draining."""
    running.drain(running.nodes[1])
    yield running
    await running.close_sessions()
    assert running.pop_violations() == []


in_module = pytest.mark.asyncio(loop_scope="module")
"""Marks tests that share the two `nodes`, because Envoy starts slowly."""


@asynccontextmanager
async def run_with_failure(
    directory: Path, mariadb: MariaDb, failure: Failure, *, tls: PemFiles | None = None
) -> AsyncIterator[tuple[MigratingFleet, Callable[[], None]]]:
    """Run three nodes: migrations from the first to the second fail, and the third accepts all sessions.

    Yield the nodes, and a function that drains the first node. Until then, new sessions go to the first node.
    """
    async with AsyncExitStack() as stack:
        fake_targets = (
            [] if failure.fake_target is None else [await stack.enter_async_context(failure.fake_target())]
        )
        nodes = [failure.source, failure.target, NodeSpec()]
        fleet = await stack.enter_async_context(
            run_fleet(directory, mariadb, specs=nodes, tls=tls, others=fake_targets, drained=(1, 2))
        )
        first, second, third = fleet.nodes

        def drain() -> None:
            fleet.drain(first, third, *([second] if fake_targets else []))

        yield fleet, drain


async def leave_diagnostics(client: AnswerClient, table: str) -> None:
    """Run statements that set ROW_COUNT(), FOUND_ROWS() and the session's warnings."""
    for statement in (
        f"create table {table} (id int primary key)",
        "select seq from mysql.seq_1_to_7",
        f"insert ignore into {table} values (1), (2), ('x')",
    ):
        (part,) = await client.query(statement)
        assert not isinstance(part, ErrorAnswer), part


async def read_diagnostics(client: AnswerClient) -> list[Answer]:
    queries = ("select row_count(), found_rows(), @@warning_count", "show warnings")
    return [keep_column_names(await client.query(query)) for query in queries]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
async def test_failed_migration_is_invisible(
    tmp_path: Path, mariadb: MariaDb, database: str, failure: Failure
) -> None:
    """On the simulated source, SHOW SESSION_STATES changes ROW_COUNT(), because it may do so on TiDB."""
    async with mariadb_session(mariadb, database=database) as reference:
        await leave_diagnostics(reference, "t")
        expected = await read_diagnostics(reference)
        await reference.query("drop table t")
    source = replace(failure.source, migration=replace(failure.source.migration, show_changes_row_count=True))
    async with run_with_failure(tmp_path, mariadb, replace(failure, source=source)) as (nodes, drain):
        client = await nodes.connect_answer_client(database=database)
        await client.query("set @a = 'kept'")
        await leave_diagnostics(client, "t")
        drain()
        await nodes.wait_stayed(failure.reason)
        assert await read_diagnostics(client) == expected
        # The session stays unchanged while Envoy retries the migration.
        for number in range(20):
            assert await client.query_row(f"select {number}, @a") == (b"%d" % number, b"kept")
        assert nodes.sessions[0] == 1
        if not failure.is_permanent:
            nodes.drain(*nodes.nodes[:2], *nodes.other_endpoints)
            await nodes.wait_session_counts(0, 0, 1)
            assert await client.query_row("select @a, database()") == (b"kept", database.encode())


async def test_statement_prepared_after_a_failed_migration_gets_a_new_id(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_with_failure(tmp_path, mariadb, FAILURES[0]) as (nodes, drain):
        client = await nodes.connect_answer_client()
        await client.send_command(MySqlCommand.STMT_PREPARE, b"select 'first'")
        first = client.statement_id
        drain()
        await nodes.wait_stayed(FAILURES[0].reason)
        await client.send_command(MySqlCommand.STMT_PREPARE, b"select 'second'")
        assert client.statement_id == first + 1
        for number, text in ((first, b"first"), (first + 1, b"second")):
            (answer,) = await client.send_command(MySqlCommand.STMT_EXECUTE, execute_body(number, ()))
            assert isinstance(answer, RowsAnswer)
            assert answer.rows[0].endswith(text)


async def test_refused_export_is_invisible(tmp_path: Path, mariadb: MariaDb, database: str) -> None:
    """A refused export must not change the session, because the module could not undo the change."""
    async with mariadb_session(mariadb, database=database) as reference:
        await leave_diagnostics(reference, "t")
        expected = await read_diagnostics(reference)
        await reference.query("drop table t")
    failure = Failure("", "", source=UNCERTIFIED)
    async with run_with_failure(tmp_path, mariadb, failure) as (nodes, drain):
        client = await nodes.connect_answer_client(database=database)
        await leave_diagnostics(client, "t")
        drain()
        await nodes.wait_stayed("refused")
        assert await read_diagnostics(client) == expected
        assert nodes.sessions == [1, 0, 0]


async def test_failed_migration_is_invisible_with_tls(
    tmp_path: Path, mariadb: MariaDb, database: str
) -> None:
    tls = PemFiles.create(tmp_path / "certificates")
    async with run_with_failure(tmp_path, mariadb, FAILURES[0], tls=tls) as (nodes, drain):
        client = await nodes.connect_answer_client(database=database)
        await client.query("set @a = 'kept'")
        drain()
        await nodes.wait_stayed(FAILURES[0].reason)
        for number in range(20):
            assert await client.query_row(f"select {number}, @a") == (b"%d" % number, b"kept")
        assert nodes.sessions[0] == 1


async def test_statement_during_a_failing_migration_runs_once(
    tmp_path: Path, mariadb: MariaDb, database: str
) -> None:
    """Statements run while the module waits for an export that times out."""
    failure = replace(FAILURES[-1], source=NodeSpec(MigrationRules(export_delay_seconds=2.2)))
    async with run_with_failure(tmp_path, mariadb, failure) as (nodes, drain):
        client = await nodes.connect_answer_client(database=database)
        await client.query("create table counted (id int auto_increment primary key)")
        drain()
        for number in range(300):
            (part,) = await client.query("insert into counted values ()")
            assert part == OkAnswer(AUTOCOMMIT, 1, number + 1)
            if await nodes.count_migrations("stayed", "slow"):
                break
        assert await client.query_row("select count(*) from counted") == (b"%d" % (number + 1),)


@pytest.mark.parametrize(
    ("setting", "text", "result", "show_changes_row_count"),
    [
        ("names gbk", "中文".encode("gbk"), "中文".encode("gbk"), False),
        ("names latin1", "süß€".encode("cp1252"), "süß€".encode("cp1252"), True),
        ("character_set_results = ascii", "süß€".encode(), b"s???", False),
    ],
    ids=["gbk", "latin1, SHOW changes the row count", "only the results are ASCII"],
)
async def test_text_that_the_export_may_lose_is_not_migrated(
    tmp_path: Path,
    mariadb: MariaDb,
    database: str,
    setting: str,
    text: bytes,
    result: bytes,
    show_changes_row_count: bool,
) -> None:
    """A node encodes states in character_set_results, and its JSON has only UTF-8."""
    async with run_fleet(
        tmp_path,
        mariadb,
        specs=[NodeSpec(MigrationRules(show_changes_row_count=show_changes_row_count)), NodeSpec()],
        drained=[1],
    ) as nodes:
        client = await nodes.connect_answer_client(database=database)
        await client.query(f"set {setting}")
        await client.query(b"prepare named from 'select ''%b'' as x'" % text)
        await client.query("create table t (id int primary key)")
        await client.query("select seq from mysql.seq_1_to_7")
        await client.query("insert into t values (1), (2)")
        nodes.drain(nodes.nodes[0])
        await nodes.wait_stayed("states")
        assert await client.query_row("select row_count(), found_rows()") == (b"2", b"7")
        assert await client.query_row("execute named") == (result,)
        await client.query("deallocate prepare named")
        await nodes.wait_session_counts(0, 1)
        assert await client.query_row(b"select '%b'" % text) == (result,)


@dataclass(frozen=True)
class Pin:
    """`statements` pin a session to its node until `unpin`. `refused`: meanwhile the node refuses exports."""

    name: str
    statements: tuple[str, ...]
    unpin: str
    refused: bool = False


PINS = (
    Pin("transaction", ("begin", "insert into t values (1)"), "commit"),
    Pin("transaction that is rolled back", ("start transaction", "select * from t"), "rollback"),
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


async def expect_client_stayed_and_other_migrated(client: AnswerClient, nodes: MigratingFleet) -> None:
    """Check that the client's session still works on its node, and that the other session has migrated."""
    for number in range(10):
        assert await client.query_row(f"select {number}") == (b"%d" % number,)
    assert nodes.sessions == [1, 1]


@in_module
@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
async def test_pinned_session_migrates_when_it_is_unpinned(
    nodes: MigratingFleet, database: str, pin: Pin
) -> None:
    client, other = await nodes.connect_answer_client(database=database), await nodes.connect_answer_client()
    await nodes.wait_session_counts(2, 0)
    await client.query("create table t (id int)")
    for statement in pin.statements:
        assert not isinstance((await client.query(statement))[-1], ErrorAnswer)
    refused = await nodes.count_migrations("stayed", "refused")
    nodes.drain(nodes.nodes[0])
    # Envoy tries to migrate both sessions at once: when `other` has migrated, Envoy has tried `client`, too.
    await nodes.wait_session_counts(1, 1)
    await expect_client_stayed_and_other_migrated(client, nodes)
    if pin.refused:
        await nodes.wait_stayed("refused", refused + 1)
    else:
        await nodes.wait_pinned("transaction")
    assert not isinstance((await client.query(pin.unpin))[-1], ErrorAnswer)
    await nodes.wait_session_counts(0, 2)
    assert await client.query_row("select database()") == (database.encode(),)
    assert await other.query_row("select 1") == (b"1",)


async def test_opaque_session_stays(tmp_path: Path, mariadb: MariaDb) -> None:
    """A compressed session is opaque: the module cannot parse it."""
    compressed = ModuleConfig(client={"compression": "passthrough"})
    async with run_fleet(tmp_path, mariadb, config=compressed, drained=[1]) as nodes:
        await nodes.connect_answer_client(CAPABILITIES | Capability.COMPRESS)
        other = await nodes.connect_answer_client()
        nodes.drain(nodes.nodes[0])
        await nodes.wait_session_counts(1, 1)
        assert await other.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
        await nodes.wait_pinned("opaque")
        assert nodes.sessions == [1, 1]


async def test_sessions_that_are_pinned_intermittently_all_migrate(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, specs=THREE_NODES, drained=[1, 2]) as nodes:
        clients = [await nodes.connect_answer_client() for _ in range(20)]
        for client in clients:
            await client.query("begin")
        nodes.drain(nodes.nodes[0])
        for client in clients:
            assert await client.query_row("select 1") == (b"1",)
            assert await client.query("commit") == (OkAnswer(AUTOCOMMIT),)
        await wait_until(lambda: not nodes.sessions[0])
        assert sum(nodes.sessions) == 20


STOPPING_NODES = (NodeSpec(graceful_wait=60), NodeSpec())


@asynccontextmanager
async def first_node_stopping(nodes: MigratingFleet) -> AsyncIterator[None]:
    """Stop the first node: it serves sessions during the block (graceful wait), and then crashes."""
    first = nodes.nodes[0]
    first.request_stop()
    try:
        await wait_until(lambda: first.node.is_reporting_shutdown)
        yield
        assert nodes.sessions[0] == 0
    finally:
        first.crash()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_ping_migrates_the_sessions_of_a_stopping_node(
    tmp_path: Path, mariadb: MariaDb, tls: bool
) -> None:
    certificates = PemFiles.create(tmp_path / "certificates") if tls else None
    async with run_fleet(tmp_path, mariadb, specs=STOPPING_NODES, tls=certificates, drained=[1]) as nodes:
        client, other = await nodes.connect_answer_client(), await nodes.connect_answer_client()
        await client.query("set @a = 7, autocommit = 0")
        assert await client.send_command(MySqlCommand.PING) == (OkAnswer(0),)
        async with first_node_stopping(nodes):
            nodes.drain()
            assert await client.send_command(MySqlCommand.PING) == (OkAnswer(0),)
            await nodes.wait_session_counts(0, 2)
            for _ in range(3):
                assert await client.send_command(MySqlCommand.PING) == (OkAnswer(0),)
                assert await other.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
            assert await client.query_row("select @a") == (b"7",)


async def test_ping_in_a_transaction_migrates_after_the_commit(
    tmp_path: Path, mariadb: MariaDb, database: str
) -> None:
    async with run_fleet(tmp_path, mariadb, specs=STOPPING_NODES, drained=[1]) as nodes:
        client = await nodes.connect_answer_client(database=database)
        await client.query("create table t (id int)")
        await client.query("begin")
        await client.query("insert into t values (1)")
        async with first_node_stopping(nodes):
            nodes.drain()
            for _ in range(3):
                assert await client.send_command(MySqlCommand.PING) == (
                    OkAnswer(AUTOCOMMIT | IN_TRANSACTION),
                )
                assert await client.query_row("select count(*) from t") == (b"1",)
            assert nodes.sessions == [1, 0]
            await client.query("commit")
            await nodes.wait_session_counts(0, 1)
            assert await client.query_row("select count(*) from t") == (b"1",)


async def test_ping_is_answered_without_another_node(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, specs=STOPPING_NODES, drained=[1]) as nodes:
        client = await nodes.connect_answer_client()
        async with first_node_stopping(nodes):
            for _ in range(3):
                assert await client.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
                assert await client.query_row("select 1") == (b"1",)
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
    async with run_fleet(tmp_path, mariadb, specs=STOPPING_NODES, drained=[1]) as nodes:
        client = await nodes.connect_answer_client()
        expected = [await client.send_command(command, body) for command, body in commands]
        async with first_node_stopping(nodes):
            nodes.drain()
            client.writer.write(b"".join(encode_command(command, body) for command, body in commands))
            assert [await client.read_answer(command) for command, _ in commands] == expected
            await nodes.wait_session_counts(0, 1)
            assert await client.query_row("select @a") == (b"1",)


@in_module
async def test_session_that_logs_in_during_a_drain_migrates(nodes: MigratingFleet) -> None:
    other = await nodes.connect_answer_client()
    await nodes.wait_session_counts(1, 0)
    new_client = await nodes.proxy.connect()
    await new_client.read_packet()
    nodes.drain(nodes.nodes[0])
    # When the other session has migrated, the worker has applied the drain.
    await nodes.wait_session_counts(0, 1)
    new_client.writer.write(login_packet())
    assert (await with_timeout(new_client.read_packet()))[1] == OK_PAYLOAD
    await nodes.wait_session_counts(0, 2)
    assert await other.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
