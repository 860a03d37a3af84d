"""Nodes and clients that send or read nothing for a long time, but are reachable: no session ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from controlplane import address as addresses
from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import frame
from tests.support.fake_servers import listening
from tests.support.module.bootstrap import Parts
from tests.support.module.envoy import OK, Envoy, admit, envoy, logged_in, serve, within
from tests.support.network_namespace import drop_new_connections, own_network, pass_packets
from tests.support.tidb_sim_clients import Raw
from tests.support.waiting import nothing_comes, until

pytestmark = pytest.mark.timeout(180)

WATCHING = Parts(node={"sentinels": True})

SILENT = 60.0 if os.environ.get("TIDEVOY_SOAK") else 12.0
"""Seconds: more than twice what it takes to find a node unreachable."""
MUCH = 24_000_000
"""Bytes: more than all buffers on the way hold."""


@pytest.fixture
def network() -> Iterator[None]:
    with own_network():
        yield


async def until_full(writer: asyncio.StreamWriter) -> None:
    """Returns when all buffers on the way are full."""
    sizes = [-1]

    def stays() -> bool:
        sizes.append(writer.transport.get_write_buffer_size())
        return sizes[-10:] == 10 * [sizes[-1]]

    await until(stays)
    assert sizes[-1] > 0


@asynccontextmanager
async def node_that_reads_nothing(directory: Path) -> AsyncIterator[None]:
    reads = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await admit(reader, writer)
        await reads.wait()
        while await reader.read(1 << 20):
            pass

    async with listening(handler) as node, envoy(directory, [node.endpoint], WATCHING) as proxy:
        client = await logged_in(proxy)
        client.writer.write(3 * frame(0, b"\x03" + bytes(MUCH // 3)))
        await until_full(client.writer)
        yield
        await is_spared(proxy, client)
        reads.set()
        await within(client.writer.drain())


@asynccontextmanager
async def client_that_reads_nothing(directory: Path) -> AsyncIterator[None]:
    rows = b"".join(frame(sequence % 256, b"\x01x") for sequence in range(3, 259))
    whole = rows * (MUCH // len(rows))
    full = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = await admit(reader, writer)
        await node.packet()
        writer.write(frame(1, b"\x01") + frame(2, b"\x03def\0\0\0\x01a\0\x0c" + bytes(12)) + whole)
        await until_full(writer)
        full.set()
        await reader.read()

    async with listening(handler) as node, envoy(directory, [node.endpoint], WATCHING) as proxy:
        client = await logged_in(proxy)
        transport = cast(asyncio.Transport, client.writer.transport)
        transport.pause_reading()
        client.writer.write(frame(0, b"\x03select"))
        await within(full.wait())
        yield
        assert "does not answer" not in proxy.log
        transport.resume_reading()
        await within(client.packet())
        await within(client.packet())
        assert await within(client.reader.readexactly(len(whole))) == whole


@asynccontextmanager
async def node_that_is_stopped(directory: Path) -> AsyncIterator[None]:
    async with (
        MariaDb.start(directory / "mariadb") as server,
        envoy(directory, [f"127.0.0.1:{server.port}"], WATCHING) as proxy,
    ):
        client, waiting = await logged_in(proxy), await logged_in(proxy)
        server.process.send(signal.SIGSTOP)
        try:
            waiting.writer.write(frame(0, b"\x03do 1"))
            yield
            await is_spared(proxy, client, waiting)
        finally:
            server.process.send(signal.SIGCONT)
        assert (await within(waiting.packet()))[1][0] == 0
        assert (await within(client.command(0x0E)))[0] == 0


@asynccontextmanager
async def node_that_takes_no_new_connections(directory: Path, *, is_watched: bool) -> AsyncIterator[None]:
    """As behind a firewall whose table is full, or if the node does not accept any more.

    `is_watched`: a sentinel is connected. Else only the session shows that the node is reachable.
    """
    logged_in_here: list[asyncio.StreamWriter] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = await admit(reader, writer)
        logged_in_here.append(writer)
        while True:
            await session.packet()
            writer.write(frame(1, OK))

    async with listening(handler) as node, envoy(directory, [node.endpoint], WATCHING) as proxy:
        client = await logged_in(proxy)
        await until(lambda: node.connections == 2)
        drop_new_connections(addresses.split(node.endpoint)[1])
        if not is_watched:
            for writer in node.writers:
                if writer not in logged_in_here:
                    writer.close()
        yield
        await is_spared(proxy, client)
        assert await within(client.command(0x0E)) == OK
        pass_packets()


async def is_spared(proxy: Envoy, *clients: Raw) -> None:
    """They got nothing, and their node was reachable all the time."""
    for client in clients:
        await nothing_comes(client.reader, 0.01)
    assert "does not answer" not in proxy.log


@pytest.mark.usefixtures("network")
async def test_silence_alone_costs_nobody_a_session(tmp_path: Path) -> None:
    async with (
        node_that_reads_nothing(tmp_path / "node"),
        client_that_reads_nothing(tmp_path / "client"),
        node_that_is_stopped(tmp_path / "stopped"),
        node_that_takes_no_new_connections(tmp_path / "watched", is_watched=True),
        node_that_takes_no_new_connections(tmp_path / "new", is_watched=False),
    ):
        await asyncio.sleep(SILENT)  # nothing may happen meanwhile, and there is no event for that


@pytest.mark.usefixtures("network")
async def test_an_envoy_that_was_stopped_ends_no_session(tmp_path: Path) -> None:
    """When it goes on, it has heard from no node for a long time: no node is to blame for that."""
    async with listening(serve) as node, envoy(tmp_path, [node.endpoint], WATCHING) as proxy:
        client = await logged_in(proxy)
        os.kill(proxy.pid, signal.SIGSTOP)
        await asyncio.sleep(5)  # longer than a node may be silent; nothing happens in a stopped process
        os.kill(proxy.pid, signal.SIGCONT)
        await until(proxy.live)
        await nothing_comes(client.reader, 2.0)
        assert await within(client.command(0x0E)) == OK
        assert "does not answer" not in proxy.log
