"""TLS between client and module and between module and node, with real clients and servers."""

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
from sandbox.tidb_sim.packets import MySqlCommand, frame
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.tls import SqlTlsFiles
from tests.support.clients.server import MAIN_ACCOUNT, NUMBERS_ROWS, MatrixMariaDb, PemFiles
from tests.support.load import client_packets
from tests.support.module.bootstrap import LOGIN_LIMITS, Host, ModuleConfig
from tests.support.module.envoy import ModuleEnvoy, connect_logged_in, run_envoy, with_timeout
from tests.support.tidb_sim_clients import connect_driver, session_rules
from tests.support.waiting import wait_until, wait_until_read

MIB = 1 << 20
SHA2 = ("tls_sha2", "geheim")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tls_mariadb(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MatrixMariaDb]:
    """Yield a MariaDB with TLS."""
    async with MatrixMariaDb.start(tmp_path_factory.mktemp("tls")) as running:
        await asyncio.to_thread(running.fill)
        yield running


def client_tls_settings(certificates: PemFiles, mode: str = "optional", **more: Any) -> dict[str, Any]:
    return {"tls": mode, "cert": str(certificates.cert), "key": str(certificates.key), **more}


def node_tls_settings(certificates: PemFiles, mode: str = "required", **more: Any) -> dict[str, Any]:
    return {"tls": mode, "ca": str(certificates.ca), "verify": "full", **more}


connect: Callable[..., Any] = pymysql.connect


def session(proxy: ModuleEnvoy, tls: PemFiles | ssl.SSLContext | None, **options: Any) -> Any:
    """Connect a driver. With `tls`, the driver uses TLS and verifies Envoy's certificate."""
    trust = {"ca": str(tls.ca)} if isinstance(tls, PemFiles) else tls
    account: dict[str, Any] = {
        "user": MAIN_ACCOUNT.user,
        "password": MAIN_ACCOUNT.password,
        "database": "matrix",
    }
    return connect(
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


def query_value(connection: Any, query: str, *values: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        (row,) = cursor.fetchall()
        return row[-1]


def exchange_large_data(proxy: ModuleEnvoy, tls: PemFiles | None, **options: Any) -> str:
    """Run statements with texts and results larger than any buffer. Return the node connection's cipher."""
    with session(proxy, tls, **options) as connection:
        assert query_value(connection, "select sum(n) from numbers") == NUMBERS_ROWS * (NUMBERS_ROWS + 1) // 2
        blob = bytes(range(256)) * (3 * MIB // 256)
        assert query_value(connection, "select md5(%s)", blob) == hashlib.md5(blob).hexdigest()
        with connection.cursor() as cursor:
            cursor.execute("select n, repeat('x', 600) from numbers limit 10000")
            assert len(cursor.fetchall()) == 10_000
        cipher: str = query_value(connection, "show status like 'Ssl_cipher'")
        return cipher


@pytest.mark.parametrize("node_mode", ["disabled", "preferred", "required"])
@pytest.mark.parametrize("client_mode", ["disabled", "optional", "required"])
async def test_every_combination_of_client_and_node_tls(
    tmp_path: Path, tls_mariadb: MatrixMariaDb, client_mode: str, node_mode: str
) -> None:
    certificates = tls_mariadb.certificates
    config = ModuleConfig(
        client=client_tls_settings(certificates, client_mode), node=node_tls_settings(certificates, node_mode)
    )
    async with run_envoy(tmp_path, [f"127.0.0.1:{tls_mariadb.port}"], config) as proxy:
        for trust in (None, certificates):
            if (client_mode, trust) == ("required", None):
                with pytest.raises(pymysql.OperationalError, match="Tidevoy: connections without TLS"):
                    await asyncio.to_thread(session, proxy, None)
            elif client_mode == "disabled" and trust is not None:
                # Envoy offers no TLS, so the driver falls back or fails; nothing may hang.
                with contextlib.suppress(pymysql.OperationalError):
                    (await asyncio.to_thread(session, proxy, trust)).close()
            else:
                cipher = await asyncio.to_thread(exchange_large_data, proxy, trust)
                assert bool(cipher) == (node_mode != "disabled")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_supported_tls_versions(
    tmp_path: Path, tls_mariadb: MatrixMariaDb, version: ssl.TLSVersion
) -> None:
    trust = ssl.create_default_context(cafile=str(tls_mariadb.certificates.ca))
    trust.minimum_version = trust.maximum_version = version
    config = ModuleConfig(client=client_tls_settings(tls_mariadb.certificates, "required"))
    async with run_envoy(tmp_path, [f"127.0.0.1:{tls_mariadb.port}"], config) as proxy:
        connection = await asyncio.to_thread(session, proxy, trust)
        assert connection._sock.version() == version.name.replace("_", ".")
        assert query_value(connection, "select 7") == 7
        connection.close()


@pytest.fixture
def tls_client(tls_mariadb: MatrixMariaDb) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """Return TLS over memory buffers, so that the test decides in which pieces the bytes are sent."""
    trust = ssl.create_default_context(cafile=str(tls_mariadb.certificates.ca))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    return trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1"), incoming, outgoing


@pytest.mark.parametrize("bytewise", [False, True], ids=["in one segment", "byte by byte"])
async def test_client_hello_may_follow_the_ssl_request_directly(
    tmp_path: Path,
    tls_mariadb: MatrixMariaDb,
    tls_client: tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO],
    bytewise: bool,
) -> None:
    tls, incoming, outgoing = tls_client
    certificates = tls_mariadb.certificates
    config = ModuleConfig(client=client_tls_settings(certificates), node=node_tls_settings(certificates))
    async with run_envoy(tmp_path, [f"127.0.0.1:{tls_mariadb.port}"], config) as proxy:
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

        await drive(tls.do_handshake, client_packets.SSL_REQUEST)
        # The password is wrong: the server's denial is enough to prove that both directions work.
        tls.write(client_packets.login("matrix", tls=True))
        await send(outgoing.read())
        answer = await drive(lambda: tls.read(65_536))
        assert (answer[3], answer[4:7]) == (3, b"\xff\x15\x04")
        assert b"#28000Access denied" in answer


async def read_slowly(reader: asyncio.StreamReader) -> int:
    """Read until the end. Return the number of bytes."""
    total = 0
    while piece := await reader.read(65_536):
        total += len(piece)
    return total


RECEIVED_BYTES = "cluster.tidb.upstream_cx_rx_bytes_total"
PAUSED_READS, RESUMED_READS = (
    f"cluster.tidb.upstream_flow_control_{what}_reading_total" for what in ("paused", "resumed")
)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_envoy_buffers_little_for_a_client_that_does_not_read(
    tmp_path: Path, tls_mariadb: MatrixMariaDb, tls: bool
) -> None:
    certificates = tls_mariadb.certificates
    config = ModuleConfig(
        client=client_tls_settings(certificates),
        node=node_tls_settings(certificates, "required" if tls else "disabled"),
    )
    async with run_envoy(tmp_path, [f"127.0.0.1:{tls_mariadb.port}"], config) as proxy:
        connection = await asyncio.to_thread(session, proxy, certificates if tls else None)
        before = await proxy.allocated_bytes()
        with connection.cursor(pymysql.cursors.SSCursor) as cursor:
            # A driver reads a few long rows faster than many short rows.
            await asyncio.to_thread(cursor.execute, "select n, repeat('x', 2000) from numbers limit 100000")
            peak = 0
            last: dict[str, int] = {}

            async def has_paused() -> bool:
                """Return whether Envoy pauses reading, and its counters are the same as at the last call."""
                nonlocal last, peak
                previous, last = last, await proxy.stats("cluster.tidb.upstream_(cx_rx|flow)")
                peak = max(peak, await proxy.allocated_bytes())
                return last == previous and last[PAUSED_READS] > last[RESUMED_READS]

            await wait_until(has_paused, 30)
            assert 0 < last[RECEIVED_BYTES] < 100 * MIB
            assert peak < before + 12 * MIB
            rows = await asyncio.to_thread(cursor.fetchall)
            assert len(rows) == 100_000
            assert await proxy.allocated_bytes() < before + 12 * MIB
        connection.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_large_statements_and_results_arrive_complete(
    tmp_path: Path, tls_mariadb: MatrixMariaDb, tls: bool
) -> None:
    certificates = tls_mariadb.certificates
    config = ModuleConfig(
        client=client_tls_settings(certificates),
        node=node_tls_settings(certificates, "required" if tls else "disabled"),
    )
    # The blob contains all byte values, and exceeds one MySQL packet (16 MiB).
    blob = hashlib.shake_128(b"blob").digest(20 * MIB)
    async with run_envoy(tmp_path, [f"127.0.0.1:{tls_mariadb.port}"], config) as proxy:
        before = await proxy.allocated_bytes()

        def send_and_receive() -> None:
            with session(proxy, certificates if tls else None, max_allowed_packet=64 * MIB) as connection:
                assert query_value(connection, "select _binary %s", blob) == blob
                assert query_value(connection, "select 1") == 1

        await asyncio.to_thread(send_and_receive)
        assert await proxy.allocated_bytes() < before + 12 * MIB


async def test_client_certificates_are_required_if_configured(
    tmp_path: Path, tls_mariadb: MatrixMariaDb
) -> None:
    trusted_ca, other_ca = trustme.CA(), trustme.CA()
    trusted_ca.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    config = ModuleConfig(
        client=client_tls_settings(
            tls_mariadb.certificates, "required", client_ca=str(tmp_path / "clients.pem")
        )
    )

    def trust(issuer: trustme.CA | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(tls_mariadb.certificates.ca))
        if issuer is not None:
            issuer.issue_cert("client@example.org").configure_cert(context)
        return context

    async with run_envoy(tmp_path, [f"127.0.0.1:{tls_mariadb.port}"], config) as proxy:
        connection = await asyncio.to_thread(session, proxy, trust(trusted_ca))
        assert query_value(connection, "select 7") == 7
        connection.close()
        for issuer in (None, other_ca):
            with pytest.raises((pymysql.OperationalError, OSError)):
                await asyncio.to_thread(session, proxy, trust(issuer))


async def test_node_with_an_untrusted_certificate_receives_no_password(
    tmp_path: Path, tls_mariadb: MatrixMariaDb
) -> None:
    other = PemFiles.create(tmp_path / "other")
    for verify in ("full", "ca"):
        config = ModuleConfig(node=node_tls_settings(other, verify=verify))
        async with run_envoy(tmp_path, [f"127.0.0.1:{tls_mariadb.port}"], config) as proxy:
            with pytest.raises(
                pymysql.OperationalError, match="the TLS handshake with the TiDB server failed"
            ):
                await asyncio.to_thread(session, proxy, None)
            assert "tls.backend.ca" in proxy.log
            await proxy.wait_for_metrics(
                {
                    ("login_failures", f"127.0.0.1:{tls_mariadb.port}", "node_tls_failed"): 1,
                    ("connect_failures", f"127.0.0.1:{tls_mariadb.port}", "tls"): 1,
                    ("sessions", f"127.0.0.1:{tls_mariadb.port}", "login"): 0,
                }
            )


@pytest.mark.parametrize(("verify", "served"), [("full", False), ("ca", True), ("none", True)])
async def test_node_name_is_verified_only_with_verify_full(
    tmp_path: Path, tls_mariadb: MatrixMariaDb, verify: str, served: bool
) -> None:
    config = ModuleConfig(node=node_tls_settings(tls_mariadb.certificates, verify=verify))
    async with run_envoy(
        tmp_path, [Host(f"127.0.0.1:{tls_mariadb.port}", "tidb-0.example:4000")], config
    ) as proxy:
        with contextlib.nullcontext() if served else pytest.raises(pymysql.OperationalError):
            connection = await asyncio.to_thread(session, proxy, None)
            assert query_value(connection, "show status like 'Ssl_cipher'")
            connection.close()


@asynccontextmanager
async def sim_with_sha2(mariadb: MariaDb, certificates: PemFiles | None) -> AsyncIterator[str]:
    """Run a simulated TiDB server with a caching_sha2_password account. Yield its address."""
    tls = None if certificates is None else SqlTlsFiles(certificates.cert, certificates.key)
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
    tmp_path: Path, mariadb: MariaDb, tls_mariadb: MatrixMariaDb, client_tls: bool, node_tls: bool
) -> None:
    certificates = tls_mariadb.certificates
    account = {"user": SHA2[0], "database": None}
    async with sim_with_sha2(mariadb, certificates if node_tls else None) as address:
        node = node_tls_settings(certificates, "required" if node_tls else "disabled")
        async with run_envoy(
            tmp_path, [address], ModuleConfig(client=client_tls_settings(certificates), node=node)
        ) as proxy:

            def log_in(password: str) -> None:
                options = account | {"password": password}
                with session(proxy, certificates if client_tls else None, **options) as connection:
                    assert query_value(connection, "select 7") == 7

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


async def test_decryptions_of_passwords_are_limited(
    tmp_path: Path, mariadb: MariaDb, tls_mariadb: MatrixMariaDb
) -> None:
    certificates = tls_mariadb.certificates
    # One in ten seconds.
    limits = LOGIN_LIMITS | {"max_decryptions_per_second_per_address": 0.1}
    account = {"user": SHA2[0], "password": SHA2[1], "database": None}
    async with sim_with_sha2(mariadb, certificates) as address:
        config = ModuleConfig(
            client=client_tls_settings(certificates),
            node=node_tls_settings(certificates),
            session={"login_limits": limits},
        )
        async with run_envoy(tmp_path, [address], config) as proxy:
            (await asyncio.to_thread(session, proxy, None, **account)).close()
            with pytest.raises(
                pymysql.OperationalError, match="too many clients send encrypted passwords"
            ) as error:
                await asyncio.to_thread(session, proxy, None, **account)
            assert error.value.args[0] == 1040
            (await asyncio.to_thread(session, proxy, certificates, **account)).close()
            await proxy.wait_for_metrics({("login_failures", address, "too_many_decryptions"): 1})


async def test_tidb_denies_a_change_to_a_caching_sha2_user(
    tmp_path: Path, mariadb: MariaDb, tls_mariadb: MatrixMariaDb
) -> None:
    """TiDB does not request the password then, so the client sends none."""
    certificates = tls_mariadb.certificates
    async with sim_with_sha2(mariadb, certificates) as address:
        config = ModuleConfig(node=node_tls_settings(certificates))
        async with run_envoy(tmp_path, [address], config) as proxy:
            client = await connect_logged_in(proxy)
            user = SHA2[0].encode() + b"\0\0\0-\0mysql_native_password\0"
            switch = await with_timeout(client.send_command(MySqlCommand.CHANGE_USER, user))
            assert switch.startswith(b"\xfecaching_sha2_password\0")
            client.writer.write(frame(2, b"h" * 32))
            sequence, answer = await with_timeout(client.read_packet())
            assert (sequence, answer[:22]) == (3, b"\xff\x15\x04#28000Access denied")


async def test_tls_client_may_reach_a_plain_node_if_allowed(
    tmp_path: Path, mariadb: MariaDb, tls_mariadb: MatrixMariaDb
) -> None:
    certificates = tls_mariadb.certificates
    async with sim_with_sha2(mariadb, None) as address:
        config = ModuleConfig(
            client=client_tls_settings(certificates), node={"allow_cleartext_backend": True}
        )
        async with run_envoy(tmp_path, [address], config) as proxy:
            with contextlib.suppress(pymysql.OperationalError):  # TiDB itself accepts no password without TLS
                account = {"user": SHA2[0], "password": SHA2[1], "database": None}
                (await asyncio.to_thread(session, proxy, certificates, **account)).close()
            failures = {labels for name, labels in await proxy.metrics() if name == "login_failures"}
            assert not any("clear_text_password" in labels for labels in failures)
