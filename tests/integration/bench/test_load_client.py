"""Our load client against a real MariaDB, with and without TLS."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pymysql
import pytest
import pytest_asyncio

from bench.load_client import LoadClient, LoadTarget, LoginOptions
from sandbox.child_process import ProcessFailed
from sandbox.mariadb import MariaDb
from tests.support.clients.server import MatrixMariaDb, PemFiles

# The first build takes minutes where nothing has been built before.
pytestmark = pytest.mark.timeout(900)

MANY_ROWS = "select rpad(seq, 40, 'x') from mysql.seq_1_to_10000"


@pytest.fixture
async def client(tmp_path: Path) -> LoadClient:
    return await LoadClient.create(tmp_path)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secure(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MatrixMariaDb]:
    """A MariaDB that offers TLS."""
    async with MatrixMariaDb.start(tmp_path_factory.mktemp("secure")) as server:
        yield server


async def test_all_connections_ask_at_full_speed(client: LoadClient, mariadb: MariaDb) -> None:
    async with client.slices([LoadTarget(mariadb.port)], connections=8) as slices:
        for seconds in (0.03, 0.5):
            measured = await slices.run(0, seconds)
            assert len(measured.latencies) > 200 * seconds
            assert all(0 < latency < 10_000 for latency in measured.latencies)
            assert measured.new_connections == []
            assert 0 < measured.seconds < 10


async def test_large_results_are_read(client: LoadClient, mariadb: MariaDb) -> None:
    async with client.slices([LoadTarget(mariadb.port)], connections=2, statement=MANY_ROWS) as slices:
        assert len((await slices.run(0, 0.5)).latencies) > 2


async def test_statements_keep_to_their_rate(client: LoadClient, mariadb: MariaDb) -> None:
    statement = "select seq from mysql.seq_1_to_2000 where seq between {} and {}+99"
    async with client.slices(
        [LoadTarget(mariadb.port)], connections=32, statement=statement, numbers=1000
    ) as slices:
        assert len((await slices.run(0, 1.0, rate=400)).latencies) == pytest.approx(400, abs=1)
        assert len((await slices.run(0, 0.05, rate=6000)).latencies) == pytest.approx(300, abs=1)
        assert (await slices.run(0, 0.05, rate=0)).latencies == []


async def test_what_was_due_is_asked_although_the_server_is_slow(
    client: LoadClient, mariadb: MariaDb
) -> None:
    statement = "select sleep(0.01)"
    async with client.slices([LoadTarget(mariadb.port)], connections=2, statement=statement) as slices:
        measured = await slices.run(0, 0.1, rate=1000)  # five times as many as can be answered
    assert len(measured.latencies) == pytest.approx(100, abs=1)
    assert measured.seconds >= 0.5
    assert min(measured.latencies) >= 10
    assert max(measured.latencies) > 300  # it counts from when they were due


async def test_new_connections_come_and_go(client: LoadClient, mariadb: MariaDb) -> None:
    async with client.slices([LoadTarget(mariadb.port)], connections=4) as slices:
        measured = await slices.run(0, 0.5, rate=200, new_connections=50)
        assert len(measured.latencies) == pytest.approx(100, abs=1)
        assert len(measured.new_connections) == pytest.approx(25, abs=1)
        assert all(0 < each < 10_000 for each in measured.new_connections)
    async with client.slices([LoadTarget(mariadb.port)], connections=0) as slices:
        measured = await slices.run(0, 0.5, new_connections=50)
        assert measured.latencies == []
        assert len(measured.new_connections) == pytest.approx(25, abs=1)


async def test_a_wrong_statement_is_no_measurement(client: LoadClient, mariadb: MariaDb) -> None:
    async with client.slices([LoadTarget(mariadb.port)], connections=2, statement="select nothing") as slices:
        with pytest.raises(ProcessFailed, match="error 1054: Unknown column 'nothing'"):
            await slices.run(0, 0.1)


async def test_a_server_that_dies_is_told(client: LoadClient, mariadb: MariaDb, tmp_path: Path) -> None:
    async with (
        MariaDb.start(tmp_path / "mortal") as mortal,
        client.slices([LoadTarget(mortal.port), LoadTarget(mariadb.port)], connections=4) as slices,
    ):
        await slices.run(0, 0.1)
        await mortal.kill()
        assert (await slices.run(1, 0.1)).latencies
        with pytest.raises(ProcessFailed, match="met 4 errors"):
            await slices.run(0, 0.1)
        with pytest.raises(ProcessFailed, match="no connection is left that could ask"):
            await slices.run(0, 0.1)
        with pytest.raises(ProcessFailed, match="met 5 errors"):
            await slices.run(0, 0.1, rate=0, new_connections=50)
        assert (await slices.run(1, 0.1)).latencies


async def test_without_its_program_no_slice_is_measured(client: LoadClient, mariadb: MariaDb) -> None:
    async with client.slices([LoadTarget(mariadb.port)], connections=2) as slices:
        with pytest.raises(ProcessFailed, match="target must be a number from 0 to 0"):
            await slices.run(1, 0.1)
    async with client.slices([LoadTarget(mariadb.port)], connections=2) as slices:
        os.kill(slices.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ProcessFailed, match="was ended by SIGKILL"):
                await slices.run(0, 0.1)


async def test_between_two_slices_no_cpu_is_used(client: LoadClient, mariadb: MariaDb) -> None:
    def used(pid: int) -> float:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9

    target = LoadTarget(mariadb.port)
    async with (
        client.slices([target], connections=100) as idle,
        client.slices([target], connections=4) as busy,
    ):
        await idle.run(0, 0.1)
        before = used(idle.pid)
        await busy.run(0, 0.5)
        assert used(idle.pid) - before < 0.02  # for the rest of its answer


async def test_idle_connections_are_held(client: LoadClient, mariadb: MariaDb) -> None:
    def connected() -> int:
        with (
            pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root") as session,
            session.cursor() as cursor,
        ):
            cursor.execute("show status like 'Threads_connected'")
            ((_, count),) = cursor.fetchall()
            return int(count)

    async with client.idle(mariadb.port, connections=300, ramp=5000) as held:
        assert await asyncio.to_thread(connected) > 300
    (found,) = held
    assert (found.figures["connected"], found.figures["alive"], found.errors) == (300, 300, 0)


async def test_who_is_killed_is_not_alive(client: LoadClient, mariadb: MariaDb) -> None:
    def kill_one() -> None:
        with (
            pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root") as session,
            session.cursor() as cursor,
        ):
            cursor.execute("select max(id) from information_schema.processlist where id <> connection_id()")
            ((victim,),) = cursor.fetchall()
            cursor.execute(f"kill {victim}")

    async with client.idle(mariadb.port, connections=10) as held:
        await asyncio.to_thread(kill_one)
    (found,) = held
    assert (found.figures["alive"], found.errors) == (9, 1)


async def test_more_than_the_server_takes_is_told(client: LoadClient, tmp_path: Path) -> None:
    async with MariaDb.start(tmp_path / "small") as small:
        with pymysql.connect(host="127.0.0.1", port=small.port, user="root") as session:
            session.query("set global max_connections = 10")
        with pytest.raises(ProcessFailed, match=r"of 50 connections .* error 1040: Too many connections"):
            async with client.idle(small.port, connections=50):
                pytest.fail("there is no room for so many")


async def test_nothing_is_wrong_with_a_server_itself(client: LoadClient, mariadb: MariaDb) -> None:
    nonce = await client.nonce(mariadb.port, sessions=500, parallel=16)
    assert nonce.error_text == ""
    assert (nonce.figures["sessions"], nonce.errors) == (500, 0)
    assert nonce.figures["cut"] > 50
    gaps = await client.gaps(mariadb.port, statements=2000, connections=4)
    assert (gaps.error_text, gaps.figures["stalls"]) == ("", 0)
    assert gaps.figures["statements"] >= 2000
    slow = await client.slow(mariadb.port, connections=2, size=10 << 20)
    assert (slow.error_text, slow.figures["bytes"]) == ("", 2 * 10240 * 1027)


async def test_a_password_is_proven(client: LoadClient, mariadb: MariaDb, tmp_path: Path) -> None:
    async with MariaDb.start(tmp_path / "guarded") as guarded:
        with pymysql.connect(host="127.0.0.1", port=guarded.port, user="root") as session:
            session.query(
                "create user loader@'%' identified via mysql_native_password using password('geheim')"
            )
        right = LoadClient(client.program, LoginOptions(user="loader", password="geheim"))
        async with right.slices([LoadTarget(guarded.port)], connections=1) as slices:
            assert (await slices.run(0, 0.1, new_connections=20)).new_connections
        wrong = LoadClient(client.program, LoginOptions(user="loader", password="falsch"))
        async with wrong.slices([LoadTarget(guarded.port)], connections=0) as slices:
            with pytest.raises(ProcessFailed, match=r"error 1045: 4"):
                await slices.run(0, 0.2, new_connections=20)


async def test_tls_begins_within_the_handshake(client: LoadClient, secure: MatrixMariaDb) -> None:
    for access, statement in (
        (LoginOptions(ca=secure.certificates.ca), "select 1"),
        (LoginOptions(), MANY_ROWS),
    ):
        loader = LoadClient(client.program, access)
        target = LoadTarget(secure.port, "mysql")
        async with loader.slices([target], connections=4, statement=statement) as slices:
            measured = await slices.run(0, 0.3, new_connections=20)
        assert len(measured.latencies) > 1
        assert len(measured.new_connections) == pytest.approx(6, abs=1)


async def test_a_certificate_of_nobody_is_refused(
    client: LoadClient, secure: MatrixMariaDb, tmp_path: Path
) -> None:
    other = PemFiles.create(tmp_path / "other")
    strict = LoadClient(client.program, LoginOptions(ca=other.ca))
    with pytest.raises(ProcessFailed, match=r"TLS failed: invalid peer certificate"):
        async with strict.slices([LoadTarget(secure.port, "mysql")], connections=1):
            pytest.fail("the certificate is not from that authority")


async def test_tls_is_not_imagined(client: LoadClient, mariadb: MariaDb) -> None:
    with pytest.raises(ProcessFailed, match="the server offers no TLS"):
        async with client.slices([LoadTarget(mariadb.port, "mysql")], connections=1):
            pytest.fail("there is no TLS")


@asynccontextmanager
async def terminator(certificates: PemFiles, port: int) -> AsyncIterator[int]:
    """A port where TLS begins at once and ends; what is inside goes to `port`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.cert, certificates.key)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        ways = [
            asyncio.create_task(relay(reader, inner_writer)),
            asyncio.create_task(relay(inner_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for each in (writer, inner_writer):
            each.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_tls_begins_first(client: LoadClient, mariadb: MariaDb, tmp_path: Path) -> None:
    certificates = PemFiles.create(tmp_path)
    inside = LoadClient(client.program, LoginOptions("first", certificates.ca))
    async with terminator(certificates, mariadb.port) as port:
        assert (await inside.nonce(port, sessions=50, parallel=4, kill=0.0)).error_text == ""
        targets = [LoadTarget(port, "first"), LoadTarget(mariadb.port)]
        async with inside.slices(targets, connections=4, statement=MANY_ROWS) as slices:
            for target in (0, 1, 0, 1):
                measured = await slices.run(target, 0.2, new_connections=20)
                assert measured.latencies
                assert len(measured.new_connections) == pytest.approx(4, abs=1)
