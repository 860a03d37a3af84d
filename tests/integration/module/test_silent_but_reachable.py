"""No session ends while a reachable node or client sends or reads nothing for a long time.

A sentinel is an idle connection from Envoy to a node. It shows whether the node is reachable.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from controlplane import address as addresses
from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import frame
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    OK_PAYLOAD,
    ModuleEnvoy,
    accept_login,
    connect_logged_in,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.network_namespace import drop_new_connections, network_namespace, stop_dropping_packets
from tests.support.suspension import suspended
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import assert_nothing_received, wait_until

pytestmark = pytest.mark.timeout(180)

WATCHING = ModuleConfig(node={"sentinels": True})

SILENCE_SECONDS = 60.0 if os.environ.get("TIDEVOY_SOAK") else 12.0
"""Envoy detects an unreachable node in less than half of this time."""
LARGE_BYTES = 24_000_000
"""More bytes than fit into all buffers between client and node."""


@pytest.fixture
def network() -> Iterator[None]:
    with network_namespace():
        yield


async def wait_until_full(writer: asyncio.StreamWriter) -> None:
    """Wait until all buffers between `writer` and its reader are full."""
    sizes = [-1]

    def is_unchanged() -> bool:
        sizes.append(writer.transport.get_write_buffer_size())
        return sizes[-10:] == 10 * [sizes[-1]]

    await wait_until(is_unchanged)
    assert sizes[-1] > 0


@asynccontextmanager
async def node_that_reads_nothing(directory: Path) -> AsyncIterator[None]:
    may_read = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept_login(reader, writer)
        await may_read.wait()
        while await reader.read(1 << 20):
            pass

    async with run_fake_server(handler) as node, run_envoy(directory, [node.endpoint], WATCHING) as proxy:
        client = await connect_logged_in(proxy)
        client.writer.write(3 * frame(0, b"\x03" + bytes(LARGE_BYTES // 3)))
        await wait_until_full(client.writer)
        yield
        await expect_no_disconnect(proxy, client)
        may_read.set()
        await with_timeout(client.writer.drain())


@asynccontextmanager
async def client_that_reads_nothing(directory: Path) -> AsyncIterator[None]:
    rows = b"".join(frame(sequence % 256, b"\x01x") for sequence in range(3, 259))
    result_rows = rows * (LARGE_BYTES // len(rows))
    full = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = await accept_login(reader, writer)
        await node.read_packet()
        writer.write(frame(1, b"\x01") + frame(2, b"\x03def\0\0\0\x01a\0\x0c" + bytes(12)) + result_rows)
        await wait_until_full(writer)
        full.set()
        await reader.read()

    async with run_fake_server(handler) as node, run_envoy(directory, [node.endpoint], WATCHING) as proxy:
        client = await connect_logged_in(proxy)
        transport = cast(asyncio.Transport, client.writer.transport)
        transport.pause_reading()
        client.writer.write(frame(0, b"\x03select"))
        await with_timeout(full.wait())
        yield
        assert "does not answer" not in proxy.log
        transport.resume_reading()
        await with_timeout(client.read_packet())
        await with_timeout(client.read_packet())
        assert await with_timeout(client.reader.readexactly(len(result_rows))) == result_rows


@asynccontextmanager
async def node_that_is_suspended(directory: Path) -> AsyncIterator[None]:
    async with (
        MariaDb.start(directory / "mariadb") as server,
        run_envoy(directory, [f"127.0.0.1:{server.port}"], WATCHING) as proxy,
    ):
        client, waiting = await connect_logged_in(proxy), await connect_logged_in(proxy)
        async with suspended(server.process.pid):
            waiting.writer.write(frame(0, b"\x03do 1"))
            yield
            await expect_no_disconnect(proxy, client, waiting)
        assert (await with_timeout(waiting.read_packet()))[1][0] == 0
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0


@asynccontextmanager
async def node_that_takes_no_new_connections(directory: Path, *, has_sentinel: bool) -> AsyncIterator[None]:
    """Drop new connections during the block, as a firewall with a full connection table does.

    `has_sentinel`: Envoy keeps its sentinel. Otherwise only the session shows that the node is reachable.
    """
    session_writers: list[asyncio.StreamWriter] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = await accept_login(reader, writer)
        session_writers.append(writer)
        while True:
            await session.read_packet()
            writer.write(frame(1, OK_PAYLOAD))

    async with run_fake_server(handler) as node, run_envoy(directory, [node.endpoint], WATCHING) as proxy:
        client = await connect_logged_in(proxy)
        await wait_until(lambda: node.connections == 2)
        drop_new_connections(addresses.split(node.endpoint)[1])
        if not has_sentinel:
            for writer in node.writers:
                if writer not in session_writers:
                    writer.close()
        yield
        await expect_no_disconnect(proxy, client)
        assert await with_timeout(client.send_command(0x0E)) == OK_PAYLOAD
        stop_dropping_packets()


async def expect_no_disconnect(proxy: ModuleEnvoy, *clients: RawClient) -> None:
    """Check that the clients received nothing, and that Envoy always considered their node reachable."""
    for client in clients:
        await assert_nothing_received(client.reader, 0.01)
    assert "does not answer" not in proxy.log


@pytest.mark.usefixtures("network")
async def test_silence_alone_ends_no_session(tmp_path: Path) -> None:
    async with (
        node_that_reads_nothing(tmp_path / "node"),
        client_that_reads_nothing(tmp_path / "client"),
        node_that_is_suspended(tmp_path / "stopped"),
        node_that_takes_no_new_connections(tmp_path / "watched", has_sentinel=True),
        node_that_takes_no_new_connections(tmp_path / "new", has_sentinel=False),
    ):
        await asyncio.sleep(
            SILENCE_SECONDS
        )  # nothing may happen during this time, so there is no event to wait for


@pytest.mark.usefixtures("network")
async def test_suspended_envoy_ends_no_session(tmp_path: Path) -> None:
    """After SIGCONT Envoy has received nothing for a long time, but no node is unreachable."""
    async with run_fake_server(serve_ok) as node, run_envoy(tmp_path, [node.endpoint], WATCHING) as proxy:
        client = await connect_logged_in(proxy)
        async with suspended(proxy.pid):
            await asyncio.sleep(5)  # longer than a node may be silent; a stopped process emits no event
        await wait_until(proxy.is_live)
        await assert_nothing_received(client.reader, 2.0)
        assert await with_timeout(client.send_command(0x0E)) == OK_PAYLOAD
        assert "does not answer" not in proxy.log
