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
from tests.support.fake_servers import Handler, Peer, listening
from tests.support.module.bootstrap import Parts
from tests.support.module.envoy import OK, Envoy, admit, envoy, greets, logged_in, rest, within
from tests.support.tidb_sim_clients import Raw
from tests.support.waiting import nothing_comes, until

PING = b"\x01\0\0\0\x0e"
QUERY = b"\x03\0\0\0\x03do"


def reset(client: Raw) -> None:
    """End a connection by RST."""
    connection = client.writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()


def then(script: Callable[[Raw], object]) -> Handler:
    """A handler that lets a client in, awaits its first command, and then does as the script says."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = await admit(reader, writer)
        await node.packet()
        answer = script(node)
        if asyncio.iscoroutine(answer):
            await answer

    return handler


@asynccontextmanager
async def before(
    directory: Path, handler: Handler, parts: Parts | None = None
) -> AsyncIterator[tuple[Envoy, Peer]]:
    """An Envoy before one such node. When all clients are gone, so are its sessions and connections."""
    async with listening(handler) as node, envoy(directory, [node.endpoint], parts) as proxy:
        yield proxy, node
        for client in proxy.clients:
            client.writer.transport.abort()
        states = ("login", "idle", "busy", "transaction", "opaque")
        await proxy.reports({("sessions", node.endpoint, state): 0 for state in states})

        async def are_closed() -> bool:
            return (await proxy.stats("cluster.tidb.upstream_cx_active"))[
                "cluster.tidb.upstream_cx_active"
            ] == 0

        await until(are_closed)


async def pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A node that answers every command with OK."""
    node = await admit(reader, writer)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            await node.packet()
            writer.write(frame(1, OK))
    writer.close()


async def test_an_idle_session_is_ended(tmp_path: Path) -> None:
    async with before(tmp_path, pings, Parts(live={"idle_timeout": 0.5})) as (proxy, node):
        client = await logged_in(proxy)
        assert (await within(client.command(0x0E)))[0] == 0
        assert await rest(client) == b""
        assert (await within(node.ended.get())).startswith("eof")


async def test_a_session_with_commands_is_not_idle(tmp_path: Path) -> None:
    async with before(tmp_path, pings, Parts(live={"idle_timeout": 1.0})) as (proxy, _):
        client = await logged_in(proxy)
        other = await logged_in(proxy)
        for _ in range(12):
            assert (await within(client.command(0x0E)))[0] == 0
            await nothing_comes(client.reader, 0.15)
        assert await rest(other) == b""
        assert (await within(client.command(0x0E)))[0] == 0


async def test_a_long_command_is_not_idleness_and_its_end_begins_the_time_anew(tmp_path: Path) -> None:
    async def takes_long(node: Raw) -> None:
        await nothing_comes(node.reader, 2.9)
        node.writer.write(frame(1, OK))
        await node.packet()
        node.writer.write(frame(1, OK))

    async with before(tmp_path, then(takes_long), Parts(live={"idle_timeout": 1.0})) as (proxy, _):
        client = await logged_in(proxy)
        assert (await within(client.command(0x03, b"select sleep(2.9)")))[0] == 0
        await nothing_comes(client.reader, 0.5)
        assert (await within(client.command(0x0E)))[0] == 0
        assert await rest(client) == b""


async def test_a_client_that_has_said_all_still_gets_its_answer(tmp_path: Path) -> None:
    asked = asyncio.Event()
    go = asyncio.Event()

    async def answers_late(node: Raw) -> None:
        assert await node.reader.read() == b""
        asked.set()
        await go.wait()
        node.writer.write(frame(1, OK))
        node.writer.close()

    async with before(tmp_path, then(answers_late)) as (proxy, _):
        client = await logged_in(proxy)
        client.writer.write(QUERY)
        client.writer.write_eof()
        await within(asked.wait())
        go.set()
        assert await rest(client) == frame(1, OK)


async def test_a_client_that_resets_in_the_middle_of_a_result_leaves_nothing(tmp_path: Path) -> None:
    stopped = asyncio.Event()

    async def floods(node: Raw) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                node.writer.write(bytes(65_536))
                await node.writer.drain()
        stopped.set()

    async with before(tmp_path, then(floods)) as (proxy, _):
        client = await logged_in(proxy)
        client.writer.write(QUERY)
        await within(client.reader.readexactly(100_000))
        reset(client)
        await within(stopped.wait())


@pytest.mark.parametrize("abort", [False, True], ids=["FIN", "RST"])
async def test_what_a_node_said_last_reaches_the_client(tmp_path: Path, abort: bool) -> None:
    last = frame(1, b"\xff\x1d\x04#08S01Server shutdown in progress")
    heard = asyncio.Event()

    async def leaves(node: Raw) -> None:
        node.writer.write(last)
        if abort:
            await heard.wait()
            reset(node)
        else:
            node.writer.close()

    async with before(tmp_path, then(leaves)) as (proxy, node):
        client = await logged_in(proxy)
        client.writer.write(QUERY)
        assert await within(client.reader.readexactly(len(last))) == last
        heard.set()
        with contextlib.suppress(ConnectionResetError) if abort else contextlib.nullcontext():
            assert await rest(client) == b""
        # The session is over with the node, whatever the client still waits for.
        await proxy.reports(
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

    def leaves(node: Raw) -> None:
        node.writer.write(last)
        node.writer.close()
        left.set()

    async with before(tmp_path, then(leaves)) as (proxy, _):
        for _ in range(20):
            client = await logged_in(proxy)
            left.clear()
            client.writer.write(QUERY)
            if meanwhile:
                await within(left.wait())
            client.writer.write(PING * 100)
            assert (await within(client.packet()))[1] == last[4:]


async def test_a_node_that_leaves_in_the_middle_of_a_login(tmp_path: Path) -> None:
    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greets())
        await reader.readexactly(4)
        writer.close()

    async with before(tmp_path, leaves) as (proxy, node):
        client = await proxy.client()
        told = await within(client.login())
        assert b"the TiDB server closed the connection during the login" in told
        await proxy.reports({("login_failures", node.endpoint, "node_gone"): 1})


async def test_envoy_ends_well_with_sessions_in_every_state(tmp_path: Path) -> None:
    async def never_greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greets() if half.connections % 2 else b"")

    async with (
        listening(pings) as node,
        listening(never_greets) as half,
        envoy(tmp_path, [node.endpoint, half.endpoint], workers=2) as proxy,
    ):
        for number in range(40):
            client = await proxy.client()
            client.writer.write(QUERY[:2] if number % 5 else b"")
            if number % 2:
                login = asyncio.create_task(client.login())
                with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
                    await asyncio.wait_for(login, 0.05)
        await proxy.stop()
        assert proxy.process.returncode == 0


async def test_nothing_is_left_of_many_sessions(tmp_path: Path) -> None:
    async with before(tmp_path, pings, Parts(live={"login_timeout": 5})) as (proxy, _):

        async def one(number: int) -> None:
            client = await proxy.client()
            if number % 4 == 0:
                reset(client)
                return
            await within(client.packet())
            if number % 4 == 1:
                client.writer.write(b"\x20\0\0\x01\0")
                client.writer.close()
            elif number % 4 == 2:
                client.writer.write(b"nonsense that is no login")
                await rest(client)
            else:
                reset(client)

        async def some() -> None:
            await asyncio.gather(*(one(number) for number in range(200)))

            async def are_closed() -> bool:
                stats = await proxy.stats("cx_active")
                return not any(value for name, value in stats.items() if "admin" not in name)

            await until(are_closed)

        await some()
        descriptors, memory = proxy.descriptors(), await proxy.memory()
        for _ in range(4):
            await some()
        assert proxy.descriptors() <= descriptors + 5
        # What 800 sessions would leave, were it only 1 KiB each; the rest is for stats and caches of Envoy.
        assert await proxy.memory() < memory + 800 * 1024
