"""Ends while something is under way: TLS, a login, a result that nobody reads, a long statement."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import AUTOCOMMIT, Capability, err, frame, single_row_result
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
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
TIMES = 5
"""Whether a node's end or what it said last is seen first, is a race; one of so many should go each way."""
LITTLE = 128 << 10
"""Bytes; Envoy holds 1 MiB before it stops reading."""
STATES = ("login", "idle", "busy", "transaction", "opaque")
TO_NODE = {"tls": "required", "verify": "none"}


@pytest.fixture
def context(tmp_path: Path) -> ssl.SSLContext:
    """A node's."""
    pair = PemFiles.create(tmp_path / "certificates")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(pair.cert, pair.key)
    return made


class NodeTls:
    """A node's side of TLS on a plain stream: asyncio's own ends as soon as its peer has said all."""

    def __init__(self, node: RawClient, context: ssl.SSLContext) -> None:
        self._node = node
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)

    async def shake_hands(self) -> None:
        await self._run(self._tls.do_handshake)

    async def write(self, data: bytes) -> None:
        await self._run(lambda: self._tls.write(data))

    async def packet(self) -> tuple[int, bytes]:
        """Sequence number and payload."""
        header = await self._exactly(4)
        return header[3], await self._exactly(int.from_bytes(header[:3], "little"))

    async def read(self) -> bytes:
        """Some bytes; none when the peer has said, within TLS, that it will send no more."""
        try:
            return await self._some(65_536)
        except ssl.SSLZeroReturnError:
            return b""

    async def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            data += await self._some(length - len(data))
        return data

    async def _some(self, most: int) -> bytes:
        return await self._run(lambda: self._tls.read(most))

    async def _run(self, step: Callable[[], _T]) -> _T:
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                self._node.writer.write(self._out.read())
                if data := await self._node.reader.read(65_536):
                    self._in.write(data)
                else:
                    self._in.write_eof()
            else:
                self._node.writer.write(self._out.read())
                return done


async def over_tls(node: RawClient, context: ssl.SSLContext) -> NodeTls:
    """Greets, and goes on in TLS."""
    node.writer.write(WITH_TLS)
    await node.read_packet()
    link = NodeTls(node, context)
    await link.shake_hands()
    return link


def end(writer: asyncio.StreamWriter, how: str) -> None:
    """By FIN or by RST."""
    if how == "RST":
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


def none_left(endpoint: str) -> dict[tuple[str, ...], int]:
    return {("sessions", endpoint, state): 0 for state in STATES}


async def get_stuck(
    proxy: ModuleEnvoy, writer: asyncio.StreamWriter, send: Callable[[], None], held: str
) -> None:
    """Send little by little, so that Envoy goes on reading, until it has to keep what it reads."""

    async def is_stuck() -> bool:
        send()
        await wait_until_read(writer)
        # Less than that the kernel might still find room for.
        return (await proxy.stats(f"^{held}$"))[held] >= 4 * LITTLE

    await wait_until(is_stuck, timeout_seconds=60)


async def nodes_are_left(proxy: ModuleEnvoy) -> None:
    """Wait until Envoy has no connection to a node, not even one that only waits for its last bytes to go."""

    async def are_closed() -> bool:
        stats = await proxy.stats("^(cluster.tidb.upstream_cx_active|tcp.sql.upstream_flush_active)$")
        assert len(stats) == 2
        return not any(stats.values())

    await wait_until(are_closed, timeout_seconds=10)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_a_client_that_has_said_all_still_gets_its_answer_over_tls(
    tmp_path: Path, context: ssl.SSLContext, version: ssl.TLSVersion
) -> None:
    context.minimum_version = context.maximum_version = version
    heard_all = asyncio.Event()
    go = asyncio.Event()

    async def answers_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = await over_tls(RawClient(reader, writer), context)
        sequence, _ = await link.packet()
        await link.write(frame(sequence + 1, OK_PAYLOAD))
        assert (await link.packet())[1] == QUERY[4:]
        assert await link.read() == b""
        heard_all.set()
        await go.wait()
        await link.write(frame(1, OK_PAYLOAD))
        writer.close()

    async with (
        run_fake_server(answers_late) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(node=TO_NODE)) as proxy,
    ):
        client = await connect_logged_in(proxy)
        client.writer.write(QUERY)
        client.writer.write_eof()
        await with_timeout(heard_all.wait())
        go.set()
        assert await read_to_end(client) == frame(1, OK_PAYLOAD)
        await proxy.wait_for_metrics({("logins", node.endpoint): 1, **none_left(node.endpoint)})


async def test_clients_that_leave_a_node_which_hangs_in_tls_leave_nothing(tmp_path: Path) -> None:
    reached: asyncio.Queue[None] = asyncio.Queue()

    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WITH_TLS)
        await reader.readexactly(36 + 5)  # the request for TLS, and the head of what TLS says
        reached.put_nowait(None)

    async with (
        run_fake_server(hangs) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(node=TO_NODE)) as proxy,
    ):
        for _ in range(10):
            client = await proxy.connect()
            await with_timeout(client.read_packet())
            client.writer.write(login_packet())
            await with_timeout(reached.get())
            client.writer.close()

        await nodes_are_left(proxy)
        for _ in range(10):
            await with_timeout(node.connection_ends.get())
        gone = ("login_failures", node.endpoint, "client_gone")
        await proxy.wait_for_metrics({gone: 10, **none_left(node.endpoint)})


async def test_clients_that_leave_a_node_which_does_not_read_leave_nothing(tmp_path: Path) -> None:
    seen = asyncio.Event()

    async def stops_reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept_login(reader, writer)
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        await seen.wait()
        transport.resume_reading()

    async with run_fake_server(stops_reading) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await connect_logged_in(proxy)
        client.writer.write((0xFFFFFE).to_bytes(3, "little") + b"\0\x03")

        def send() -> None:
            client.writer.write(bytes(LITTLE))

        await get_stuck(proxy, client.writer, send, "cluster.tidb.upstream_cx_tx_bytes_buffered")
        end(client.writer, "RST")

        await nodes_are_left(proxy)
        seen.set()
        await proxy.wait_for_metrics({("logins", node.endpoint): 1, **none_left(node.endpoint)})


async def test_a_session_leaves_its_node_when_that_closes_though_nobody_reads_the_result(
    tmp_path: Path,
) -> None:
    *head, row, last = single_row_result([("x", "x" * LITTLE)], AUTOCOMMIT, deprecate_eof=False)
    sent = bytearray()
    asked = asyncio.Event()

    async def is_asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (await accept_login(reader, writer)).read_packet()
        asked.set()

    async with run_fake_server(is_asked) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await connect_logged_in(proxy)
        transport = client.writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        client.writer.write(QUERY)
        await with_timeout(asked.wait())
        (writer,) = node.writers
        numbers = itertools.count(1)

        def send(payload: bytes = row) -> None:
            packet = frame(next(numbers), payload)
            writer.write(packet)
            sent.extend(packet)

        for payload in head:
            send(payload)

        await get_stuck(proxy, writer, send, "tcp.sql.downstream_cx_tx_bytes_buffered")
        await proxy.wait_for_metrics({("sessions", node.endpoint, "busy"): 1})
        send(last)
        writer.close()
        # Its connection is left some time to read on: it is there when the session is not counted any more.
        await proxy.wait_for_metrics(none_left(node.endpoint))
        clients = await proxy.stats("^listener.*downstream_cx_active$")
        assert (
            sum(value for name, value in clients.items() if "admin" not in name and "worker" not in name) == 1
        )
        transport.resume_reading()
        assert await read_to_end(client) == sent


async def ends_at_once(node: RawClient, _: ssl.SSLContext) -> None:
    await node.reader.readexactly(36 + 5)


async def ends_in_the_handshake(node: RawClient, context: ssl.SSLContext) -> None:
    """Behind the server's first flight."""
    await node.read_packet()
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(into, out, server_side=True)
    into.write(await node.reader.read(65_536))
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    # Half of it, or it were not the middle.
    node.writer.write(out.read()[:200])
    await node.writer.drain()


Ends = Callable[[RawClient, ssl.SSLContext], Awaitable[None]]


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("ends", [ends_at_once, ends_in_the_handshake], ids=["at once", "in the middle"])
async def test_a_client_is_told_of_a_node_that_ends_its_tls_handshake(
    tmp_path: Path, context: ssl.SSLContext, ends: Ends, how: str
) -> None:
    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WITH_TLS)
        await ends(RawClient(reader, writer), context)
        end(writer, how)

    async with (
        run_fake_server(leaves) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(node=TO_NODE)) as proxy,
    ):
        for _ in range(TIMES):
            client = await proxy.connect()
            await with_timeout(client.read_packet())
            client.writer.write(login_packet())
            sequence, told = await with_timeout(client.read_packet())
            assert (sequence, told[:9]) == (2, err(1105, "", "HY000")), told
            assert TLS_FAILED in told
            assert await read_to_end(client) == b""
        await proxy.wait_for_metrics(
            {
                ("login_failures", node.endpoint, "node_tls_failed"): TIMES,
                ("login_failures", node.endpoint, "node_gone"): 0,
                ("connect_failures", node.endpoint, "tls"): TIMES,
                **none_left(node.endpoint),
            }
        )


async def within_the_answer(node: RawClient, _: ssl.SSLContext) -> None:
    node.writer.write(greeting_packet())
    await node.reader.readexactly(4)


async def before_the_ok(node: RawClient, _: ssl.SSLContext) -> None:
    node.writer.write(greeting_packet())
    await node.read_packet()


async def within_the_ok(node: RawClient, _: ssl.SSLContext) -> None:
    node.writer.write(greeting_packet())
    sequence, _payload = await node.read_packet()
    node.writer.write(frame(sequence + 1, OK_PAYLOAD)[:-1])
    await node.writer.drain()


async def after_a_switch(node: RawClient, _: ssl.SSLContext) -> None:
    node.writer.write(greeting_packet())
    sequence, _payload = await node.read_packet()
    node.writer.write(frame(sequence + 1, b"\xfeclient_ed25519\0" + b"a" * 32))
    await node.read_packet()


async def before_the_ok_of_tls(node: RawClient, context: ssl.SSLContext) -> None:
    await (await over_tls(node, context)).packet()


LEAVES = {
    "within the answer": (within_the_answer, {}),
    "before the OK": (before_the_ok, {}),
    "within the OK": (within_the_ok, {}),
    "after a switch": (after_a_switch, {}),
    "before the OK, TLS": (before_the_ok_of_tls, TO_NODE),
}


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize(("ends", "towards"), LEAVES.values(), ids=LEAVES.keys())
async def test_a_client_is_told_of_a_node_that_ends_its_login(
    tmp_path: Path, context: ssl.SSLContext, ends: Ends, towards: dict[str, str], how: str
) -> None:
    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends(RawClient(reader, writer), context)
        end(writer, how)

    async with (
        run_fake_server(leaves) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(node=towards)) as proxy,
    ):
        for _ in range(TIMES):
            client = await proxy.connect()
            await with_timeout(client.read_packet())
            client.writer.write(login_packet())
            sequence, told = await with_timeout(client.read_packet())
            expected = 2
            if told[0] == 0xFE:
                client.writer.write(frame(sequence + 1, b"a signature"))
                sequence, told = await with_timeout(client.read_packet())
                expected = 4
            assert (sequence, told[:9]) == (expected, err(1105, "", "HY000")), told
            assert b"closed" in told
            assert await read_to_end(client) == b""

        async def are_counted() -> bool:
            told = [n for (name, _), n in (await proxy.metrics()).items() if name == "login_failures" and n]
            return told == [TIMES]

        await wait_until(are_counted)
        await proxy.wait_for_metrics(none_left(node.endpoint))


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_client_that_has_not_answered_is_told_of_a_node_that_ends(tmp_path: Path, how: str) -> None:
    passed_on = asyncio.Event()

    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        await passed_on.wait()
        end(writer, how)

    async with run_fake_server(leaves) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await proxy.connect()
        await with_timeout(client.read_packet())
        passed_on.set()
        sequence, told = await with_timeout(client.read_packet())
        assert (sequence, told[:3]) == (1, err(1105, "", None)), told
        assert b"closed" in told
        assert await read_to_end(client) == b""


async def compressed(proxy: ModuleEnvoy) -> RawClient:
    """A client that packs its packets, which nobody between it and the node looks into."""
    client = await proxy.connect()
    assert (await with_timeout(client.login(CAPABILITIES | Capability.COMPRESS)))[0] == 0
    return client


async def unfollowed(proxy: ModuleEnvoy) -> RawClient:
    """A client to which its node has said something unasked."""
    client = await connect_logged_in(proxy)
    assert (await with_timeout(client.read_packet()))[1][0] == 0xFF
    return client


def packed(packet: bytes, sequence: int) -> bytes:
    """One packet of the compressed protocol, which holds another as it is."""
    return len(packet).to_bytes(3, "little") + bytes((sequence,)) + bytes(3) + packet


@pytest.mark.parametrize("logs_in", [compressed, unfollowed])
async def test_a_statement_that_takes_long_is_not_idleness_where_nobody_follows(
    tmp_path: Path, logs_in: Callable[[ModuleEnvoy], Awaitable[RawClient]]
) -> None:
    query, answer = QUERY, frame(1, OK_PAYLOAD)
    if logs_in is compressed:
        query, answer = packed(query, 0), packed(answer, 1)

    async def takes_long(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept_login(reader, writer)
        if logs_in is unfollowed:
            writer.write(frame(0, err(1053, "Server shutdown in progress", "08S01")))
        await reader.readexactly(len(query))
        await assert_nothing_received(reader, 2.5)
        writer.write(answer)

    parts = ModuleConfig(client={"compression": "passthrough"}, live={"idle_timeout": 1.0})
    async with run_fake_server(takes_long) as node, run_envoy(tmp_path, [node.endpoint], parts) as proxy:
        client = await logs_in(proxy)
        client.writer.write(query)
        await proxy.wait_for_metrics({("sessions", node.endpoint, "opaque"): 1})
        assert await with_timeout(client.reader.readexactly(len(answer))) == answer
        # It is idle now, and ends as others do.
        assert await read_to_end(client) == b""
        await proxy.wait_for_metrics(none_left(node.endpoint))
