"""Prepared statements of the binary protocol survive a migration, or pin their session to its node."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import AUTOCOMMIT, LAST_ROW_SENT, Capability, MySqlCommand
from tests.support.clients.server import PemFiles
from tests.support.migration.fleet import MigratingFleet, mariadb_session, run_fleet
from tests.support.migration.sql_client import (
    AnswerClient,
    ErrorAnswer,
    OkAnswer,
    ParameterSource,
    PrepareAnswer,
    RowsAnswer,
    encode_command,
    execute_body,
    fetch_body,
    long_data_body,
)
from tests.support.tidb_sim_clients import CAPABILITIES

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["plain, with EOF", "tls, without EOF"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb
) -> AsyncIterator[MigratingFleet]:
    """Yield two nodes, without TLS or with TLS on both sides of Envoy."""
    directory = tmp_path_factory.mktemp("prepared")
    tls = PemFiles.create(directory / "certificates") if "tls" in request.param else None
    async with run_fleet(directory, mariadb, tls=tls) as fleet:
        yield fleet


@pytest.fixture
def capabilities(running: MigratingFleet) -> Capability:
    """Return the client's capabilities: DEPRECATE_EOF with TLS, EOF packets without TLS."""
    return CAPABILITIES if running.tls is None else CAPABILITIES | Capability.DEPRECATE_EOF


async def prepare(client: AnswerClient, text: str) -> int:
    (prepared,) = await client.send_command(MySqlCommand.STMT_PREPARE, text.encode())
    assert isinstance(prepared, PrepareAnswer), prepared
    return client.statement_id


async def execute(client: AnswerClient, body: bytes) -> RowsAnswer:
    (rows,) = await client.send_command(MySqlCommand.STMT_EXECUTE, body)
    assert isinstance(rows, RowsAnswer), rows
    return rows


async def test_statement_ids_and_types_survive_migrations(
    nodes: MigratingFleet, mariadb: MariaDb, capabilities: Capability
) -> None:
    texts = ("select 'closed'", "select ?, concat(?, ':', ?), hex(?)", "select 'third' as x", "select ? + 1")
    values = [(5, b"abc", None, "ü".encode()), (-7, b"", b"x" * 300, b"\0\xff"), (1 << 40, None, None, b"'")]
    async with mariadb_session(mariadb, capabilities) as reference:
        statement_ids = [await prepare(reference, text) for text in texts]
        expected = [await execute(reference, execute_body(statement_ids[1], row)) for row in values]
        third = await execute(reference, execute_body(statement_ids[2], ()))
    client = await nodes.connect_answer_client(capabilities)
    assert [await prepare(client, text) for text in texts] == [1, 2, 3, 4]
    client.writer.write(encode_command(MySqlCommand.STMT_CLOSE, struct.pack("<I", 1)))
    assert await execute(client, execute_body(2, values[0])) == expected[0]
    for migration in range(3):
        await nodes.migrate_all()
        # The client has sent the parameter types to the first node, and does not send them again.
        for row, answer in zip(values, expected, strict=True):
            assert await execute(client, execute_body(2, row, types=False)) == answer
        assert await execute(client, execute_body(3, ())) == third
        (closed,) = await client.send_command(MySqlCommand.STMT_EXECUTE, execute_body(1, ()))
        assert isinstance(closed, ErrorAnswer)
        assert closed.code == 1105
        assert await prepare(client, "select 'new'") == 5 + migration
    # The client sends the types with the first execution. They stay valid on the next node.
    assert (await execute(client, execute_body(4, (41,)))).rows[0].endswith(struct.pack("<q", 42))
    await nodes.migrate_all()
    assert (await execute(client, execute_body(4, (1,), types=False))).rows[0].endswith(struct.pack("<q", 2))
    # A client may send other types at any time.
    double = struct.pack("<d", 3.0)
    assert (await execute(client, execute_body(4, (b"2",)))).rows[0].endswith(double)
    await nodes.migrate_all()
    assert (await execute(client, execute_body(4, (b"2",), types=False))).rows[0].endswith(double)


async def test_hundreds_of_statements_survive_migrations(
    nodes: MigratingFleet, capabilities: Capability
) -> None:
    client = await nodes.connect_answer_client(capabilities)
    comment = "/*" + 'it\'s \\ "long" ü' * 100 + "*/"
    for number in range(300):
        assert await prepare(client, f"select {number}, ? {comment}") == number + 1
    for _ in range(2):
        await nodes.migrate_all()
        for number in (0, 17, 299):
            rows = await execute(client, execute_body(number + 1, (b"ok",)))
            assert rows.rows[0][2:] == struct.pack("<i", number) + b"\x02ok"


async def test_statements_keep_the_database_that_they_were_prepared_in(
    nodes: MigratingFleet, database: str, capabilities: Capability
) -> None:
    client = await nodes.connect_answer_client(capabilities, database=database)
    await client.query("create table t (id int)")
    await client.query("insert into t values (7)")
    statement_id = await prepare(client, "select id from t")
    await client.query("use mysql")
    for _ in range(2):
        await nodes.migrate_all()
        assert (await execute(client, execute_body(statement_id, ()))).rows == (
            b"\0\0" + struct.pack("<i", 7),
        )
        assert await client.query_row("select database()") == (b"mysql",)


async def test_long_data_reaches_the_node_that_has_the_session(
    nodes: MigratingFleet, capabilities: Capability
) -> None:
    client = await nodes.connect_answer_client(capabilities)
    statement_id = await prepare(client, "select length(?), right(?, 3)")
    for _ in range(3):
        for piece in (b"a" * 70_000, b"bc", b"def"):
            client.writer.write(
                encode_command(MySqlCommand.STMT_SEND_LONG_DATA, long_data_body(statement_id, 0, piece))
            )
        client.writer.write(
            encode_command(MySqlCommand.STMT_SEND_LONG_DATA, long_data_body(statement_id, 1, b"xyz"))
        )
        answer = await execute(
            client, execute_body(statement_id, (ParameterSource.LONG_DATA, ParameterSource.LONG_DATA))
        )
        assert answer.rows[0][2:] == struct.pack("<q", 70_005)[: len(answer.rows[0]) - 6] + b"\x03xyz"
        assert await client.send_command(MySqlCommand.STMT_RESET, struct.pack("<I", statement_id)) == (
            OkAnswer(answer.status),
        )
        await nodes.migrate_all()


async def test_cursor_is_readable_after_a_migration(nodes: MigratingFleet, capabilities: Capability) -> None:
    client = await nodes.connect_answer_client(capabilities)
    statement_id = await prepare(client, "select seq from mysql.seq_1_to_5")
    for _ in range(2):
        assert (await execute(client, execute_body(statement_id, (), flags=1))).rows == ()
        for rows in (3, 2):
            (fetched,) = await client.send_command(MySqlCommand.STMT_FETCH, fetch_body(statement_id, 3))
            assert isinstance(fetched, RowsAnswer)
            assert len(fetched.rows) == rows
            last = fetched
        assert last.status & LAST_ROW_SENT
        await nodes.migrate_all()


@pytest.mark.parametrize("unpin_by", ["fetch", "reset", "close", "execute"])
async def test_open_cursor_pins_the_session(
    nodes: MigratingFleet, unpin_by: str, capabilities: Capability
) -> None:
    nodes.drain(nodes.nodes[1])
    client, _ = await nodes.connect_answer_client(capabilities), await nodes.connect_answer_client()
    await nodes.wait_session_counts(2, 0)
    await client.send_command(MySqlCommand.STMT_PREPARE, b"select seq from mysql.seq_1_to_5")
    (opened,) = await client.send_command(MySqlCommand.STMT_EXECUTE, execute_body(1, (), flags=1))
    assert isinstance(opened, RowsAnswer)
    nodes.drain(nodes.nodes[0])
    await nodes.wait_session_counts(1, 1)
    (first_rows,) = await client.send_command(MySqlCommand.STMT_FETCH, fetch_body(1, 2))
    assert isinstance(first_rows, RowsAnswer)
    assert len(first_rows.rows) == 2
    await nodes.wait_pinned("cursor")
    assert nodes.sessions == [1, 1]
    number = struct.pack("<I", 1)
    match unpin_by:
        case "fetch":
            (last_rows,) = await client.send_command(MySqlCommand.STMT_FETCH, fetch_body(1, 9))
            assert isinstance(last_rows, RowsAnswer)
            assert len(last_rows.rows) == 3
        case "reset":
            assert await client.send_command(MySqlCommand.STMT_RESET, number) == (OkAnswer(AUTOCOMMIT),)
        case "close":
            client.writer.write(encode_command(MySqlCommand.STMT_CLOSE, number))
        case "execute":
            (all_rows,) = await client.send_command(MySqlCommand.STMT_EXECUTE, execute_body(1, ()))
            assert isinstance(all_rows, RowsAnswer)
            assert len(all_rows.rows) == 5
    await nodes.wait_session_counts(0, 2)
    (answer,) = await client.send_command(MySqlCommand.STMT_EXECUTE, execute_body(1, ()))
    assert isinstance(answer, ErrorAnswer if unpin_by == "close" else RowsAnswer)


async def test_long_data_pins_the_session(nodes: MigratingFleet, capabilities: Capability) -> None:
    nodes.drain(nodes.nodes[1])
    client, _ = await nodes.connect_answer_client(capabilities), await nodes.connect_answer_client()
    await nodes.wait_session_counts(2, 0)
    await client.send_command(MySqlCommand.STMT_PREPARE, b"select length(?)")
    for _ in range(3):
        client.writer.write(
            encode_command(MySqlCommand.STMT_SEND_LONG_DATA, long_data_body(1, 0, b"x" * 100_000))
        )
    assert await client.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
    nodes.drain(nodes.nodes[0])
    await nodes.wait_session_counts(1, 1)
    await nodes.wait_pinned("long_data")
    assert await client.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
    assert nodes.sessions == [1, 1]
    (length,) = await client.send_command(
        MySqlCommand.STMT_EXECUTE, execute_body(1, (ParameterSource.LONG_DATA,))
    )
    assert isinstance(length, RowsAnswer)
    assert length.rows[0][2:6] == struct.pack("<I", 300_000)
    await nodes.wait_session_counts(0, 2)


async def test_rejected_long_data_does_not_pin_the_session(
    nodes: MigratingFleet, capabilities: Capability
) -> None:
    """TiDB responds to COM_STMT_SEND_LONG_DATA only if it does not know the statement."""
    client = await nodes.connect_answer_client(capabilities)
    unknown_statement = 99
    client.writer.write(
        encode_command(MySqlCommand.STMT_SEND_LONG_DATA, long_data_body(unknown_statement, 0, b"x"))
    )
    (error,) = await client.read_answer(MySqlCommand.QUERY)
    assert isinstance(error, ErrorAnswer)
    assert b"1243" in error.message
    await nodes.migrate_all()
    assert await client.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)


async def test_long_data_of_a_failed_execution_does_not_pin_the_session(
    nodes: MigratingFleet, capabilities: Capability
) -> None:
    client = await nodes.connect_answer_client(capabilities)
    statement = await prepare(client, "select length(?) + (select 1 union select 2)")
    client.writer.write(encode_command(MySqlCommand.STMT_SEND_LONG_DATA, long_data_body(statement, 0, b"x")))
    (error,) = await client.send_command(
        MySqlCommand.STMT_EXECUTE, execute_body(statement, (ParameterSource.LONG_DATA,))
    )
    assert isinstance(error, ErrorAnswer)
    # Only now is it certain that the error was not the response to the long data.
    assert await client.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
    await nodes.migrate_all()
    assert await client.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
