"""Prepared statements of the binary protocol, in sessions that move."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import AUTOCOMMIT, LAST_ROW_SENT, Capability, Command
from tests.support.clients.server import Certificates
from tests.support.migration.fleet import Fleet, fleet, unmoved
from tests.support.migration.sql_client import (
    Failed,
    Ok,
    Prepared,
    Rows,
    Sent,
    Wire,
    executed,
    fetched,
    long_data,
    request,
)
from tests.support.tidb_sim_clients import CAPABILITIES

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["plain, with EOF", "tls, without EOF"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb
) -> AsyncIterator[Fleet]:
    """Two nodes, plain, or with TLS on both sides of Envoy."""
    directory = tmp_path_factory.mktemp("prepared")
    tls = Certificates.make(directory / "certificates") if "tls" in request.param else None
    async with fleet(directory, mariadb, tls=tls) as all_:
        yield all_


@pytest.fixture
def capabilities(running: Fleet) -> Capability:
    """Both ways in which rows end are followed, one in each fleet."""
    return CAPABILITIES if running.tls is None else CAPABILITIES | Capability.DEPRECATE_EOF


async def prepare(wire: Wire, text: str) -> int:
    (prepared,) = await wire.ask(Command.STMT_PREPARE, text.encode())
    assert isinstance(prepared, Prepared), prepared
    return wire.number


async def execute(wire: Wire, body: bytes) -> Rows:
    (rows,) = await wire.ask(Command.STMT_EXECUTE, body)
    assert isinstance(rows, Rows), rows
    return rows


async def test_numbers_and_types_are_kept(nodes: Fleet, mariadb: MariaDb, capabilities: Capability) -> None:
    texts = ("select 'closed'", "select ?, concat(?, ':', ?), hex(?)", "select 'third' as x", "select ? + 1")
    values = [(5, b"abc", None, "ü".encode()), (-7, b"", b"x" * 300, b"\0\xff"), (1 << 40, None, None, b"'")]
    async with unmoved(mariadb, capabilities) as control:
        numbers = [await prepare(control, text) for text in texts]
        expected = [await execute(control, executed(numbers[1], row)) for row in values]
        third = await execute(control, executed(numbers[2], ()))
    wire = await nodes.wire(capabilities)
    assert [await prepare(wire, text) for text in texts] == [1, 2, 3, 4]
    wire.writer.write(request(Command.STMT_CLOSE, struct.pack("<I", 1)))
    assert await execute(wire, executed(2, values[0])) == expected[0]
    for turn in range(3):
        await nodes.move()
        # The types were told at the first node, and are not told again.
        for row, answer in zip(values, expected, strict=True):
            assert await execute(wire, executed(2, row, types=False)) == answer
        assert await execute(wire, executed(3, ())) == third
        (gone,) = await wire.ask(Command.STMT_EXECUTE, executed(1, ()))
        assert isinstance(gone, Failed)
        assert gone.code == 1105
        assert await prepare(wire, "select 'new'") == 5 + turn
    # The types of one that was never executed come with its first execution, and hold at the next node.
    assert (await execute(wire, executed(4, (41,)))).rows[0].endswith(struct.pack("<q", 42))
    await nodes.move()
    assert (await execute(wire, executed(4, (1,), types=False))).rows[0].endswith(struct.pack("<q", 2))
    # Others may be told at any time.
    double = struct.pack("<d", 3.0)
    assert (await execute(wire, executed(4, (b"2",)))).rows[0].endswith(double)
    await nodes.move()
    assert (await execute(wire, executed(4, (b"2",), types=False))).rows[0].endswith(double)


async def test_hundreds_of_them_are_kept(nodes: Fleet, capabilities: Capability) -> None:
    wire = await nodes.wire(capabilities)
    comment = "/*" + 'it\'s \\ "long" ü' * 100 + "*/"
    for number in range(300):
        assert await prepare(wire, f"select {number}, ? {comment}") == number + 1
    for _ in range(2):
        await nodes.move()
        for number in (0, 17, 299):
            rows = await execute(wire, executed(number + 1, (b"ok",)))
            assert rows.rows[0][2:] == struct.pack("<i", number) + b"\x02ok"


async def test_they_stay_in_the_database_that_they_were_prepared_in(
    nodes: Fleet, database: str, capabilities: Capability
) -> None:
    wire = await nodes.wire(capabilities, database=database)
    await wire.query("create table t (id int)")
    await wire.query("insert into t values (7)")
    number = await prepare(wire, "select id from t")
    await wire.query("use mysql")
    for _ in range(2):
        await nodes.move()
        assert (await execute(wire, executed(number, ()))).rows == (b"\0\0" + struct.pack("<i", 7),)
        assert await wire.one("select database()") == (b"mysql",)


async def test_long_data_goes_to_the_node_where_the_session_is(
    nodes: Fleet, capabilities: Capability
) -> None:
    wire = await nodes.wire(capabilities)
    number = await prepare(wire, "select length(?), right(?, 3)")
    for _ in range(3):
        for piece in (b"a" * 70_000, b"bc", b"def"):
            wire.writer.write(request(Command.STMT_SEND_LONG_DATA, long_data(number, 0, piece)))
        wire.writer.write(request(Command.STMT_SEND_LONG_DATA, long_data(number, 1, b"xyz")))
        answer = await execute(wire, executed(number, (Sent.LONG_DATA, Sent.LONG_DATA)))
        assert answer.rows[0][2:] == struct.pack("<q", 70_005)[: len(answer.rows[0]) - 6] + b"\x03xyz"
        assert await wire.ask(Command.STMT_RESET, struct.pack("<I", number)) == (Ok(answer.status),)
        await nodes.move()


async def test_a_cursor_is_read_to_its_end(nodes: Fleet, capabilities: Capability) -> None:
    wire = await nodes.wire(capabilities)
    number = await prepare(wire, "select seq from mysql.seq_1_to_5")
    for _ in range(2):
        assert (await execute(wire, executed(number, (), flags=1))).rows == ()
        for rows in (3, 2):
            (part,) = await wire.ask(Command.STMT_FETCH, fetched(number, 3))
            assert isinstance(part, Rows)
            assert len(part.rows) == rows
            last = part
        assert last.status & LAST_ROW_SENT
        await nodes.move()


@pytest.mark.parametrize("frees", ["fetch", "reset", "close", "execute"])
async def test_a_cursor_is_read_where_it_is(nodes: Fleet, frees: str, capabilities: Capability) -> None:
    nodes.drain(nodes.nodes[1])
    wire, _ = await nodes.wire(capabilities), await nodes.wire()
    await nodes.settled(2, 0)
    await wire.ask(Command.STMT_PREPARE, b"select seq from mysql.seq_1_to_5")
    (opened,) = await wire.ask(Command.STMT_EXECUTE, executed(1, (), flags=1))
    assert isinstance(opened, Rows)
    nodes.drain(nodes.nodes[0])
    await nodes.settled(1, 1)
    (some,) = await wire.ask(Command.STMT_FETCH, fetched(1, 2))
    assert isinstance(some, Rows)
    assert len(some.rows) == 2
    await nodes.pinned("cursor")
    assert nodes.sessions == [1, 1]
    number = struct.pack("<I", 1)
    match frees:
        case "fetch":
            (others,) = await wire.ask(Command.STMT_FETCH, fetched(1, 9))
            assert isinstance(others, Rows)
            assert len(others.rows) == 3
        case "reset":
            assert await wire.ask(Command.STMT_RESET, number) == (Ok(AUTOCOMMIT),)
        case "close":
            wire.writer.write(request(Command.STMT_CLOSE, number))
        case "execute":
            (all_,) = await wire.ask(Command.STMT_EXECUTE, executed(1, ()))
            assert isinstance(all_, Rows)
            assert len(all_.rows) == 5
    await nodes.settled(0, 2)
    (answer,) = await wire.ask(Command.STMT_EXECUTE, executed(1, ()))
    assert isinstance(answer, Failed if frees == "close" else Rows)


async def test_long_data_is_used_where_it_is(nodes: Fleet, capabilities: Capability) -> None:
    nodes.drain(nodes.nodes[1])
    wire, _ = await nodes.wire(capabilities), await nodes.wire()
    await nodes.settled(2, 0)
    await wire.ask(Command.STMT_PREPARE, b"select length(?)")
    for _ in range(3):
        wire.writer.write(request(Command.STMT_SEND_LONG_DATA, long_data(1, 0, b"x" * 100_000)))
    assert await wire.ask(Command.PING) == (Ok(AUTOCOMMIT),)
    nodes.drain(nodes.nodes[0])
    await nodes.settled(1, 1)
    await nodes.pinned("long_data")
    assert await wire.ask(Command.PING) == (Ok(AUTOCOMMIT),)
    assert nodes.sessions == [1, 1]
    (length,) = await wire.ask(Command.STMT_EXECUTE, executed(1, (Sent.LONG_DATA,)))
    assert isinstance(length, Rows)
    assert length.rows[0][2:6] == struct.pack("<I", 300_000)
    await nodes.settled(0, 2)
