"""The load client against a real MariaDB, with and without TLS."""

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

# The first build of the load client takes minutes.
pytestmark = pytest.mark.timeout(900)

MANY_ROWS = "select rpad(seq, 40, 'x') from mysql.seq_1_to_10000"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(tmp_path_factory: pytest.TempPathFactory) -> LoadClient:
    return await LoadClient.create(tmp_path_factory.mktemp("build"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secure(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MatrixMariaDb]:
    """Yield a MariaDB server with TLS."""
    async with MatrixMariaDb.start(tmp_path_factory.mktemp("secure")) as server:
        yield server


async def test_all_connections_run_at_full_speed(client: LoadClient, mariadb: MariaDb) -> None:
    async with client.slices([LoadTarget(mariadb.port)], connections=8) as slices:
        for seconds in (0.03, 0.5):
            measured = await slices.run(0, seconds)
            assert len(measured.latencies) > 200 * seconds
            assert all(0 < latency < 10_000 for latency in measured.latencies)
            assert measured.new_connections == []
            assert 0 < measured.seconds < 10


async def test_reads_large_results(client: LoadClient, mariadb: MariaDb) -> None:
    async with client.slices([LoadTarget(mariadb.port)], connections=2, statement=MANY_ROWS) as slices:
        assert len((await slices.run(0, 0.5)).latencies) > 2


async def test_statements_keep_their_rate(client: LoadClient, mariadb: MariaDb) -> None:
    statement = "select seq from mysql.seq_1_to_2000 where seq between {} and {}+99"
    async with client.slices(
        [LoadTarget(mariadb.port)], connections=32, statement=statement, max_number=1000
    ) as slices:
        assert len((await slices.run(0, 1.0, rate=400)).latencies) == pytest.approx(400, abs=1)
        assert len((await slices.run(0, 0.05, rate=6000)).latencies) == pytest.approx(300, abs=1)
        assert (await slices.run(0, 0.05, rate=0)).latencies == []


async def test_slow_server_still_gets_all_due_statements(client: LoadClient, mariadb: MariaDb) -> None:
    statement = "select sleep(0.01)"
    async with client.slices([LoadTarget(mariadb.port)], connections=2, statement=statement) as slices:
        measured = await slices.run(0, 0.1, rate=1000)  # five times as many as the server can answer
    assert len(measured.latencies) == pytest.approx(100, abs=1)
    assert measured.seconds >= 0.5
    assert min(measured.latencies) >= 10
    assert max(measured.latencies) > 300  # counted from the scheduled time, not from the send


async def test_new_connections_open_and_close(client: LoadClient, mariadb: MariaDb) -> None:
    async with client.slices([LoadTarget(mariadb.port)], connections=4) as slices:
        measured = await slices.run(0, 0.5, rate=200, new_connections=50)
        assert len(measured.latencies) == pytest.approx(100, abs=1)
        assert len(measured.new_connections) == pytest.approx(25, abs=1)
        assert all(0 < latency < 10_000 for latency in measured.new_connections)
    async with client.slices([LoadTarget(mariadb.port)], connections=0) as slices:
        measured = await slices.run(0, 0.5, new_connections=50)
        assert measured.latencies == []
        assert len(measured.new_connections) == pytest.approx(25, abs=1)


async def test_failing_statement_fails_the_slice(client: LoadClient, mariadb: MariaDb) -> None:
    async with client.slices([LoadTarget(mariadb.port)], connections=2, statement="select nothing") as slices:
        with pytest.raises(ProcessFailed, match="error 1054: Unknown column 'nothing'"):
            await slices.run(0, 0.1)


async def test_dead_server_fails_the_slice(client: LoadClient, mariadb: MariaDb, tmp_path: Path) -> None:
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


async def test_dead_program_fails_the_slice(client: LoadClient, mariadb: MariaDb) -> None:
    async with client.slices([LoadTarget(mariadb.port)], connections=2) as slices:
        with pytest.raises(ProcessFailed, match="target must be a number from 0 to 0"):
            await slices.run(1, 0.1)
    async with client.slices([LoadTarget(mariadb.port)], connections=2) as slices:
        os.kill(slices.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ProcessFailed, match="was ended by SIGKILL"):
                await slices.run(0, 0.1)


async def test_client_uses_no_cpu_between_slices(client: LoadClient, mariadb: MariaDb) -> None:
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
        assert used(idle.pid) - before < 0.02  # the client still has to finish its output


async def test_holds_idle_connections(client: LoadClient, mariadb: MariaDb) -> None:
    def connected() -> int:
        with (
            pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root") as session,
            session.cursor() as cursor,
        ):
            cursor.execute("show status like 'Threads_connected'")
            ((_, count),) = cursor.fetchall()
            return int(count)

    async with client.keep_idle(mariadb.port, connections=300, ramp=5000) as held:
        assert await asyncio.to_thread(connected) > 300
    (result,) = held
    assert (result.figures["connected"], result.figures["alive"], result.errors) == (300, 300, 0)


async def test_killed_connections_are_not_alive(client: LoadClient, mariadb: MariaDb) -> None:
    def kill_one() -> None:
        with (
            pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root") as session,
            session.cursor() as cursor,
        ):
            cursor.execute("select max(id) from information_schema.processlist where id <> connection_id()")
            ((victim,),) = cursor.fetchall()
            cursor.execute(f"kill {victim}")

    async with client.keep_idle(mariadb.port, connections=10) as held:
        await asyncio.to_thread(kill_one)
    (result,) = held
    assert (result.figures["alive"], result.errors) == (9, 1)


async def test_reports_connections_over_the_server_limit(client: LoadClient, tmp_path: Path) -> None:
    async with MariaDb.start(tmp_path / "small") as small:
        with pymysql.connect(host="127.0.0.1", port=small.port, user="root") as session:
            session.query("set global max_connections = 10")
        with pytest.raises(ProcessFailed, match=r"of 50 connections .* error 1040: Too many connections"):
            async with client.keep_idle(small.port, connections=50):
                pytest.fail("the server accepts too many connections")


async def test_nonces_pieces_and_slow_reading_pass_without_a_proxy(
    client: LoadClient, mariadb: MariaDb
) -> None:
    nonce = await client.check_nonces(mariadb.port, sessions=500, parallel=16)
    assert nonce.error_text == ""
    assert (nonce.figures["sessions"], nonce.errors) == (500, 0)
    assert nonce.figures["cut"] > 50
    gaps = await client.send_in_pieces(mariadb.port, statements=2000, connections=4)
    assert (gaps.error_text, gaps.figures["stalls"]) == ("", 0)
    assert gaps.figures["statements"] >= 2000
    slow = await client.read_slowly(mariadb.port, connections=2, size=10 << 20)
    assert (slow.error_text, slow.figures["bytes"]) == ("", 2 * 10240 * 1027)


async def test_logs_in_with_a_password(client: LoadClient, mariadb: MariaDb, tmp_path: Path) -> None:
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


async def test_tls_starts_within_the_handshake(client: LoadClient, secure: MatrixMariaDb) -> None:
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


async def test_rejects_an_untrusted_certificate(
    client: LoadClient, secure: MatrixMariaDb, tmp_path: Path
) -> None:
    other = PemFiles.create(tmp_path / "other")
    strict = LoadClient(client.program, LoginOptions(ca=other.ca))
    with pytest.raises(ProcessFailed, match=r"TLS failed: invalid peer certificate"):
        async with strict.slices([LoadTarget(secure.port, "mysql")], connections=1):
            pytest.fail("the certificate is not from that authority")


async def test_requires_tls_if_requested(client: LoadClient, mariadb: MariaDb) -> None:
    with pytest.raises(ProcessFailed, match="the server offers no TLS"):
        async with client.slices([LoadTarget(mariadb.port, "mysql")], connections=1):
            pytest.fail("the server has no TLS")


@asynccontextmanager
async def run_tls_terminator(certificates: PemFiles, port: int) -> AsyncIterator[int]:
    """Yield a port that terminates TLS from the first byte and forwards the content to `port`."""
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
        for stream in (writer, inner_writer):
            stream.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_tls_starts_with_the_first_byte(client: LoadClient, mariadb: MariaDb, tmp_path: Path) -> None:
    certificates = PemFiles.create(tmp_path)
    inside = LoadClient(client.program, LoginOptions("first", certificates.ca))
    async with run_tls_terminator(certificates, mariadb.port) as port:
        assert (await inside.check_nonces(port, sessions=50, parallel=4, kill=0.0)).error_text == ""
        targets = [LoadTarget(port, "first"), LoadTarget(mariadb.port)]
        async with inside.slices(targets, connections=4, statement=MANY_ROWS) as slices:
            for target in (0, 1, 0, 1):
                measured = await slices.run(target, 0.2, new_connections=20)
                assert measured.latencies
                assert len(measured.new_connections) == pytest.approx(4, abs=1)
