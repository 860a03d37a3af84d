"""Prepared statements of the binary protocol, in sessions that move."""

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
    """Two nodes, plain, or with TLS on both sides of Envoy."""
    directory = tmp_path_factory.mktemp("prepared")
    tls = PemFiles.create(directory / "certificates") if "tls" in request.param else None
    async with run_fleet(directory, mariadb, tls=tls) as all_:
        yield all_


@pytest.fixture
def capabilities(running: MigratingFleet) -> Capability:
    """Both ways in which rows end are followed, one in each fleet."""
    return CAPABILITIES if running.tls is None else CAPABILITIES | Capability.DEPRECATE_EOF


async def prepare(wire: AnswerClient, text: str) -> int:
    (prepared,) = await wire.send_command(MySqlCommand.STMT_PREPARE, text.encode())
    assert isinstance(prepared, PrepareAnswer), prepared
    return wire.statement_id


async def execute(wire: AnswerClient, body: bytes) -> RowsAnswer:
    (rows,) = await wire.send_command(MySqlCommand.STMT_EXECUTE, body)
    assert isinstance(rows, RowsAnswer), rows
    return rows


async def test_numbers_and_types_are_kept(
    nodes: MigratingFleet, mariadb: MariaDb, capabilities: Capability
) -> None:
    texts = ("select 'closed'", "select ?, concat(?, ':', ?), hex(?)", "select 'third' as x", "select ? + 1")
    values = [(5, b"abc", None, "ü".encode()), (-7, b"", b"x" * 300, b"\0\xff"), (1 << 40, None, None, b"'")]
    async with mariadb_session(mariadb, capabilities) as control:
        numbers = [await prepare(control, text) for text in texts]
        expected = [await execute(control, execute_body(numbers[1], row)) for row in values]
        third = await execute(control, execute_body(numbers[2], ()))
    wire = await nodes.connect_answer_client(capabilities)
    assert [await prepare(wire, text) for text in texts] == [1, 2, 3, 4]
    wire.writer.write(encode_command(MySqlCommand.STMT_CLOSE, struct.pack("<I", 1)))
    assert await execute(wire, execute_body(2, values[0])) == expected[0]
    for turn in range(3):
        await nodes.migrate_all()
        # The types were told at the first node, and are not told again.
        for row, answer in zip(values, expected, strict=True):
            assert await execute(wire, execute_body(2, row, types=False)) == answer
        assert await execute(wire, execute_body(3, ())) == third
        (gone,) = await wire.send_command(MySqlCommand.STMT_EXECUTE, execute_body(1, ()))
        assert isinstance(gone, ErrorAnswer)
        assert gone.code == 1105
        assert await prepare(wire, "select 'new'") == 5 + turn
    # The types of one that was never executed come with its first execution, and hold at the next node.
    assert (await execute(wire, execute_body(4, (41,)))).rows[0].endswith(struct.pack("<q", 42))
    await nodes.migrate_all()
    assert (await execute(wire, execute_body(4, (1,), types=False))).rows[0].endswith(struct.pack("<q", 2))
    # Others may be told at any time.
    double = struct.pack("<d", 3.0)
    assert (await execute(wire, execute_body(4, (b"2",)))).rows[0].endswith(double)
    await nodes.migrate_all()
    assert (await execute(wire, execute_body(4, (b"2",), types=False))).rows[0].endswith(double)


async def test_hundreds_of_them_are_kept(nodes: MigratingFleet, capabilities: Capability) -> None:
    wire = await nodes.connect_answer_client(capabilities)
    comment = "/*" + 'it\'s \\ "long" ü' * 100 + "*/"
    for number in range(300):
        assert await prepare(wire, f"select {number}, ? {comment}") == number + 1
    for _ in range(2):
        await nodes.migrate_all()
        for number in (0, 17, 299):
            rows = await execute(wire, execute_body(number + 1, (b"ok",)))
            assert rows.rows[0][2:] == struct.pack("<i", number) + b"\x02ok"


async def test_they_stay_in_the_database_that_they_were_prepared_in(
    nodes: MigratingFleet, database: str, capabilities: Capability
) -> None:
    wire = await nodes.connect_answer_client(capabilities, database=database)
    await wire.query("create table t (id int)")
    await wire.query("insert into t values (7)")
    number = await prepare(wire, "select id from t")
    await wire.query("use mysql")
    for _ in range(2):
        await nodes.migrate_all()
        assert (await execute(wire, execute_body(number, ()))).rows == (b"\0\0" + struct.pack("<i", 7),)
        assert await wire.query_row("select database()") == (b"mysql",)


async def test_long_data_goes_to_the_node_where_the_session_is(
    nodes: MigratingFleet, capabilities: Capability
) -> None:
    wire = await nodes.connect_answer_client(capabilities)
    number = await prepare(wire, "select length(?), right(?, 3)")
    for _ in range(3):
        for piece in (b"a" * 70_000, b"bc", b"def"):
            wire.writer.write(
                encode_command(MySqlCommand.STMT_SEND_LONG_DATA, long_data_body(number, 0, piece))
            )
        wire.writer.write(encode_command(MySqlCommand.STMT_SEND_LONG_DATA, long_data_body(number, 1, b"xyz")))
        answer = await execute(
            wire, execute_body(number, (ParameterSource.LONG_DATA, ParameterSource.LONG_DATA))
        )
        assert answer.rows[0][2:] == struct.pack("<q", 70_005)[: len(answer.rows[0]) - 6] + b"\x03xyz"
        assert await wire.send_command(MySqlCommand.STMT_RESET, struct.pack("<I", number)) == (
            OkAnswer(answer.status),
        )
        await nodes.migrate_all()


async def test_a_cursor_is_read_to_its_end(nodes: MigratingFleet, capabilities: Capability) -> None:
    wire = await nodes.connect_answer_client(capabilities)
    number = await prepare(wire, "select seq from mysql.seq_1_to_5")
    for _ in range(2):
        assert (await execute(wire, execute_body(number, (), flags=1))).rows == ()
        for rows in (3, 2):
            (part,) = await wire.send_command(MySqlCommand.STMT_FETCH, fetch_body(number, 3))
            assert isinstance(part, RowsAnswer)
            assert len(part.rows) == rows
            last = part
        assert last.status & LAST_ROW_SENT
        await nodes.migrate_all()


@pytest.mark.parametrize("frees", ["fetch", "reset", "close", "execute"])
async def test_a_cursor_is_read_where_it_is(
    nodes: MigratingFleet, frees: str, capabilities: Capability
) -> None:
    nodes.drain(nodes.nodes[1])
    wire, _ = await nodes.connect_answer_client(capabilities), await nodes.connect_answer_client()
    await nodes.wait_session_counts(2, 0)
    await wire.send_command(MySqlCommand.STMT_PREPARE, b"select seq from mysql.seq_1_to_5")
    (opened,) = await wire.send_command(MySqlCommand.STMT_EXECUTE, execute_body(1, (), flags=1))
    assert isinstance(opened, RowsAnswer)
    nodes.drain(nodes.nodes[0])
    await nodes.wait_session_counts(1, 1)
    (some,) = await wire.send_command(MySqlCommand.STMT_FETCH, fetch_body(1, 2))
    assert isinstance(some, RowsAnswer)
    assert len(some.rows) == 2
    await nodes.wait_pinned("cursor")
    assert nodes.sessions == [1, 1]
    number = struct.pack("<I", 1)
    match frees:
        case "fetch":
            (others,) = await wire.send_command(MySqlCommand.STMT_FETCH, fetch_body(1, 9))
            assert isinstance(others, RowsAnswer)
            assert len(others.rows) == 3
        case "reset":
            assert await wire.send_command(MySqlCommand.STMT_RESET, number) == (OkAnswer(AUTOCOMMIT),)
        case "close":
            wire.writer.write(encode_command(MySqlCommand.STMT_CLOSE, number))
        case "execute":
            (all_,) = await wire.send_command(MySqlCommand.STMT_EXECUTE, execute_body(1, ()))
            assert isinstance(all_, RowsAnswer)
            assert len(all_.rows) == 5
    await nodes.wait_session_counts(0, 2)
    (answer,) = await wire.send_command(MySqlCommand.STMT_EXECUTE, execute_body(1, ()))
    assert isinstance(answer, ErrorAnswer if frees == "close" else RowsAnswer)


async def test_long_data_is_used_where_it_is(nodes: MigratingFleet, capabilities: Capability) -> None:
    nodes.drain(nodes.nodes[1])
    wire, _ = await nodes.connect_answer_client(capabilities), await nodes.connect_answer_client()
    await nodes.wait_session_counts(2, 0)
    await wire.send_command(MySqlCommand.STMT_PREPARE, b"select length(?)")
    for _ in range(3):
        wire.writer.write(
            encode_command(MySqlCommand.STMT_SEND_LONG_DATA, long_data_body(1, 0, b"x" * 100_000))
        )
    assert await wire.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
    nodes.drain(nodes.nodes[0])
    await nodes.wait_session_counts(1, 1)
    await nodes.wait_pinned("long_data")
    assert await wire.send_command(MySqlCommand.PING) == (OkAnswer(AUTOCOMMIT),)
    assert nodes.sessions == [1, 1]
    (length,) = await wire.send_command(
        MySqlCommand.STMT_EXECUTE, execute_body(1, (ParameterSource.LONG_DATA,))
    )
    assert isinstance(length, RowsAnswer)
    assert length.rows[0][2:6] == struct.pack("<I", 300_000)
    await nodes.wait_session_counts(0, 2)
