"""Direct forwarding between a session's two sockets: all bytes arrive, in order, and are counted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import select
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox.tidb_sim.packets import frame
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import FakeServer, reset_connection, run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    OK_PAYLOAD,
    ModuleEnvoy,
    client_tls_config,
    connect_logged_in,
    connect_with_tls,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.module.forwarding import (
    DIRECT_AFTER_STATEMENTS,
    QUERY,
    ScriptedPeer,
    count_awaiting_writable,
    exchange,
    result,
)
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LARGE_BYTES = 24 << 20
"""More bytes than fit into all buffers between client and node."""
REPETITIONS = 20
"""Repetitions of tests in which events race, so that each order is likely to occur."""


CLIENT_READS_PAUSED = "tcp.sql.downstream_flow_control_paused_reading_total"
"""Envoy's counter of pauses in reading from clients."""


@dataclass(frozen=True)
class SessionSetup:
    """With `certificates`, the client uses TLS. `statements`: how many the session runs before the test.

    `offload`: whether the module may handle the events of sessions instead of Envoy.
    """

    certificates: PemFiles | None = None
    statements: int = 0
    offload: bool = True


NEW_SESSION = SessionSetup()


@pytest.fixture(
    params=[
        SessionSetup(),
        SessionSetup(statements=DIRECT_AFTER_STATEMENTS),
        SessionSetup(statements=DIRECT_AFTER_STATEMENTS, offload=False),
    ],
    ids=["new", "settled", "settled, offload off"],
)
def setup_without_tls(request: pytest.FixtureRequest) -> SessionSetup:
    setup: SessionSetup = request.param
    return setup


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> PemFiles:
    return PemFiles.create(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "TLS"])
def setup(
    request: pytest.FixtureRequest, setup_without_tls: SessionSetup, certificates: PemFiles
) -> SessionSetup:
    return replace(setup_without_tls, certificates=certificates if request.param == "TLS" else None)


Running = dict[tuple[bool, bool], tuple[ModuleEnvoy, ScriptedPeer, FakeServer]]
"""By whether clients use TLS, and whether offloading is on."""


@asynccontextmanager
async def run_with_node(
    tmp_path: Path, certificates: PemFiles | None = None, *, offload: bool = True
) -> AsyncIterator[tuple[ModuleEnvoy, ScriptedPeer, FakeServer]]:
    """Run an Envoy in front of a node that accepts every login; with certificates, clients use TLS."""
    peer = ScriptedPeer()
    config = client_tls_config(certificates, allow_cleartext_backend=True) if certificates else ModuleConfig()
    config = replace(config, live_settings={"offload": offload})
    async with run_fake_server(peer) as node, run_envoy(tmp_path, [node.endpoint], config) as proxy:
        yield proxy, peer, node
        peer.finished.set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, certificates: PemFiles) -> AsyncIterator[Running]:
    """Run the Envoys of all tests: for clients with and without TLS, with and without offloading."""
    async with AsyncExitStack() as exit_stack:
        yield {
            (tls, offload): await exit_stack.enter_async_context(
                run_with_node(
                    tmp_path_factory.mktemp("envoy"), certificates if tls else None, offload=offload
                )
            )
            for tls, offload in itertools.product((False, True), repeat=2)
        }


@asynccontextmanager
async def shared_proxy(
    running: Running, setup: SessionSetup
) -> AsyncIterator[tuple[ModuleEnvoy, asyncio.Queue[RawClient], FakeServer]]:
    """Yield the Envoy for this setup. Afterwards, end all of its sessions, and check that none remains."""
    proxy, peer, node = running[setup.certificates is not None, setup.offload]
    try:
        yield proxy, peer.nodes, node
    finally:
        for client in proxy.clients:
            client.writer.transport.abort()
        proxy.clients.clear()
        peer.finished.set()
        peer.finished, peer.nodes = asyncio.Event(), asyncio.Queue()

    async def are_closed() -> bool:
        stats = await proxy.stats("^(cluster.tidb.upstream_cx_active|tcp.sql.downstream_cx_active)$")
        return not any(stats.values())

    await wait_until(are_closed)


async def open_session(
    proxy: ModuleEnvoy, nodes: asyncio.Queue[RawClient], setup: SessionSetup = NEW_SESSION
) -> tuple[RawClient, RawClient]:
    """Return a client that has logged in, and the node's side of its session."""
    client = await (
        connect_with_tls(proxy, setup.certificates) if setup.certificates else connect_logged_in(proxy)
    )
    node = await with_timeout(nodes.get())
    for _ in range(setup.statements):
        await exchange(client, node)
    return client, node


async def envoy_counter(proxy: ModuleEnvoy, name: str) -> int:
    """Return one of Envoy's own counters."""
    page = (await proxy.get(f"/stats?format=json&filter=^{name}$")).json()
    return int(next((stat["value"] for stat in page["stats"] if "value" in stat), 0))


async def test_envoy_counts_directly_forwarded_bytes(tmp_path: Path) -> None:
    answer = result(300_000, seed=1)
    names = [
        f"{side}_cx_{way}_bytes_total"
        for side, way in itertools.product(("tcp.sql.downstream", "cluster.tidb.upstream"), ("rx", "tx"))
    ]
    async with run_with_node(tmp_path) as (proxy, peer, _):
        nodes = peer.nodes

        async def count_session(statements: int) -> list[int]:
            """Run a session with this many statements. Return all counters after its end."""
            client, node = await open_session(proxy, nodes)
            for _ in range(statements):
                await exchange(client, node, answer)
            client.writer.write_eof()  # the module reports directly forwarded bytes at the end of a session
            assert await with_timeout(node.reader.read()) == b""
            node.writer.write_eof()
            assert await read_to_end(client) == b""
            await wait_until(is_over)
            return [await envoy_counter(proxy, name) for name in names]

        async def is_over() -> bool:
            return await envoy_counter(proxy, "tcp.sql.downstream_cx_active") == 0

        login = await count_session(0)
        both = await count_session(10)
        grown = [total - 2 * login_only for total, login_only in zip(both, login, strict=True)]
        assert grown == [10 * len(QUERY), 10 * len(answer), 10 * len(answer), 10 * len(QUERY)]


async def test_envoy_handles_events_only_while_a_socket_is_full(
    running: Running, setup: SessionSetup
) -> None:
    large_result = result(LARGE_BYTES, seed=9)
    async with shared_proxy(running, setup) as (proxy, nodes, peer):
        client, node = await open_session(proxy, nodes, setup)
        client_port = client.writer.get_extra_info("sockname")[1]
        peers = {client_port, int(peer.endpoint.rpartition(":")[2])}
        with_envoy = 0 if setup.offload else 2
        assert count_awaiting_writable(proxy.process.pid, peers) == (with_envoy if setup.statements else 2)
        for _ in range(2):
            for _ in range(DIRECT_AFTER_STATEMENTS):
                await exchange(client, node, result(100, seed=10))
            await wait_until(lambda: count_awaiting_writable(proxy.process.pid, peers) == with_envoy)

            client.writer.write(QUERY)
            await with_timeout(node.reader.readexactly(len(QUERY)))
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            node.writer.write(large_result)
            await wait_until(lambda: count_awaiting_writable(proxy.process.pid, {client_port}) == 1)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await with_timeout(client.reader.readexactly(len(large_result))) == large_result


async def test_sessions_end_in_any_order_without_affecting_others(
    running: Running, setup: SessionSetup
) -> None:
    rng = random.Random(11)
    async with shared_proxy(running, setup) as (proxy, nodes, peer):
        for _ in range(3):  # each pass starts and ends without sessions
            sessions = [await open_session(proxy, nodes, setup) for _ in range(12)]
            while sessions:
                client, node = sessions.pop(rng.randrange(len(sessions)))
                closing, peer_side = (client, node) if rng.random() < 0.5 else (node, client)
                if rng.random() < 0.5:
                    closing.writer.close()
                else:
                    reset_connection(closing.writer)
                await read_to_end(peer_side)
                peer_side.writer.close()
                for client, node in sessions:
                    await exchange(client, node)
            await proxy.wait_no_sessions(peer.endpoint)


async def test_order_is_preserved_while_a_client_does_not_read(running: Running, setup: SessionSetup) -> None:
    large_result, small_result = result(LARGE_BYTES, seed=2), result(1000, seed=3)
    async with shared_proxy(running, setup) as (proxy, nodes, _):
        client, node = await open_session(proxy, nodes, setup)
        for _ in range(2):  # the second pass shows that direct forwarding has resumed
            client.writer.write(QUERY + QUERY)
            await with_timeout(node.reader.readexactly(2 * len(QUERY)))
            paused = await envoy_counter(proxy, "cluster.tidb.upstream_flow_control_paused_reading_total")
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            node.writer.write(large_result + small_result)

            async def is_paused(before: int = paused) -> bool:
                name = "cluster.tidb.upstream_flow_control_paused_reading_total"
                return await envoy_counter(proxy, name) > before

            await wait_until(is_paused)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert (
                await with_timeout(client.reader.readexactly(len(large_result) + len(small_result)))
                == large_result + small_result
            )
            client.writer.write(QUERY)
            await with_timeout(node.reader.readexactly(len(QUERY)))
            node.writer.write(small_result)
            assert await with_timeout(client.reader.readexactly(len(small_result))) == small_result


async def test_order_is_preserved_while_a_node_does_not_read(running: Running, setup: SessionSetup) -> None:
    rng = random.Random(4)
    statement = b"\x03" + rng.randbytes(LARGE_BYTES)
    packets = b"".join(
        frame(sequence, statement[offset : offset + 0xFFFFFF])
        for sequence, offset in enumerate(range(0, len(statement), 0xFFFFFF))
    )
    async with shared_proxy(running, setup) as (proxy, nodes, _):
        client, node = await open_session(proxy, nodes, setup)
        for _ in range(2):
            paused = await envoy_counter(proxy, CLIENT_READS_PAUSED)
            node.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.writer.write(packets)

            async def is_paused(before: int = paused) -> bool:
                return await envoy_counter(proxy, CLIENT_READS_PAUSED) > before

            await wait_until(is_paused)
            node.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await with_timeout(node.reader.readexactly(len(packets))) == packets
            node.writer.write(frame(2, OK_PAYLOAD))
            assert (await with_timeout(client.read_packet()))[1] == OK_PAYLOAD


async def test_node_closes_right_after_its_answer(running: Running, setup: SessionSetup) -> None:
    answer = result(1000, seed=5)
    async with shared_proxy(running, setup) as (proxy, nodes, peer):
        for _ in range(REPETITIONS):
            client, node = await open_session(proxy, nodes, setup)
            client.writer.write(QUERY)
            await with_timeout(node.reader.readexactly(len(QUERY)))
            node.writer.write(answer)
            node.writer.write_eof()
            assert await read_to_end(client) == answer
        await proxy.wait_no_sessions(peer.endpoint)


async def test_node_closes_after_an_unread_answer(running: Running, setup: SessionSetup) -> None:
    rng = random.Random(8)
    async with shared_proxy(running, setup) as (proxy, nodes, peer):
        for _ in range(REPETITIONS):
            client, node = await open_session(proxy, nodes, setup)
            client.writer.write(QUERY)
            await with_timeout(node.reader.readexactly(len(QUERY)))
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            # The size of the answer determines which buffers on the path it fills.
            answer = result(rng.randrange(2 << 20, 6 << 20), seed=9)
            node.writer.write(answer)
            node.writer.write_eof()

            async def is_blocked_or_closed() -> bool:
                paused, resumed, active = [
                    await envoy_counter(proxy, f"cluster.tidb.upstream_{name}")
                    for name in (
                        "flow_control_paused_reading_total",
                        "flow_control_resumed_reading_total",
                        "cx_active",
                    )
                ]
                return active == 0 or paused > resumed

            await wait_until(is_blocked_or_closed)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await read_to_end(client) == answer
        await proxy.wait_no_sessions(peer.endpoint)


@pytest.mark.parametrize("close", [asyncio.StreamWriter.close, reset_connection], ids=["FIN", "RST"])
async def test_client_half_closes_right_after_its_query(
    running: Running, setup_without_tls: SessionSetup, close: Callable[[asyncio.StreamWriter], None]
) -> None:
    async with shared_proxy(running, setup_without_tls) as (proxy, nodes, peer):
        for _ in range(REPETITIONS):
            client, node = await open_session(proxy, nodes, setup_without_tls)
            client.writer.write(QUERY)
            client.writer.write_eof()
            assert await with_timeout(node.reader.read()) == QUERY
            node.writer.write(frame(1, OK_PAYLOAD))
            close(node.writer)
            assert await read_to_end(client) == frame(1, OK_PAYLOAD)
        await proxy.wait_no_sessions(peer.endpoint)


UNANSWERED = frame(0, b"\x19\x01\0\0\0")
"""COM_STMT_CLOSE, which has no response."""


@pytest.mark.parametrize(
    "last",
    [QUERY, UNANSWERED, QUERY[:7], b"", QUERY + UNANSWERED, frame(0, b"\x01")],
    ids=["a query", "no response", "half a query", "nothing", "both", "COM_QUIT"],
)
async def test_client_resets_right_after_sending(
    running: Running, setup_without_tls: SessionSetup, last: bytes
) -> None:
    async with shared_proxy(running, setup_without_tls) as (proxy, nodes, peer):
        for _ in range(REPETITIONS):
            client, node = await open_session(proxy, nodes, setup_without_tls)
            client.writer.write(last)
            reset_connection(client.writer)
            if last.startswith(QUERY):
                # The node answers, although the client may be gone.
                assert await with_timeout(node.reader.readexactly(len(QUERY))) == QUERY
                node.writer.write(frame(1, OK_PAYLOAD))
            await with_timeout(node.reader.read())
            node.writer.close()
        await proxy.wait_no_sessions(peer.endpoint)


async def test_node_resets_right_after_its_answer(running: Running, setup_without_tls: SessionSetup) -> None:
    async with shared_proxy(running, setup_without_tls) as (proxy, nodes, peer):
        for _ in range(REPETITIONS):
            client, node = await open_session(proxy, nodes, setup_without_tls)
            client.writer.write(QUERY)
            await with_timeout(node.reader.readexactly(len(QUERY)))
            node.writer.write(frame(1, OK_PAYLOAD))
            reset_connection(node.writer)
            assert (await with_timeout(client.read_packet()))[1] == OK_PAYLOAD
            # The client sees the end now, or when it sends the next query.
            client.writer.write(QUERY)
            assert await read_to_end(client) == b""
        await proxy.wait_no_sessions(peer.endpoint)


async def test_client_resets_while_its_statement_is_unread(
    running: Running, setup_without_tls: SessionSetup
) -> None:
    # The node reads nothing, so Envoy's buffers fill, and Envoy stops reading from the client.
    statement = frame(0, b"\x03" + bytes(0xFFFFFF - 1))
    async with shared_proxy(running, setup_without_tls) as (proxy, nodes, peer):
        client, node = await open_session(proxy, nodes, setup_without_tls)
        paused = await envoy_counter(proxy, CLIENT_READS_PAUSED)
        node.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(statement)

        async def is_paused() -> bool:
            return await envoy_counter(proxy, CLIENT_READS_PAUSED) > paused

        await wait_until(is_paused)
        reset_connection(client.writer)
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()
        node.writer.write(frame(1, OK_PAYLOAD))  # the client is gone
        await proxy.wait_no_sessions(peer.endpoint)


class Flood:
    """Two threads: one sends an endless stream from the node, and the other reads it at the client."""

    def __init__(self, client: RawClient, node: RawClient) -> None:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        self._from, self._to = (raw.writer.get_extra_info("socket").fileno() for raw in (node, client))
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._send, self._receive)]
        self.received = 0

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        rows = frame(9, b"\xfa" + bytes(250)) * 4000
        unsent = memoryview(rows)
        while not self._stop.is_set():
            if select.select([], [self._from], [], 0.1)[1]:
                unsent = unsent[os.write(self._from, unsent) :] or memoryview(rows)

    def _receive(self) -> None:
        while not self._stop.is_set():
            if select.select([self._to], [], [], 0.1)[0]:
                self.received += len(os.read(self._to, 1 << 20))


async def test_endless_stream_does_not_starve_other_sessions(
    running: Running, setup_without_tls: SessionSetup
) -> None:
    async with shared_proxy(running, setup_without_tls) as (proxy, nodes, _):
        flooded, flooding_node = await open_session(proxy, nodes, setup_without_tls)
        other, node = await open_session(proxy, nodes, setup_without_tls)
        flooded.writer.write(QUERY)
        flooding_node.writer.write(result(0, seed=6)[:-9])
        with Flood(flooded, flooding_node) as flood:
            for _ in range(100):
                before = flood.received
                other.writer.write(QUERY)
                await with_timeout(node.reader.readexactly(len(QUERY)))
                node.writer.write(frame(1, OK_PAYLOAD))
                assert (await with_timeout(other.read_packet()))[1] == OK_PAYLOAD
                await wait_until(lambda before=before: flood.received > before)  # type: ignore[misc]
