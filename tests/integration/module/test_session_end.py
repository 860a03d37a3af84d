"""How sessions end: by time, by either side, by Envoy; what the other side sees, what is left."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import frame
from tests.support.fake_servers import FakeServer, Handler, run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    OK_PAYLOAD,
    ModuleEnvoy,
    accept_login,
    connect_logged_in,
    greeting_packet,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import assert_nothing_received, wait_until

PING = b"\x01\0\0\0\x0e"
QUERY = b"\x03\0\0\0\x03do"


def reset(client: RawClient) -> None:
    """End a connection by RST."""
    connection = client.writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()


def then(script: Callable[[RawClient], object]) -> Handler:
    """A handler that lets a client in, awaits its first command, and then does as the script says."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = await accept_login(reader, writer)
        await node.read_packet()
        answer = script(node)
        if asyncio.iscoroutine(answer):
            await answer

    return handler


@asynccontextmanager
async def before(
    directory: Path, handler: Handler, parts: ModuleConfig | None = None
) -> AsyncIterator[tuple[ModuleEnvoy, FakeServer]]:
    """An Envoy before one such node. When all clients are gone, so are its sessions and connections."""
    async with run_fake_server(handler) as node, run_envoy(directory, [node.endpoint], parts) as proxy:
        yield proxy, node
        for client in proxy.clients:
            client.writer.transport.abort()
        states = ("login", "idle", "busy", "transaction", "opaque")
        await proxy.wait_for_metrics({("sessions", node.endpoint, state): 0 for state in states})

        async def are_closed() -> bool:
            return (await proxy.stats("cluster.tidb.upstream_cx_active"))[
                "cluster.tidb.upstream_cx_active"
            ] == 0

        await wait_until(are_closed)


async def pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A node that answers every command with OK."""
    node = await accept_login(reader, writer)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            await node.read_packet()
            writer.write(frame(1, OK_PAYLOAD))
    writer.close()


async def test_an_idle_session_is_ended(tmp_path: Path) -> None:
    async with before(tmp_path, pings, ModuleConfig(live={"idle_timeout": 0.5})) as (proxy, node):
        client = await connect_logged_in(proxy)
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0
        assert await read_to_end(client) == b""
        assert (await with_timeout(node.connection_ends.get())).startswith("eof")


async def test_a_session_with_commands_is_not_idle(tmp_path: Path) -> None:
    async with before(tmp_path, pings, ModuleConfig(live={"idle_timeout": 1.0})) as (proxy, _):
        client = await connect_logged_in(proxy)
        other = await connect_logged_in(proxy)
        for _ in range(12):
            assert (await with_timeout(client.send_command(0x0E)))[0] == 0
            await assert_nothing_received(client.reader, 0.15)
        assert await read_to_end(other) == b""
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def test_a_long_command_is_not_idleness_and_its_end_begins_the_time_anew(tmp_path: Path) -> None:
    async def takes_long(node: RawClient) -> None:
        await assert_nothing_received(node.reader, 2.9)
        node.writer.write(frame(1, OK_PAYLOAD))
        await node.read_packet()
        node.writer.write(frame(1, OK_PAYLOAD))

    async with before(tmp_path, then(takes_long), ModuleConfig(live={"idle_timeout": 1.0})) as (proxy, _):
        client = await connect_logged_in(proxy)
        assert (await with_timeout(client.send_command(0x03, b"select sleep(2.9)")))[0] == 0
        await assert_nothing_received(client.reader, 0.5)
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0
        assert await read_to_end(client) == b""


async def test_a_client_that_has_said_all_still_gets_its_answer(tmp_path: Path) -> None:
    asked = asyncio.Event()
    go = asyncio.Event()

    async def answers_late(node: RawClient) -> None:
        assert await node.reader.read() == b""
        asked.set()
        await go.wait()
        node.writer.write(frame(1, OK_PAYLOAD))
        node.writer.close()

    async with before(tmp_path, then(answers_late)) as (proxy, _):
        client = await connect_logged_in(proxy)
        client.writer.write(QUERY)
        client.writer.write_eof()
        await with_timeout(asked.wait())
        go.set()
        assert await read_to_end(client) == frame(1, OK_PAYLOAD)


async def test_a_client_that_resets_in_the_middle_of_a_result_leaves_nothing(tmp_path: Path) -> None:
    stopped = asyncio.Event()

    async def floods(node: RawClient) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                node.writer.write(bytes(65_536))
                await node.writer.drain()
        stopped.set()

    async with before(tmp_path, then(floods)) as (proxy, _):
        client = await connect_logged_in(proxy)
        client.writer.write(QUERY)
        await with_timeout(client.reader.readexactly(100_000))
        reset(client)
        await with_timeout(stopped.wait())


@pytest.mark.parametrize("abort", [False, True], ids=["FIN", "RST"])
async def test_what_a_node_said_last_reaches_the_client(tmp_path: Path, abort: bool) -> None:
    last = frame(1, b"\xff\x1d\x04#08S01Server shutdown in progress")
    heard = asyncio.Event()

    async def leaves(node: RawClient) -> None:
        node.writer.write(last)
        if abort:
            await heard.wait()
            reset(node)
        else:
            node.writer.close()

    async with before(tmp_path, then(leaves)) as (proxy, node):
        client = await connect_logged_in(proxy)
        client.writer.write(QUERY)
        assert await with_timeout(client.reader.readexactly(len(last))) == last
        heard.set()
        with contextlib.suppress(ConnectionResetError) if abort else contextlib.nullcontext():
            assert await read_to_end(client) == b""
        # The session is over with the node, whatever the client still waits for.
        await proxy.wait_for_metrics(
            {("sessions", node.endpoint, state): 0 for state in ("idle", "busy")}
            | {("errors", "shutdown", node.endpoint): 1}
        )


@pytest.mark.parametrize("meanwhile", [False, True], ids=["before", "meanwhile"])
async def test_the_last_words_of_a_node_are_not_lost_to_a_client_that_is_sending(
    tmp_path: Path, meanwhile: bool
) -> None:
    """Bytes that nobody reads any more would make the kernel reset the connection."""
    last = frame(1, b"\xff\x1d\x04#08S01Server shutdown in progress")
    left = asyncio.Event()

    def leaves(node: RawClient) -> None:
        node.writer.write(last)
        node.writer.close()
        left.set()

    async with before(tmp_path, then(leaves)) as (proxy, _):
        for _ in range(20):
            client = await connect_logged_in(proxy)
            left.clear()
            client.writer.write(QUERY)
            if meanwhile:
                await with_timeout(left.wait())
            client.writer.write(PING * 100)
            assert (await with_timeout(client.read_packet()))[1] == last[4:]


async def test_a_node_that_leaves_in_the_middle_of_a_login(tmp_path: Path) -> None:
    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        await reader.readexactly(4)
        writer.close()

    async with before(tmp_path, leaves) as (proxy, node):
        client = await proxy.connect()
        told = await with_timeout(client.login())
        assert b"the TiDB server closed the connection during the login" in told
        await proxy.wait_for_metrics({("login_failures", node.endpoint, "node_gone"): 1})


async def test_envoy_ends_well_with_sessions_in_every_state(tmp_path: Path) -> None:
    async def never_greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet() if half.connections % 2 else b"")

    async with (
        run_fake_server(pings) as node,
        run_fake_server(never_greets) as half,
        run_envoy(tmp_path, [node.endpoint, half.endpoint], workers=2) as proxy,
    ):
        for number in range(40):
            client = await proxy.connect()
            client.writer.write(QUERY[:2] if number % 5 else b"")
            if number % 2:
                login = asyncio.create_task(client.login())
                with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
                    await asyncio.wait_for(login, 0.05)
        await proxy.stop()
        assert proxy.process.returncode == 0


async def test_nothing_is_left_of_many_sessions(tmp_path: Path) -> None:
    async with before(tmp_path, pings, ModuleConfig(live={"login_timeout": 5})) as (proxy, _):

        async def one(number: int) -> None:
            client = await proxy.connect()
            if number % 4 == 0:
                reset(client)
                return
            await with_timeout(client.read_packet())
            if number % 4 == 1:
                client.writer.write(b"\x20\0\0\x01\0")
                client.writer.close()
            elif number % 4 == 2:
                client.writer.write(b"nonsense that is no login")
                await read_to_end(client)
            else:
                reset(client)

        async def some() -> None:
            await asyncio.gather(*(one(number) for number in range(200)))

            async def are_closed() -> bool:
                stats = await proxy.stats("cx_active")
                return not any(value for name, value in stats.items() if "admin" not in name)

            await wait_until(are_closed)

        await some()
        descriptors, memory = proxy.descriptor_count(), await proxy.allocated_bytes()
        for _ in range(4):
            await some()
        assert proxy.descriptor_count() <= descriptors + 5
        # What 800 sessions would leave, were it only 1 KiB each; the rest is for stats and caches of Envoy.
        assert await proxy.allocated_bytes() < memory + 800 * 1024
