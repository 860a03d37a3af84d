"""Sessions end during a TLS handshake, a login, an unread result or a long statement."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import AUTOCOMMIT, Capability, err, frame, single_row_result
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import reset_connection, run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    OK_PAYLOAD,
    ModuleEnvoy,
    accept_login,
    connect_logged_in,
    greeting_packet,
    login_packet,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient
from tests.support.waiting import assert_nothing_received, wait_until, wait_until_read

_T = TypeVar("_T")
QUERY = frame(0, b"\x03select 1")
WITH_TLS = greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL)
TLS_FAILED = b"the TLS handshake with the TiDB server failed"
REPETITIONS = 5
"""With repetitions, Envoy reads the node's last packet sometimes before the FIN or RST, sometimes with it."""
PIECE_BYTES = 128 << 10
"""Size of one write; Envoy buffers 1 MiB before it stops reading."""
NODE_TLS = {"tls": "required", "verify": "none"}


@pytest.fixture
def node_context(tmp_path: Path) -> ssl.SSLContext:
    certificates = PemFiles.create(tmp_path / "certificates")
    tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls_context.load_cert_chain(certificates.cert, certificates.key)
    return tls_context


class NodeTls:
    """TLS of a node over a plain stream, because asyncio's TLS would close when the peer half-closes."""

    def __init__(self, node: RawClient, node_context: ssl.SSLContext) -> None:
        self._node = node
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = node_context.wrap_bio(self._in, self._out, server_side=True)

    async def shake_hands(self) -> None:
        await self._run(self._tls.do_handshake)

    async def write(self, data: bytes) -> None:
        await self._run(lambda: self._tls.write(data))

    async def read_packet(self) -> tuple[int, bytes]:
        """Read a packet. Return sequence number and payload."""
        header = await self._exactly(4)
        return header[3], await self._exactly(int.from_bytes(header[:3], "little"))

    async def read(self) -> bytes:
        """Read some bytes. Return b"" after the peer's close_notify."""
        try:
            return await self._some(65_536)
        except ssl.SSLZeroReturnError:
            return b""

    async def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            data += await self._some(length - len(data))
        return data

    async def _some(self, limit: int) -> bytes:
        return await self._run(lambda: self._tls.read(limit))

    async def _run(self, step: Callable[[], _T]) -> _T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._node.writer.write(self._out.read())
                if data := await self._node.reader.read(65_536):
                    self._in.write(data)
                else:
                    self._in.write_eof()
            else:
                self._node.writer.write(self._out.read())
                return result


async def greet_with_tls(node: RawClient, node_context: ssl.SSLContext) -> NodeTls:
    node.writer.write(WITH_TLS)
    await node.read_packet()
    link = NodeTls(node, node_context)
    await link.shake_hands()
    return link


def close_or_reset(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "RST":
        reset_connection(writer)
    else:
        writer.close()


async def send_until_buffered(
    proxy: ModuleEnvoy, writer: asyncio.StreamWriter, send: Callable[[], None], gauge: str
) -> None:
    """Send small pieces until `gauge` shows that Envoy buffers them."""

    async def is_buffering() -> bool:
        send()
        await wait_until_read(writer)
        # With fewer bytes, the kernel's buffers might still have space.
        return (await proxy.stats(f"^{gauge}$"))[gauge] >= 4 * PIECE_BYTES

    await wait_until(is_buffering, timeout_seconds=60)


async def wait_node_connections_closed(proxy: ModuleEnvoy) -> None:
    """Wait until Envoy has no connection to a node, not even for a session that has ended."""

    async def are_closed() -> bool:
        stats = await proxy.stats("^(cluster.tidb.upstream_cx_active|tcp.sql.upstream_flush_active)$")
        assert len(stats) == 2
        return not any(stats.values())

    await wait_until(are_closed, timeout_seconds=10)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_half_closed_client_receives_its_answer_over_tls(
    tmp_path: Path, node_context: ssl.SSLContext, version: ssl.TLSVersion
) -> None:
    node_context.minimum_version = node_context.maximum_version = version
    eof_received = asyncio.Event()
    may_answer = asyncio.Event()

    async def answer_after_eof(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = await greet_with_tls(RawClient(reader, writer), node_context)
        sequence, _ = await link.read_packet()
        await link.write(frame(sequence + 1, OK_PAYLOAD))
        assert (await link.read_packet())[1] == QUERY[4:]
        assert await link.read() == b""
        eof_received.set()
        await may_answer.wait()
        await link.write(frame(1, OK_PAYLOAD))
        writer.close()

    async with (
        run_fake_server(answer_after_eof) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(node=NODE_TLS)) as proxy,
    ):
        client = await connect_logged_in(proxy)
        client.writer.write(QUERY)
        client.writer.write_eof()
        await with_timeout(eof_received.wait())
        may_answer.set()
        assert await read_to_end(client) == frame(1, OK_PAYLOAD)
        await proxy.wait_for_metrics({("logins", node.endpoint): 1})
        await proxy.wait_no_sessions(node.endpoint)


async def test_clients_that_leave_a_node_hanging_in_tls_leak_nothing(tmp_path: Path) -> None:
    reached: asyncio.Queue[None] = asyncio.Queue()

    async def hang_in_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WITH_TLS)
        await reader.readexactly(36 + 5)  # the SSLRequest, and the header of the first TLS record
        reached.put_nowait(None)

    async with (
        run_fake_server(hang_in_handshake) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(node=NODE_TLS)) as proxy,
    ):
        for _ in range(10):
            client = await proxy.connect()
            await with_timeout(client.read_packet())
            client.writer.write(login_packet())
            await with_timeout(reached.get())
            client.writer.close()

        await wait_node_connections_closed(proxy)
        for _ in range(10):
            await with_timeout(node.connection_ends.get())
        client_gone = ("login_failures", node.endpoint, "client_gone")
        await proxy.wait_for_metrics({client_gone: 10})
        await proxy.wait_no_sessions(node.endpoint)


async def test_clients_that_leave_a_node_that_does_not_read_leak_nothing(tmp_path: Path) -> None:
    may_read = asyncio.Event()

    async def stop_reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept_login(reader, writer)
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        await may_read.wait()
        transport.resume_reading()

    async with run_fake_server(stop_reading) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await connect_logged_in(proxy)
        client.writer.write((0xFFFFFE).to_bytes(3, "little") + b"\0\x03")

        def send() -> None:
            client.writer.write(bytes(PIECE_BYTES))

        await send_until_buffered(proxy, client.writer, send, "cluster.tidb.upstream_cx_tx_bytes_buffered")
        reset_connection(client.writer)

        await wait_node_connections_closed(proxy)
        may_read.set()
        await proxy.wait_for_metrics({("logins", node.endpoint): 1})
        await proxy.wait_no_sessions(node.endpoint)


async def test_session_ends_with_its_node_while_the_result_is_unread(
    tmp_path: Path,
) -> None:
    *head, row, last = single_row_result([("x", "x" * PIECE_BYTES)], AUTOCOMMIT, deprecate_eof=False)
    sent = bytearray()
    query_received = asyncio.Event()

    async def receive_query(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (await accept_login(reader, writer)).read_packet()
        query_received.set()

    async with run_fake_server(receive_query) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await connect_logged_in(proxy)
        transport = client.writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        client.writer.write(QUERY)
        await with_timeout(query_received.wait())
        (writer,) = node.writers
        sequence_numbers = itertools.count(1)

        def send(payload: bytes = row) -> None:
            read_packet = frame(next(sequence_numbers), payload)
            writer.write(read_packet)
            sent.extend(read_packet)

        for payload in head:
            send(payload)

        await send_until_buffered(proxy, writer, send, "tcp.sql.downstream_cx_tx_bytes_buffered")
        await proxy.wait_for_metrics({("sessions", node.endpoint, "busy"): 1})
        send(last)
        writer.close()
        # Envoy leaves the client's connection open for the unread data, although the session has ended.
        await proxy.wait_no_sessions(node.endpoint)
        clients = await proxy.stats("^listener.*downstream_cx_active$")
        assert (
            sum(value for name, value in clients.items() if "admin" not in name and "worker" not in name) == 1
        )
        transport.resume_reading()
        assert await read_to_end(client) == sent


async def end_after_client_hello(node: RawClient, _: ssl.SSLContext) -> None:
    await node.reader.readexactly(36 + 5)


async def end_in_server_flight(node: RawClient, node_context: ssl.SSLContext) -> None:
    """Send only the beginning of the server's first TLS flight."""
    await node.read_packet()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = node_context.wrap_bio(incoming, outgoing, server_side=True)
    incoming.write(await node.reader.read(65_536))
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    node.writer.write(outgoing.read()[:200])
    await node.writer.drain()


NodeBehaviour = Callable[[RawClient, ssl.SSLContext], Awaitable[None]]


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize(
    "behave", [end_after_client_hello, end_in_server_flight], ids=["first record", "server flight"]
)
async def test_client_receives_error_if_the_node_ends_the_tls_handshake(
    tmp_path: Path, node_context: ssl.SSLContext, behave: NodeBehaviour, how: str
) -> None:
    async def behave_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WITH_TLS)
        await behave(RawClient(reader, writer), node_context)
        close_or_reset(writer, how)

    async with (
        run_fake_server(behave_and_close) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(node=NODE_TLS)) as proxy,
    ):
        for _ in range(REPETITIONS):
            client = await proxy.connect()
            await with_timeout(client.read_packet())
            client.writer.write(login_packet())
            sequence, error = await with_timeout(client.read_packet())
            assert (sequence, error[:9]) == (2, err(1105, "", "HY000")), error
            assert TLS_FAILED in error
            assert await read_to_end(client) == b""
        await proxy.wait_for_metrics(
            {
                ("login_failures", node.endpoint, "node_tls_failed"): REPETITIONS,
                ("login_failures", node.endpoint, "node_gone"): 0,
                ("connect_failures", node.endpoint, "tls"): REPETITIONS,
            }
        )
        await proxy.wait_no_sessions(node.endpoint)


async def end_within_login(node: RawClient, _: ssl.SSLContext) -> None:
    node.writer.write(greeting_packet())
    await node.reader.readexactly(4)


async def end_before_ok(node: RawClient, _: ssl.SSLContext) -> None:
    node.writer.write(greeting_packet())
    await node.read_packet()


async def end_within_ok(node: RawClient, _: ssl.SSLContext) -> None:
    node.writer.write(greeting_packet())
    sequence, _payload = await node.read_packet()
    node.writer.write(frame(sequence + 1, OK_PAYLOAD)[:-1])
    await node.writer.drain()


async def end_after_auth_switch(node: RawClient, _: ssl.SSLContext) -> None:
    node.writer.write(greeting_packet())
    sequence, _payload = await node.read_packet()
    node.writer.write(frame(sequence + 1, b"\xfeclient_ed25519\0" + b"a" * 32))
    await node.read_packet()


async def end_before_ok_with_tls(node: RawClient, node_context: ssl.SSLContext) -> None:
    await (await greet_with_tls(node, node_context)).read_packet()


LOGIN_ENDS = {
    "within the answer": (end_within_login, {}),
    "before the OK": (end_before_ok, {}),
    "within the OK": (end_within_ok, {}),
    "after a switch": (end_after_auth_switch, {}),
    "before the OK, TLS": (end_before_ok_with_tls, NODE_TLS),
}


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize(("behave", "node_config"), LOGIN_ENDS.values(), ids=LOGIN_ENDS.keys())
async def test_client_receives_error_if_the_node_ends_the_login(
    tmp_path: Path, node_context: ssl.SSLContext, behave: NodeBehaviour, node_config: dict[str, str], how: str
) -> None:
    async def behave_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await behave(RawClient(reader, writer), node_context)
        close_or_reset(writer, how)

    async with (
        run_fake_server(behave_and_close) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(node=node_config)) as proxy,
    ):
        for _ in range(REPETITIONS):
            client = await proxy.connect()
            await with_timeout(client.read_packet())
            client.writer.write(login_packet())
            sequence, error = await with_timeout(client.read_packet())
            expected = 2
            if error[0] == 0xFE:
                client.writer.write(frame(sequence + 1, b"a signature"))
                sequence, error = await with_timeout(client.read_packet())
                expected = 4
            assert (sequence, error[:9]) == (expected, err(1105, "", "HY000")), error
            assert b"closed" in error
            assert await read_to_end(client) == b""

        async def are_counted() -> bool:
            counts = [n for (name, _), n in (await proxy.metrics()).items() if name == "login_failures" and n]
            return counts == [REPETITIONS]

        await wait_until(are_counted)
        await proxy.wait_no_sessions(node.endpoint)


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_client_receives_error_of_a_node_that_ends_while_envoy_holds_bytes_for_it(
    tmp_path: Path, node_context: ssl.SSLContext, with_tls: bool, how: str
) -> None:
    """A node rejects a packet that is too large without reading it, so its kernel may send a RST."""
    error = frame(1, err(1153, "Got a packet bigger than 'max_allowed_packet' bytes", "08S01"))
    may_reject = asyncio.Event()

    async def reject_unread(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        if with_tls:
            link = await greet_with_tls(RawClient(reader, writer), node_context)
            sequence, _ = await link.read_packet()
            await link.write(frame(sequence + 1, OK_PAYLOAD))
        else:
            await accept_login(reader, writer)
        transport.pause_reading()
        await may_reject.wait()
        if with_tls:
            await link.write(error)
        else:
            writer.write(error)
        close_or_reset(writer, how)

    config = ModuleConfig(node=NODE_TLS if with_tls else {})
    async with (
        run_fake_server(reject_unread) as node,
        run_envoy(tmp_path, [node.endpoint], config) as proxy,
    ):
        client = await connect_logged_in(proxy)
        client.writer.write((0xFFFFFE).to_bytes(3, "little") + b"\0\x03")
        await send_until_buffered(
            proxy,
            client.writer,
            lambda: client.writer.write(bytes(PIECE_BYTES)),
            "cluster.tidb.upstream_cx_tx_bytes_buffered",
        )
        may_reject.set()
        assert await read_to_end(client) == error


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_client_receives_error_if_the_node_ends_before_its_login(tmp_path: Path, how: str) -> None:
    greeting_forwarded = asyncio.Event()

    async def greet_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        await greeting_forwarded.wait()
        close_or_reset(writer, how)

    async with run_fake_server(greet_and_close) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await proxy.connect()
        await with_timeout(client.read_packet())
        greeting_forwarded.set()
        sequence, error = await with_timeout(client.read_packet())
        assert (sequence, error[:3]) == (1, err(1105, "", None)), error
        assert b"closed" in error
        assert await read_to_end(client) == b""


async def connect_compressed(proxy: ModuleEnvoy) -> RawClient:
    """Return a client that uses compression. Its session is opaque: the module cannot parse it."""
    client = await proxy.connect()
    assert (await with_timeout(client.login(CAPABILITIES | Capability.COMPRESS)))[0] == 0
    return client


async def connect_opaque(proxy: ModuleEnvoy) -> RawClient:
    """Return a client whose node has sent an unsolicited error, so that its session is opaque."""
    client = await connect_logged_in(proxy)
    assert (await with_timeout(client.read_packet()))[1][0] == 0xFF
    return client


def compressed_packet(read_packet: bytes, sequence: int) -> bytes:
    """Return a packet of the compressed protocol whose payload, `read_packet`, is not compressed."""
    return len(read_packet).to_bytes(3, "little") + bytes((sequence,)) + bytes(3) + read_packet


@pytest.mark.parametrize("connect", [connect_compressed, connect_opaque])
async def test_long_statement_of_an_opaque_session_is_not_idle(
    tmp_path: Path, connect: Callable[[ModuleEnvoy], Awaitable[RawClient]]
) -> None:
    query, answer = QUERY, frame(1, OK_PAYLOAD)
    if connect is connect_compressed:
        query, answer = compressed_packet(query, 0), compressed_packet(answer, 1)

    async def answer_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept_login(reader, writer)
        if connect is connect_opaque:
            writer.write(frame(0, err(1053, "Server shutdown in progress", "08S01")))
        await reader.readexactly(len(query))
        await assert_nothing_received(reader, 2.5)
        writer.write(answer)

    config = ModuleConfig(client={"compression": "passthrough"}, live_settings={"idle_timeout": 1.0})
    async with run_fake_server(answer_slowly) as node, run_envoy(tmp_path, [node.endpoint], config) as proxy:
        client = await connect(proxy)
        client.writer.write(query)
        await proxy.wait_for_metrics({("sessions", node.endpoint, "opaque"): 1})
        assert await with_timeout(client.reader.readexactly(len(answer))) == answer
        # The session is idle now, so the idle timeout ends it.
        assert await read_to_end(client) == b""
        await proxy.wait_no_sessions(node.endpoint)
