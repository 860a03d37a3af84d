"""TLS and compression on the SQL port of a simulated server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pymysql
import pytest
import trustme
from asyncmy.errors import OperationalError

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.compression import Compression
from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES, parse_greeting
from sandbox.tidb_sim.packets import Capability, MySqlCommand, frame, ok
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.tls import SqlTlsFiles
from tests.support.load.client_packets import SSL_REQUEST, login
from tests.support.module.envoy import login_packet
from tests.support.tidb_sim_clients import (
    CAPABILITIES,
    RawClient,
    connect_driver,
    query_rows,
    raw_connection,
    session_rules,
)
from tests.support.waiting import wait_until_read


@dataclass(frozen=True)
class Pki:
    """TLS files of a server, and the CA and the TLS context of its clients."""

    tls: SqlTlsFiles
    ca: Path
    trusting: ssl.SSLContext


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    directory = tmp_path_factory.mktemp("pki")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    tls, ca = SqlTlsFiles(directory / "cert.pem", directory / "key.pem"), directory / "ca.pem"
    issued.cert_chain_pems[0].write_to_path(tls.cert)
    issued.private_key_pem.write_to_path(tls.key)
    authority.cert_pem.write_to_path(ca)
    return Pki(tls, ca, ssl.create_default_context(cafile=ca))


@pytest.fixture
async def sim(mariadb: MariaDb, pki: Pki) -> AsyncIterator[TidbSim]:
    """Yield a simulated server with TLS. After the test, check that it saw no protocol violation."""
    async with TidbSim(SimSettings(session_rules(mariadb, tls=pki.tls))) as server:
        yield server
        assert server.node.violations == []


async def start_client_tls(
    client: RawClient, context: ssl.SSLContext
) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """Return a TLS object, and its BIOs for incoming and outgoing data. The ClientHello is ready to send."""
    await client.read_packet()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return tls, incoming, outgoing


async def finish_login(
    client: RawClient, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
) -> bytes:
    """Finish the handshake, log in as root, and return the decrypted response."""
    answer = b""
    established = False
    while not answer:
        data = await client.reader.read(65536)
        assert data, "the server has closed"
        incoming.write(data)
        try:
            if not established:
                tls.do_handshake()
                established = True
                tls.write(login("root", tls=True))
            answer = tls.read(65536)
        except ssl.SSLWantReadError:
            pass
        client.writer.write(outgoing.read())
    return answer


@pytest.mark.parametrize("step", [1000, 1])
async def test_client_hello_may_arrive_with_ssl_request(sim: TidbSim, pki: Pki, step: int) -> None:
    async with raw_connection(sim) as client:
        tls, incoming, outgoing = await start_client_tls(client, pki.trusting)
        data = SSL_REQUEST + outgoing.read()
        for at in range(0, len(data), step):
            client.writer.write(data[at : at + step])
            await wait_until_read(client.writer)
        assert await finish_login(client, tls, incoming, outgoing) == frame(3, ok(2))
        assert tls.version() == "TLSv1.3"


async def test_serves_session_inside_tls(sim: TidbSim, pki: Pki) -> None:
    async with raw_connection(sim) as client:
        greeting = parse_greeting((await client.read_packet())[1])
        assert greeting.capabilities == OFFERED_CAPABILITIES | Capability.SSL
    connection = await connect_driver(sim, ssl=pki.trusting)
    assert await query_rows(connection, "show status like 'Ssl_version'") == [("Ssl_version", "TLSv1.3")]
    assert await query_rows(connection, "select connection_id()") == [(connection.thread_id(),)]
    await connection.ensure_closed()


async def test_transfers_million_rows_and_20_mib_inside_tls(sim: TidbSim, pki: Pki, database: str) -> None:
    blob = bytes(range(256)) * (20 << 12)

    def exchange() -> tuple[int, bool]:
        host, port = sim.sql_address.split(":")
        with pymysql.connect(
            host=host, port=int(port), user="root", database=database, ssl=pki.trusting
        ) as connection:
            cursor = connection.cursor()
            cursor.execute("select seq, repeat('x', 20) from mysql.seq_1_to_1000000")
            total = sum(row[0] for row in cursor.fetchall())
            cursor.execute("create table t (data longblob)")
            cursor.execute("insert into t values (%s)", (blob,))
            cursor.execute("select data from t")
            return total, cursor.fetchall() == ((blob,),)

    assert await asyncio.to_thread(exchange) == (500_000_500_000, True)


async def test_rejects_tls_1_1_and_foreign_certificates(sim: TidbSim, pki: Pki) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    for context in (old, ssl.create_default_context()):
        with pytest.raises(OperationalError):
            await connect_driver(sim, ssl=context)
    async with raw_connection(sim) as client:
        await client.read_packet()
        client.writer.write(SSL_REQUEST + b"no TLS at all")
        await client.reader.read()
    assert sim.node.connections == 0


async def test_server_can_require_tls(mariadb: MariaDb, pki: Pki) -> None:
    rules = session_rules(mariadb, tls=pki.tls, require_secure_transport=True)
    async with TidbSim(SimSettings(rules)) as sim:
        async with raw_connection(sim) as client:
            denied = await client.login()
            assert denied[:3] == b"\xff\x57\x0c"
            assert denied[3:].startswith(b"Connections using insecure transport are prohibited")
            assert await client.reader.read() == b""
        await (await connect_driver(sim, ssl=pki.trusting)).ensure_closed()
        assert sim.node.violations == []


async def test_ssl_request_without_offer_is_violation(mariadb: MariaDb) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim, raw_connection(sim) as client:
        assert not parse_greeting((await client.read_packet())[1]).capabilities & Capability.SSL
        client.writer.write(SSL_REQUEST)
        assert (await client.read_packet())[1] == b"\xff\x51\x04malform packet error"
        assert len(sim.node.violations) == 1


async def test_wrong_sequence_number_inside_tls_is_violation(mariadb: MariaDb, pki: Pki) -> None:
    async with (
        TidbSim(SimSettings(session_rules(mariadb, tls=pki.tls))) as sim,
        raw_connection(sim) as client,
    ):
        await client.read_packet()
        client.writer.write(SSL_REQUEST)
        await client.writer.start_tls(pki.trusting, server_hostname="127.0.0.1")
        client.writer.write(login_packet(CAPABILITIES | Capability.SSL))
        assert await client.read_packet() == (2, b"\xff\x74\x1finvalid sequence 1 != 2")
        assert len(sim.node.violations) == 1


async def test_tls_client_gets_close_notify_at_once(sim: TidbSim, pki: Pki) -> None:
    async with raw_connection(sim) as client:
        tls, incoming, outgoing = await start_client_tls(client, pki.trusting)
        client.writer.write(SSL_REQUEST + outgoing.read())
        await finish_login(client, tls, incoming, outgoing)
        tls.write(frame(0, bytes((MySqlCommand.QUIT,))))
        client.writer.write(outgoing.read())
        incoming.write(await client.reader.read())  # The server sends its FIN without waiting for the client.
        assert tls.read() == b""  # close_notify, not just the FIN


# Compression.


class CompressedClient:
    """A client of the compressed protocol."""

    def __init__(self, client: RawClient) -> None:
        self.client, self.end, self.rest = client, Compression(), b""

    async def content(self, size: int) -> bytes:
        while len(self.rest) < size:
            part = self.end.next_content()
            if part is None:
                self.end.feed(await self.client.reader.read(65536))
            else:
                self.rest += part
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken

    async def packet(self) -> bytes:
        header = await self.content(4)
        return await self.content(int.from_bytes(header[:3], "little"))

    def send(self, *requests: bytes, number: int = 0) -> None:
        """Send each request in its own compressed packet."""
        for request in requests:
            self.end.sequence = 0
            self.client.writer.write(self.end.compress(frame(number, request)))

    async def rows(self) -> list[bytes]:
        packets = [await self.packet()]
        while packets[-1][0] != 0xFE:
            packets.append(await self.packet())
        return packets[1 + packets[0][0] : -1]


COMPRESSED_CAPABILITIES = CAPABILITIES | Capability.COMPRESS | Capability.DEPRECATE_EOF


async def test_serves_compressed_session(sim: TidbSim, database: str) -> None:
    async with raw_connection(sim) as client:
        assert await client.login(COMPRESSED_CAPABILITIES) == ok(2)
        compressed = CompressedClient(client)
        # The server ignores the sequence numbers of the MySQL packets inside compressed packets.
        # The sequence numbers of compressed packets restart with each request.
        compressed.send(b"\x03select repeat('x', 3000000)", number=9)
        assert [len(row) for row in await compressed.rows()] == [3_000_004]
        texts = (b"select sleep(0.05)", b"select @@port", b"select '" + b"y" * 5000 + b"'")
        for text in texts:
            compressed.send(b"\x03" + text)
            assert len(await compressed.rows()) == 1
        compressed.send(bytes((MySqlCommand.INIT_DB,)) + database.encode())
        assert (await compressed.packet())[0] == 0
        compressed.send(b"\x11root\0\0" + database.encode() + b"\0\x2d\0other_plugin\0")
        assert (await compressed.packet())[0] == 0xFE
        client.writer.write(compressed.end.compress(frame(2, b"")))
        assert await compressed.packet() == ok(2)
        compressed.send(b"\x03select database()")
        assert await compressed.rows() == [bytes((len(database),)) + database.encode()]


async def test_pipelined_compressed_requests_are_answered(sim: TidbSim) -> None:
    async with raw_connection(sim) as client:
        await client.login(COMPRESSED_CAPABILITIES)
        compressed = CompressedClient(client)
        compressed.send(*[b"\x03select sleep(0.01), '" + b"z" * 6000 + b"'"] * 10)
        for _ in range(10):
            compressed.end.sequence = 1
            assert len(await compressed.rows()) == 1


async def test_wrong_number_of_compressed_packet_is_violation(mariadb: MariaDb) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim, raw_connection(sim) as client:
        await client.login(COMPRESSED_CAPABILITIES)
        compressed = CompressedClient(client)
        compressed.end.sequence = 3
        client.writer.write(compressed.end.compress(frame(0, b"\x0e")))
        assert b"invalid compressed sequence 3 != 0" in await client.reader.read()
        assert len(sim.node.violations) == 1


async def test_stock_client_compresses(sim: TidbSim, pki: Pki, tmp_path: Path, database: str) -> None:
    """LOAD DATA and long rows of MariaDB's own client span many compressed packets."""
    file = tmp_path / "rows.csv"
    file.write_text("".join(f"{number},{'x' * 100}\n" for number in range(20_000)))
    host, port = sim.sql_address.split(":")
    script = (
        "create table t (id int, text varchar(100));"
        f"load data local infile '{file}' into table t fields terminated by ',';"
        "select count(*), sum(id) from t; select length(repeat('x', 20000000)); select * from t"
    )
    for tls in ([f"--ssl-ca={pki.ca}"], ["--skip-ssl"]):
        process = await asyncio.create_subprocess_exec(
            *("mariadb", "--no-defaults", "-N", "-h", host, "-P", port, "-u", "root", "--compress"),
            *("--local-infile=1", *tls, "-e", f"drop table if exists t; {script}", database),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert (process.returncode, errors) == (0, b"")
        lines = output.decode().splitlines()
        assert lines[:2] == ["20000\t199990000", "20000000"]
        assert len(lines) == 20_002
