"""TLS on either side of the module, with real clients and servers; and what holds with any."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest
import pytest_asyncio
import trustme

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import Capability, frame
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.tls import SqlTlsFiles
from tests.support.clients.server import MAIN_ACCOUNT, NUMBERS_ROWS, MatrixMariaDb, PemFiles
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import ModuleEnvoy, read_to_end, run_envoy, with_timeout
from tests.support.tidb_sim_clients import CAPABILITIES, connect_driver, session_rules
from tests.support.waiting import wait_until, wait_until_read

MIB = 1 << 20
SHA2 = ("tls_sha2", "geheim")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MatrixMariaDb]:
    """A MariaDB with TLS."""
    async with MatrixMariaDb.start(tmp_path_factory.mktemp("tls")) as running:
        await asyncio.to_thread(running.fill)
        yield running


def client_side(pair: PemFiles, mode: str = "optional", **more: Any) -> dict[str, Any]:
    return {"tls": mode, "cert": str(pair.cert), "key": str(pair.key), **more}


def node_side(pair: PemFiles, mode: str = "required", **more: Any) -> dict[str, Any]:
    return {"tls": mode, "ca": str(pair.ca), "verify": "full", **more}


connect_with: Callable[..., Any] = pymysql.connect


def session(proxy: ModuleEnvoy, tls: PemFiles | ssl.SSLContext | None, **options: Any) -> Any:
    """A driver's session; with certificates, over TLS, and the proxy's is checked."""
    trust = {"ca": str(tls.ca)} if isinstance(tls, PemFiles) else tls
    account: dict[str, Any] = {
        "user": MAIN_ACCOUNT.user,
        "password": MAIN_ACCOUNT.password,
        "database": "matrix",
    }
    return connect_with(
        **{
            "host": proxy.host,
            "port": proxy.port,
            "ssl": trust,
            "ssl_disabled": trust is None,
            "read_timeout": 60,
        }
        | account
        | options
    )


def one(connection: Any, query: str, *values: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        (row,) = cursor.fetchall()
        return row[-1]


def converse(proxy: ModuleEnvoy, tls: PemFiles | None, **options: Any) -> str:
    """A conversation with results and statements larger than any buffer; the cipher on the node's link."""
    with session(proxy, tls, **options) as connection:
        assert one(connection, "select sum(n) from numbers") == NUMBERS_ROWS * (NUMBERS_ROWS + 1) // 2
        blob = bytes(range(256)) * (3 * MIB // 256)
        assert one(connection, "select md5(%s)", blob) == hashlib.md5(blob).hexdigest()
        with connection.cursor() as cursor:
            cursor.execute("select n, repeat('x', 50) from numbers limit 100000")
            assert len(cursor.fetchall()) == 100_000
        cipher: str = one(connection, "show status like 'Ssl_cipher'")
        return cipher


@pytest.mark.parametrize("towards_node", ["disabled", "preferred", "required"])
@pytest.mark.parametrize("towards_client", ["disabled", "optional", "required"])
async def test_every_combination(
    tmp_path: Path, server: MatrixMariaDb, towards_client: str, towards_node: str
) -> None:
    pair = server.certificates
    parts = ModuleConfig(client=client_side(pair, towards_client), node=node_side(pair, towards_node))
    async with run_envoy(tmp_path, [f"127.0.0.1:{server.port}"], parts) as proxy:
        for trust in (None, pair):
            if (towards_client, trust) == ("required", None):
                with pytest.raises(pymysql.OperationalError, match="Tidevoy: connections without TLS"):
                    await asyncio.to_thread(session, proxy, None)
            elif towards_client == "disabled" and trust is not None:
                # It offers none, so the driver falls back or refuses; nothing must hang.
                with contextlib.suppress(pymysql.OperationalError):
                    (await asyncio.to_thread(session, proxy, trust)).close()
            else:
                cipher = await asyncio.to_thread(converse, proxy, trust)
                assert bool(cipher) == (towards_node != "disabled")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_versions_of_tls(tmp_path: Path, server: MatrixMariaDb, version: ssl.TLSVersion) -> None:
    trust = ssl.create_default_context(cafile=str(server.certificates.ca))
    trust.minimum_version = trust.maximum_version = version
    parts = ModuleConfig(client=client_side(server.certificates, "required"))
    async with run_envoy(tmp_path, [f"127.0.0.1:{server.port}"], parts) as proxy:
        connection = await asyncio.to_thread(session, proxy, trust)
        assert connection._sock.version() == version.name.replace("_", ".")
        assert one(connection, "select 7") == 7
        connection.close()


@pytest.fixture
def tls_client(server: MatrixMariaDb) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """TLS by hand: what it says is sent as a test likes."""
    trust = ssl.create_default_context(cafile=str(server.certificates.ca))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    return trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1"), incoming, outgoing


@pytest.mark.parametrize("bytewise", [False, True], ids=["in one segment", "byte by byte"])
async def test_a_client_hello_behind_its_request(
    tmp_path: Path,
    server: MatrixMariaDb,
    tls_client: tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO],
    bytewise: bool,
) -> None:
    tls, incoming, outgoing = tls_client
    capabilities = CAPABILITIES | Capability.SSL
    head = capabilities.to_bytes(4, "little") + (1 << 24).to_bytes(4, "little") + b"\x2d" + bytes(23)
    pair = server.certificates
    parts = ModuleConfig(client=client_side(pair), node=node_side(pair))
    async with run_envoy(tmp_path, [f"127.0.0.1:{server.port}"], parts) as proxy:
        client = await proxy.connect()
        client.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await with_timeout(client.read_packet())

        async def send(data: bytes) -> None:
            for piece in [data[at : at + 1] for at in range(len(data))] if bytewise else [data]:
                client.writer.write(piece)
                await wait_until_read(client.writer)

        async def drive(step: Any, first: bytes = b"") -> Any:
            while True:
                try:
                    result = step()
                except ssl.SSLWantReadError:
                    await send(first + outgoing.read())
                    first = b""
                    incoming.write(await with_timeout(client.reader.read(65_536)))
                else:
                    await send(first + outgoing.read())
                    return result

        await drive(tls.do_handshake, frame(1, head))
        # A wrong password: the whole way to the server and back is what counts.
        tls.write(frame(2, head + b"matrix\0\0mysql_native_password\0"))
        await send(outgoing.read())
        answer = await drive(lambda: tls.read(65_536))
        assert (answer[3], answer[4:7]) == (3, b"\xff\x15\x04")
        assert b"#28000Access denied" in answer


async def read_slowly(reader: asyncio.StreamReader) -> int:
    """All that comes, in pieces with pauses; how much it was."""
    total = 0
    while piece := await reader.read(65_536):
        total += len(piece)
    return total


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_envoy_holds_little_of_what_a_client_does_not_read(
    tmp_path: Path, server: MatrixMariaDb, tls: bool
) -> None:
    pair = server.certificates
    parts = ModuleConfig(client=client_side(pair), node=node_side(pair, "required" if tls else "disabled"))
    async with run_envoy(tmp_path, [f"127.0.0.1:{server.port}"], parts) as proxy:
        connection = await asyncio.to_thread(session, proxy, pair if tls else None)
        before = await proxy.allocated_bytes()
        with connection.cursor(pymysql.cursors.SSCursor) as cursor:
            await asyncio.to_thread(cursor.execute, "select n, repeat('x', 200) from numbers")
            peak = 0
            last: dict[str, int] = {}

            async def takes_no_more() -> bool:
                """It does not read from the node now, and did not when it was asked the last time."""
                nonlocal last, peak
                previous, last = last, await proxy.stats("cluster.tidb.upstream_(cx_rx|flow)")
                peak = max(peak, await proxy.allocated_bytes())
                return last == previous and last[PAUSED] > last[RESUMED]

            await wait_until(takes_no_more, 30)
            assert 0 < last[RECEIVED] < 100 * MIB
            assert peak < before + 12 * MIB
            rows = await asyncio.to_thread(cursor.fetchall)
            assert len(rows) == NUMBERS_ROWS
            assert await proxy.allocated_bytes() < before + 12 * MIB
        connection.close()


RECEIVED = "cluster.tidb.upstream_cx_rx_bytes_total"
PAUSED, RESUMED = (
    f"cluster.tidb.upstream_flow_control_{what}_reading_total" for what in ("paused", "resumed")
)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_large_statements_and_results_arrive_whole(
    tmp_path: Path, server: MatrixMariaDb, tls: bool
) -> None:
    pair = server.certificates
    parts = ModuleConfig(client=client_side(pair), node=node_side(pair, "required" if tls else "disabled"))
    # Bytes of every kind, and more than one packet of MySQL's can hold.
    blob = hashlib.shake_128(b"blob").digest(20 * MIB)
    async with run_envoy(tmp_path, [f"127.0.0.1:{server.port}"], parts) as proxy:
        before = await proxy.allocated_bytes()

        def both_ways() -> None:
            with session(proxy, pair if tls else None, max_allowed_packet=64 * MIB) as connection:
                assert one(connection, "select _binary %s", blob) == blob
                assert one(connection, "select 1") == 1

        await asyncio.to_thread(both_ways)
        assert await proxy.allocated_bytes() < before + 12 * MIB


async def test_clients_prove_who_they_are_where_they_must(tmp_path: Path, server: MatrixMariaDb) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    parts = ModuleConfig(
        client=client_side(server.certificates, "required", client_ca=str(tmp_path / "clients.pem"))
    )

    def trust(issuer: trustme.CA | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(server.certificates.ca))
        if issuer is not None:
            issuer.issue_cert("client@example.org").configure_cert(context)
        return context

    async with run_envoy(tmp_path, [f"127.0.0.1:{server.port}"], parts) as proxy:
        connection = await asyncio.to_thread(session, proxy, trust(authority))
        assert one(connection, "select 7") == 7
        connection.close()
        for issuer in (None, stranger):
            with pytest.raises((pymysql.OperationalError, OSError)):
                await asyncio.to_thread(session, proxy, trust(issuer))


async def test_a_node_of_another_authority_gets_no_password(tmp_path: Path, server: MatrixMariaDb) -> None:
    other = PemFiles.create(tmp_path / "other")
    for verify in ("full", "ca"):
        parts = ModuleConfig(node=node_side(other, verify=verify))
        async with run_envoy(tmp_path, [f"127.0.0.1:{server.port}"], parts) as proxy:
            with pytest.raises(
                pymysql.OperationalError, match="the TLS handshake with the TiDB server failed"
            ):
                await asyncio.to_thread(session, proxy, None)
            assert "tls.backend.ca" in proxy.log
            await proxy.wait_for_metrics(
                {
                    ("login_failures", f"127.0.0.1:{server.port}", "node_tls_failed"): 1,
                    ("connect_failures", f"127.0.0.1:{server.port}", "tls"): 1,
                    ("sessions", f"127.0.0.1:{server.port}", "login"): 0,
                }
            )


@pytest.mark.parametrize(("verify", "served"), [("full", False), ("ca", True), ("none", True)])
async def test_the_name_of_a_node_is_checked_where_it_should_be(
    tmp_path: Path, server: MatrixMariaDb, verify: str, served: bool
) -> None:
    parts = ModuleConfig(node=node_side(server.certificates, verify=verify))
    async with run_envoy(tmp_path, [Host(f"127.0.0.1:{server.port}", "tidb-0.example:4000")], parts) as proxy:
        with contextlib.nullcontext() if served else pytest.raises(pymysql.OperationalError):
            connection = await asyncio.to_thread(session, proxy, None)
            assert one(connection, "show status like 'Ssl_cipher'")
            connection.close()


@asynccontextmanager
async def sim_with_sha2(mariadb: MariaDb, pair: PemFiles | None) -> AsyncIterator[str]:
    """A stand-in TiDB with an account of caching_sha2_password: its address."""
    tls = None if pair is None else SqlTlsFiles(pair.cert, pair.key)
    async with TidbSim(SimSettings(session_rules(mariadb, tls=tls))) as sim:
        admin = await connect_driver(sim)
        async with admin.cursor() as cursor:
            await cursor.execute(
                f"create user {SHA2[0]}@'%' identified with 'caching_sha2_password' by '{SHA2[1]}'"
            )
        try:
            yield sim.sql_address
            assert sim.node.violations == []
        finally:
            async with admin.cursor() as cursor:
                await cursor.execute(f"drop user {SHA2[0]}@'%'")
            await admin.ensure_closed()


@pytest.mark.parametrize("node_tls", [False, True], ids=["node plain", "node TLS"])
@pytest.mark.parametrize("client_tls", [False, True], ids=["client plain", "client TLS"])
async def test_caching_sha2_password(
    tmp_path: Path, mariadb: MariaDb, server: MatrixMariaDb, client_tls: bool, node_tls: bool
) -> None:
    pair = server.certificates
    account = {"user": SHA2[0], "database": None}
    async with sim_with_sha2(mariadb, pair if node_tls else None) as address:
        node = node_side(pair, "required" if node_tls else "disabled")
        async with run_envoy(tmp_path, [address], ModuleConfig(client=client_side(pair), node=node)) as proxy:

            def log_in(password: str) -> None:
                options = account | {"password": password}
                with session(proxy, pair if client_tls else None, **options) as connection:
                    assert one(connection, "select 7") == 7

            if client_tls and not node_tls:
                with pytest.raises(
                    pymysql.OperationalError, match="the password would go to TiDB in clear text"
                ):
                    await asyncio.to_thread(log_in, SHA2[1])
                return
            if node_tls:
                await asyncio.to_thread(log_in, SHA2[1])
            with pytest.raises(pymysql.OperationalError):
                await asyncio.to_thread(log_in, "wrong")


async def test_a_client_with_tls_may_be_allowed_to_reach_a_node_without(
    tmp_path: Path, mariadb: MariaDb, server: MatrixMariaDb
) -> None:
    pair = server.certificates
    async with sim_with_sha2(mariadb, None) as address:
        parts = ModuleConfig(client=client_side(pair), node={"allow_cleartext_backend": True})
        async with run_envoy(tmp_path, [address], parts) as proxy:
            with contextlib.suppress(pymysql.OperationalError):  # TiDB itself takes no password without TLS
                account = {"user": SHA2[0], "password": SHA2[1], "database": None}
                (await asyncio.to_thread(session, proxy, pair, **account)).close()
            told = {labels for name, labels in await proxy.metrics() if name == "login_failures"}
            assert not any("clear_text_password" in labels for labels in told)


async def test_what_is_no_tls_behind_a_request_ends_the_connection(
    tmp_path: Path, server: MatrixMariaDb
) -> None:
    parts = ModuleConfig(client=client_side(server.certificates))
    async with run_envoy(tmp_path, [f"127.0.0.1:{server.port}"], parts) as proxy:
        client = await proxy.connect()
        await with_timeout(client.read_packet())
        head = (CAPABILITIES | Capability.SSL).to_bytes(4, "little") + bytes(28)
        client.writer.write(frame(1, head) + b"this is no ClientHello")
        alert = await read_to_end(client)
        assert alert[:1] == b"\x15"
        await proxy.wait_for_metrics({("login_failures", f"127.0.0.1:{server.port}", "client_gone"): 1})
