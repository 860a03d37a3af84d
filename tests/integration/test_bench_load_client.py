"""Our load client against a real MariaDB, with and without TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pymysql
import pytest
import pytest_asyncio

from bench.load_client import Access, LoadClient, Select
from sandbox.mariadb import MariaDb
from sandbox.process import ProcessFailed
from tests.clients.server import Certificates, MatrixMariaDb

# The first build takes minutes where nothing has been built before.
pytestmark = pytest.mark.timeout(900)

MANY_ROWS = "select rpad(seq, 40, 'x') from mysql.seq_1_to_10000"


@pytest.fixture
async def client(tmp_path: Path) -> LoadClient:
    return await LoadClient.ready(tmp_path)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secure(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MatrixMariaDb]:
    """A MariaDB that offers TLS."""
    async with MatrixMariaDb.start(tmp_path_factory.mktemp("secure")) as server:
        yield server


async def test_it_selects_as_sysbench_does(client: LoadClient, mariadb: MariaDb) -> None:
    outcome = await Select(client, connections=8).run(mariadb.port, 0.5)
    assert outcome.queries > 100
    assert outcome.per_second > 200
    assert 0 < outcome.p95 < 500


async def test_it_reads_large_results(client: LoadClient, mariadb: MariaDb) -> None:
    outcome = await Select(client, connections=2, statement=MANY_ROWS).run(mariadb.port, 0.5)
    assert outcome.queries > 2


async def test_it_keeps_to_its_rate(client: LoadClient, mariadb: MariaDb) -> None:
    found = await client.select(mariadb.port, 1.0, connections=32, rate=400)
    assert found.errors == 0
    assert found.figures["queries"] + found.figures["unsent"] == 400


async def test_a_wrong_statement_is_no_measurement(client: LoadClient, mariadb: MariaDb) -> None:
    with pytest.raises(ProcessFailed, match="error 1054: Unknown column 'nothing'"):
        await Select(client, connections=2, statement="select nothing").run(mariadb.port, 0.1)


async def test_connections_come_and_go(client: LoadClient, mariadb: MariaDb) -> None:
    found = await client.churn(mariadb.port, 1.0, rate=50)
    assert (found.figures["done"], found.told) == (50, "")
    assert found.figures["p95_ms"] > 0


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
    assert nonce.told == ""
    assert (nonce.figures["sessions"], nonce.errors) == (500, 0)
    assert nonce.figures["cut"] > 50
    gaps = await client.gaps(mariadb.port, statements=2000, connections=4)
    assert (gaps.told, gaps.figures["stalls"]) == ("", 0)
    assert gaps.figures["statements"] >= 2000
    slow = await client.slow(mariadb.port, connections=2, size=10 << 20)
    assert (slow.told, slow.figures["bytes"]) == ("", 2 * 10240 * 1027)


async def test_a_password_is_proven(client: LoadClient, mariadb: MariaDb, tmp_path: Path) -> None:
    async with MariaDb.start(tmp_path / "guarded") as guarded:
        with pymysql.connect(host="127.0.0.1", port=guarded.port, user="root") as session:
            session.query(
                "create user loader@'%' identified via mysql_native_password using password('geheim')"
            )
        right = LoadClient(client.program, Access(user="loader", password="geheim"))
        assert (await right.churn(guarded.port, 0.2, rate=20)).errors == 0
        wrong = LoadClient(client.program, Access(user="loader", password="falsch"))
        assert (await wrong.churn(guarded.port, 0.2, rate=20)).figures["errors_by_kind"] == {"error 1045": 4}


async def test_tls_begins_within_the_handshake(client: LoadClient, secure: MatrixMariaDb) -> None:
    async def visit(access: Access, statement: str) -> int:
        found = await LoadClient(client.program, access).select(
            secure.port, 0.3, connections=4, statement=statement
        )
        assert found.told == ""
        return int(found.figures["queries"])

    assert await visit(Access("mysql", secure.certificates.ca), "select 1") > 10
    assert await visit(Access("mysql"), MANY_ROWS) > 1


async def test_a_certificate_of_nobody_is_refused(
    client: LoadClient, secure: MatrixMariaDb, tmp_path: Path
) -> None:
    other = Certificates.make(tmp_path / "other")
    strict = LoadClient(client.program, Access("mysql", other.ca))
    with pytest.raises(ProcessFailed, match=r"TLS failed: invalid peer certificate"):
        await strict.select(secure.port, 0.1, connections=1)


async def test_tls_is_not_imagined(client: LoadClient, mariadb: MariaDb) -> None:
    with pytest.raises(ProcessFailed, match="the server offers no TLS"):
        await LoadClient(client.program, Access("mysql")).select(mariadb.port, 0.1, connections=1)


@asynccontextmanager
async def terminator(certificates: Certificates, port: int) -> AsyncIterator[int]:
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
    certificates = Certificates.make(tmp_path)
    inside = LoadClient(client.program, Access("first", certificates.ca))
    async with terminator(certificates, mariadb.port) as port:
        selected = await inside.select(port, 0.3, connections=4, statement=MANY_ROWS)
        assert selected.told == ""
        assert (await inside.churn(port, 0.2, rate=20)).told == ""
        assert (await inside.nonce(port, sessions=50, parallel=4, kill=0.0)).told == ""
