"""Bytes that go straight from one socket to the other: all arrive, in order, and are counted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import select
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import AUTOCOMMIT, eof, frame, single_row_result
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import FakeServer, run_fake_server
from tests.support.module.envoy import (
    OK_PAYLOAD,
    ModuleEnvoy,
    accept_login,
    client_tls_config,
    connect_logged_in,
    connect_with_tls,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

QUERY = frame(0, b"\x03select 1")
MANY = 24 << 20
"""Bytes; more than all buffers on the way hold."""
TIMES = 20
"""What is seen first is a race; one of so many should go each way."""
STATES = ("login", "idle", "busy", "transaction", "opaque")


SETTLED = 8
"""Statements after which a connection's events go past Envoy."""


@dataclass(frozen=True)
class Kind:
    """Of sessions. `certificates`: None without TLS; `asked`: statements before it is a test's."""

    certificates: PemFiles | None = None
    asked: int = 0


NEW = Kind()


@pytest.fixture(params=[0, SETTLED], ids=["new", "settled"])
def plain(request: pytest.FixtureRequest) -> Kind:
    """Sessions without TLS."""
    return Kind(asked=request.param)


@pytest.fixture(params=["plain", "TLS"])
def kind(request: pytest.FixtureRequest, plain: Kind, tmp_path: Path) -> Kind:
    """All kinds of sessions."""
    if request.param == "plain":
        return plain
    return Kind(PemFiles.create(tmp_path / "certificates"), plain.asked)


@asynccontextmanager
async def before_node(
    tmp_path: Path, kind: Kind = NEW
) -> AsyncIterator[tuple[ModuleEnvoy, asyncio.Queue[RawClient], FakeServer]]:
    """An Envoy before one node, which lets everybody in and then does as the test says."""
    nodes: asyncio.Queue[RawClient] = asyncio.Queue()
    finished = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nodes.put_nowait(await accept_login(reader, writer))
        await finished.wait()

    parts = client_tls_config(kind.certificates, allow_cleartext_backend=True) if kind.certificates else None
    async with run_fake_server(handler) as node, run_envoy(tmp_path, [node.endpoint], parts) as proxy:
        yield proxy, nodes, node
        finished.set()


async def pair(
    proxy: ModuleEnvoy, nodes: asyncio.Queue[RawClient], kind: Kind = NEW
) -> tuple[RawClient, RawClient]:
    """A client that is logged in, and its node's side."""
    client = await (
        connect_with_tls(proxy, kind.certificates) if kind.certificates else connect_logged_in(proxy)
    )
    node = await with_timeout(nodes.get())
    for _ in range(kind.asked):
        await answered(client, node)
    return client, node


async def answered(client: RawClient, node: RawClient, answer: bytes = frame(1, OK_PAYLOAD)) -> None:
    """One statement, and its answer."""
    client.writer.write(QUERY)
    assert await with_timeout(node.reader.readexactly(len(QUERY))) == QUERY
    node.writer.write(answer)
    assert await with_timeout(client.reader.readexactly(len(answer))) == answer


def result(size: int, seed: int) -> bytes:
    """A text result set of about so many bytes, no two rows of which are alike."""
    dice = random.Random(seed)
    head = single_row_result([("c", "")], AUTOCOMMIT, deprecate_eof=False)[:3]
    packets, sequence, length = bytearray(), 1, 0
    for payload in head:
        packets += frame(sequence, payload)
        sequence += 1
    while length < size:
        row = dice.randbytes(dice.choice((1, 40, 200, 250)))
        packets += frame(sequence & 0xFF, bytes((len(row),)) + row)
        length += len(row) + 5
        sequence += 1
    return bytes(packets + frame(sequence & 0xFF, eof(AUTOCOMMIT)))


def reset(raw: RawClient) -> None:
    """Ends its connection by RST."""
    connection = raw.writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.writer.transport.abort()


async def counted(proxy: ModuleEnvoy, name: str) -> int:
    """One of Envoy's own counters."""
    page = (await proxy.get(f"/stats?format=json&filter=^{name}$")).json()
    return int(next((stat["value"] for stat in page["stats"] if "value" in stat), 0))


async def all_gone(proxy: ModuleEnvoy, node: str) -> None:
    """Returns when no session is left."""
    await proxy.wait_for_metrics({("sessions", node, state): 0 for state in STATES})


async def test_envoy_counts_what_goes_past_it(tmp_path: Path) -> None:
    answer = result(300_000, seed=1)
    names = [
        f"{side}_cx_{way}_bytes_total"
        for side, way in itertools.product(("tcp.sql.downstream", "cluster.tidb.upstream"), ("rx", "tx"))
    ]
    async with before_node(tmp_path) as (proxy, nodes, _):

        async def after(statements: int) -> list[int]:
            """All that was counted when such a session is over."""
            client, node = await pair(proxy, nodes)
            for _ in range(statements):
                await answered(client, node, answer)
            client.writer.write_eof()  # what went straight is told at the end
            assert await with_timeout(node.reader.read()) == b""
            node.writer.write_eof()
            assert await read_to_end(client) == b""
            await wait_until(is_over)
            return [await counted(proxy, name) for name in names]

        async def is_over() -> bool:
            return await counted(proxy, "tcp.sql.downstream_cx_active") == 0

        login = await after(0)
        both = await after(10)
        grown = [after - 2 * before for after, before in zip(both, login, strict=True)]
        assert grown == [10 * len(QUERY), 10 * len(answer), 10 * len(answer), 10 * len(QUERY)]


def watched_for_room(pid: int, peers: set[int]) -> int:
    """Of how many of a process's connections to these ports epoll tells when there is room for writing.

    proc(5): `/proc/PID/fdinfo`, `/proc/PID/fd`, `/proc/PID/net/tcp` (hexadecimal ports, and inodes).
    """
    process, watched = Path(f"/proc/{pid}"), set()
    for about in process.joinpath("fdinfo").iterdir():
        # A descriptor that is closed meanwhile was none of the session's.
        with contextlib.suppress(FileNotFoundError):
            for words in map(str.split, about.read_text().splitlines()):
                if words[:1] == ["tfd:"] and int(words[3], 16) & select.EPOLLOUT:
                    with contextlib.suppress(FileNotFoundError):
                        watched.add(os.readlink(process / "fd" / words[1]))
    sockets = [line.split() for line in process.joinpath("net/tcp").read_text().splitlines()[1:]]
    ours = {f"socket:[{words[9]}]" for words in sockets if int(words[2].rpartition(":")[2], 16) in peers}
    return len(watched & ours)


async def test_the_events_of_a_settled_session_go_past_envoy_until_there_is_no_room(
    tmp_path: Path, kind: Kind
) -> None:
    big = result(MANY, seed=9)
    async with before_node(tmp_path, kind) as (proxy, nodes, peer):
        client, node = await pair(proxy, nodes, kind)
        own = client.writer.get_extra_info("sockname")[1]
        peers = {own, int(peer.endpoint.rpartition(":")[2])}
        assert watched_for_room(proxy.process.pid, peers) == (0 if kind.asked else 2)
        for _ in range(2):
            for _ in range(SETTLED):
                await answered(client, node, result(100, seed=10))
            await wait_until(lambda: watched_for_room(proxy.process.pid, peers) == 0)

            client.writer.write(QUERY)
            await with_timeout(node.reader.readexactly(len(QUERY)))
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            node.writer.write(big)
            await wait_until(lambda: watched_for_room(proxy.process.pid, {own}) == 1)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await with_timeout(client.reader.readexactly(len(big))) == big


async def test_sessions_go_in_any_order_and_the_others_are_served_as_before(
    tmp_path: Path, kind: Kind
) -> None:
    dice = random.Random(11)
    async with before_node(tmp_path, kind) as (proxy, nodes, peer):
        for _ in range(3):  # from none to some, and back
            sessions = [await pair(proxy, nodes, kind) for _ in range(12)]
            while sessions:
                client, node = sessions.pop(dice.randrange(len(sessions)))
                one, other = (client, node) if dice.random() < 0.5 else (node, client)
                if dice.random() < 0.5:
                    one.writer.close()
                else:
                    reset(one)
                await read_to_end(other)
                other.writer.close()
                for client, node in sessions:
                    await answered(client, node)
            await all_gone(proxy, peer.endpoint)


async def test_order_is_kept_while_a_client_does_not_read(tmp_path: Path, kind: Kind) -> None:
    big, small = result(MANY, seed=2), result(1000, seed=3)
    async with before_node(tmp_path, kind) as (proxy, nodes, _):
        client, node = await pair(proxy, nodes, kind)
        for _ in range(2):  # it goes straight again after that
            client.writer.write(QUERY + QUERY)
            await with_timeout(node.reader.readexactly(2 * len(QUERY)))
            paused = await counted(proxy, "cluster.tidb.upstream_flow_control_paused_reading_total")
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            node.writer.write(big + small)

            async def is_paused(before: int = paused) -> bool:
                name = "cluster.tidb.upstream_flow_control_paused_reading_total"
                return await counted(proxy, name) > before

            await wait_until(is_paused)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await with_timeout(client.reader.readexactly(len(big) + len(small))) == big + small
            client.writer.write(QUERY)
            await with_timeout(node.reader.readexactly(len(QUERY)))
            node.writer.write(small)
            assert await with_timeout(client.reader.readexactly(len(small))) == small


async def test_order_is_kept_while_a_node_does_not_read(tmp_path: Path, kind: Kind) -> None:
    dice = random.Random(4)
    statement = b"\x03" + dice.randbytes(MANY)
    whole = b"".join(
        frame(number, statement[at : at + 0xFFFFFF])
        for number, at in enumerate(range(0, len(statement), 0xFFFFFF))
    )
    async with before_node(tmp_path, kind) as (proxy, nodes, _):
        client, node = await pair(proxy, nodes, kind)
        for _ in range(2):
            node.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.writer.write(whole)

            async def is_paused() -> bool:
                return await counted(proxy, "tcp.sql.downstream_flow_control_paused_reading_total") > 0

            await wait_until(is_paused)
            node.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await with_timeout(node.reader.readexactly(len(whole))) == whole
            node.writer.write(frame(2, OK_PAYLOAD))
            assert (await with_timeout(client.read_packet()))[1] == OK_PAYLOAD


async def test_a_node_that_ends_right_behind_its_answer(tmp_path: Path, kind: Kind) -> None:
    answer = result(1000, seed=5)
    async with before_node(tmp_path, kind) as (proxy, nodes, peer):
        for _ in range(TIMES):
            client, node = await pair(proxy, nodes, kind)
            client.writer.write(QUERY)
            await with_timeout(node.reader.readexactly(len(QUERY)))
            node.writer.write(answer)
            node.writer.write_eof()
            assert await read_to_end(client) == answer
        await all_gone(proxy, peer.endpoint)


async def test_a_node_that_ends_behind_an_answer_that_is_not_read_yet(tmp_path: Path, kind: Kind) -> None:
    dice = random.Random(8)
    async with before_node(tmp_path, kind) as (proxy, nodes, peer):
        for _ in range(TIMES):
            client, node = await pair(proxy, nodes, kind)
            client.writer.write(QUERY)
            await with_timeout(node.reader.readexactly(len(QUERY)))
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            # Somewhere on the way it finds no room; where differs.
            answer = result(dice.randrange(2 << 20, 6 << 20), seed=9)
            node.writer.write(answer)
            node.writer.write_eof()

            async def has_said_all_that_finds_room() -> bool:
                paused, resumed, there = [
                    await counted(proxy, f"cluster.tidb.upstream_{name}")
                    for name in (
                        "flow_control_paused_reading_total",
                        "flow_control_resumed_reading_total",
                        "cx_active",
                    )
                ]
                return there == 0 or paused > resumed

            await wait_until(has_said_all_that_finds_room)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await read_to_end(client) == answer
        await all_gone(proxy, peer.endpoint)


@pytest.mark.parametrize("end", [lambda node: node.writer.close(), reset], ids=["FIN", "RST"])
async def test_a_client_that_ends_right_behind_its_query(
    tmp_path: Path, plain: Kind, end: Callable[[RawClient], None]
) -> None:
    async with before_node(tmp_path, plain) as (proxy, nodes, peer):
        for _ in range(TIMES):
            client, node = await pair(proxy, nodes, plain)
            client.writer.write(QUERY)
            client.writer.write_eof()
            assert await with_timeout(node.reader.read()) == QUERY
            node.writer.write(frame(1, OK_PAYLOAD))
            end(node)
            assert await read_to_end(client) == frame(1, OK_PAYLOAD)
        await all_gone(proxy, peer.endpoint)


SILENT = frame(0, b"\x19\x01\0\0\0")
"""COM_STMT_CLOSE, which nothing answers."""


@pytest.mark.parametrize(
    "last",
    [QUERY, SILENT, QUERY[:7], b"", QUERY + SILENT, frame(0, b"\x01")],
    ids=["a query", "what nothing answers", "half a query", "nothing", "both", "COM_QUIT"],
)
async def test_a_client_that_resets_right_behind_something(tmp_path: Path, plain: Kind, last: bytes) -> None:
    async with before_node(tmp_path, plain) as (proxy, nodes, peer):
        for _ in range(TIMES):
            client, node = await pair(proxy, nodes, plain)
            client.writer.write(last)
            reset(client)
            if last.startswith(QUERY):
                # The node answers, whoever is there to hear it.
                assert await with_timeout(node.reader.readexactly(len(QUERY))) == QUERY
                node.writer.write(frame(1, OK_PAYLOAD))
            await with_timeout(node.reader.read())
            node.writer.close()
        await all_gone(proxy, peer.endpoint)


async def test_a_node_that_resets_right_behind_its_answer(tmp_path: Path, plain: Kind) -> None:
    async with before_node(tmp_path, plain) as (proxy, nodes, peer):
        for _ in range(TIMES):
            client, node = await pair(proxy, nodes, plain)
            client.writer.write(QUERY)
            await with_timeout(node.reader.readexactly(len(QUERY)))
            node.writer.write(frame(1, OK_PAYLOAD))
            reset(node)
            assert (await with_timeout(client.read_packet()))[1] == OK_PAYLOAD
            # Told now, or when it asks again.
            client.writer.write(QUERY)
            assert await read_to_end(client) == b""
        await all_gone(proxy, peer.endpoint)


async def test_a_client_that_resets_while_nothing_of_it_is_read(tmp_path: Path, plain: Kind) -> None:
    # A statement that the node does not read, and of which Envoy has had enough.
    statement = frame(0, b"\x03" + bytes(0xFFFFFF - 1))
    async with before_node(tmp_path, plain) as (proxy, nodes, peer):
        client, node = await pair(proxy, nodes, plain)
        node.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(statement)

        async def is_paused() -> bool:
            return await counted(proxy, "tcp.sql.downstream_flow_control_paused_reading_total") > 0

        await wait_until(is_paused)
        reset(client)
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()
        node.writer.write(frame(1, OK_PAYLOAD))  # finds nobody
        await all_gone(proxy, peer.endpoint)


class Flood:
    """A stream without end from a node to a client that reads it all, by threads."""

    def __init__(self, client: RawClient, node: RawClient) -> None:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        self._from, self._to = (raw.writer.get_extra_info("socket").fileno() for raw in (node, client))
        self._over = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._send, self._receive)]
        self.received = 0

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        rows = frame(9, b"\xfa" + bytes(250)) * 4000
        unsent = memoryview(rows)
        while not self._over.is_set():
            if select.select([], [self._from], [], 0.1)[1]:
                unsent = unsent[os.write(self._from, unsent) :] or memoryview(rows)

    def _receive(self) -> None:
        while not self._over.is_set():
            if select.select([self._to], [], [], 0.1)[0]:
                self.received += len(os.read(self._to, 1 << 20))


async def test_a_stream_that_never_ends_leaves_others_their_turns(tmp_path: Path, plain: Kind) -> None:
    async with before_node(tmp_path, plain) as (proxy, nodes, _):
        busy, source = await pair(proxy, nodes, plain)
        other, node = await pair(proxy, nodes, plain)
        busy.writer.write(QUERY)
        source.writer.write(result(0, seed=6)[:-9])
        with Flood(busy, source) as flood:
            for _ in range(100):
                before = flood.received
                other.writer.write(QUERY)
                await with_timeout(node.reader.readexactly(len(QUERY)))
                node.writer.write(frame(1, OK_PAYLOAD))
                assert (await with_timeout(other.read_packet()))[1] == OK_PAYLOAD
                await wait_until(lambda before=before: flood.received > before)  # type: ignore[misc]
