"""A timeout, the client, the node or Envoy ends a session: the other side notices, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import frame
from tests.support.fake_servers import FakeServer, Handler, reset_connection, run_fake_server
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


def after_first_command(script: Callable[[RawClient], object]) -> Handler:
    """Return a handler that accepts a login, waits for the first command, and then runs `script`."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = await accept_login(reader, writer)
        await node.read_packet()
        awaitable = script(node)
        if asyncio.iscoroutine(awaitable):
            await awaitable

    return handler


@asynccontextmanager
async def run_with_node(
    directory: Path, handler: Handler, config: ModuleConfig | None = None
) -> AsyncIterator[tuple[ModuleEnvoy, FakeServer]]:
    """Run an Envoy in front of one fake node. At the end, check that no session or connection is left."""
    async with run_fake_server(handler) as node, run_envoy(directory, [node.endpoint], config) as proxy:
        yield proxy, node
        for client in proxy.clients:
            client.writer.transport.abort()
        await proxy.wait_no_sessions(node.endpoint)

        async def are_closed() -> bool:
            return (await proxy.stats("cluster.tidb.upstream_cx_active"))[
                "cluster.tidb.upstream_cx_active"
            ] == 0

        await wait_until(are_closed)


async def answer_with_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Handle a node connection: accept the login, then answer every command with OK."""
    node = await accept_login(reader, writer)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            await node.read_packet()
            writer.write(frame(1, OK_PAYLOAD))
    writer.close()


async def test_idle_timeout_ends_session(tmp_path: Path) -> None:
    async with run_with_node(tmp_path, answer_with_ok, ModuleConfig(live_settings={"idle_timeout": 0.5})) as (
        proxy,
        node,
    ):
        client = await connect_logged_in(proxy)
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0
        assert await read_to_end(client) == b""
        assert (await with_timeout(node.connection_ends.get())).startswith("eof")


async def test_commands_restart_the_idle_timeout(tmp_path: Path) -> None:
    async with run_with_node(tmp_path, answer_with_ok, ModuleConfig(live_settings={"idle_timeout": 1.0})) as (
        proxy,
        _,
    ):
        client = await connect_logged_in(proxy)
        other = await connect_logged_in(proxy)
        for _ in range(12):
            assert (await with_timeout(client.send_command(0x0E)))[0] == 0
            await assert_nothing_received(client.reader, 0.15)
        assert await read_to_end(other) == b""
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def test_idle_timeout_starts_when_a_long_command_ends(tmp_path: Path) -> None:
    async def answer_slowly(node: RawClient) -> None:
        await assert_nothing_received(node.reader, 2.9)
        node.writer.write(frame(1, OK_PAYLOAD))
        await node.read_packet()
        node.writer.write(frame(1, OK_PAYLOAD))

    async with run_with_node(
        tmp_path, after_first_command(answer_slowly), ModuleConfig(live_settings={"idle_timeout": 1.0})
    ) as (proxy, _):
        client = await connect_logged_in(proxy)
        assert (await with_timeout(client.send_command(0x03, b"select sleep(2.9)")))[0] == 0
        await assert_nothing_received(client.reader, 0.5)
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0
        assert await read_to_end(client) == b""


async def test_half_closed_client_receives_its_answer(tmp_path: Path) -> None:
    request_ended = asyncio.Event()
    may_answer = asyncio.Event()

    async def answer_after_eof(node: RawClient) -> None:
        assert await node.reader.read() == b""
        request_ended.set()
        await may_answer.wait()
        node.writer.write(frame(1, OK_PAYLOAD))
        node.writer.close()

    async with run_with_node(tmp_path, after_first_command(answer_after_eof)) as (proxy, _):
        client = await connect_logged_in(proxy)
        client.writer.write(QUERY)
        client.writer.write_eof()
        await with_timeout(request_ended.wait())
        may_answer.set()
        assert await read_to_end(client) == frame(1, OK_PAYLOAD)


async def test_client_reset_during_a_result_leaves_no_session(tmp_path: Path) -> None:
    stopped = asyncio.Event()

    async def send_endlessly(node: RawClient) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                node.writer.write(bytes(65_536))
                await node.writer.drain()
        stopped.set()

    async with run_with_node(tmp_path, after_first_command(send_endlessly)) as (proxy, _):
        client = await connect_logged_in(proxy)
        client.writer.write(QUERY)
        await with_timeout(client.reader.readexactly(100_000))
        reset_connection(client.writer)
        await with_timeout(stopped.wait())


@pytest.mark.parametrize("abort", [False, True], ids=["FIN", "RST"])
async def test_last_error_of_a_node_reaches_the_client(tmp_path: Path, abort: bool) -> None:
    last = frame(1, b"\xff\x1d\x04#08S01Server shutdown in progress")
    error_received = asyncio.Event()

    async def send_error_and_end(node: RawClient) -> None:
        node.writer.write(last)
        if abort:
            await error_received.wait()
            reset_connection(node.writer)
        else:
            node.writer.close()

    async with run_with_node(tmp_path, after_first_command(send_error_and_end)) as (proxy, node):
        client = await connect_logged_in(proxy)
        client.writer.write(QUERY)
        assert await with_timeout(client.reader.readexactly(len(last))) == last
        error_received.set()
        with contextlib.suppress(ConnectionResetError) if abort else contextlib.nullcontext():
            assert await read_to_end(client) == b""
        # The session ends together with the node's connection.
        await proxy.wait_for_metrics(
            {("sessions", node.endpoint, state): 0 for state in ("idle", "busy")}
            | {("errors", "shutdown", node.endpoint): 1}
        )


@pytest.mark.parametrize("closed_first", [False, True], ids=["before the close", "after the close"])
async def test_last_error_reaches_a_client_that_is_sending(tmp_path: Path, closed_first: bool) -> None:
    """If Envoy closed a socket with unread bytes, the kernel would send RST, and the error would be lost."""
    last = frame(1, b"\xff\x1d\x04#08S01Server shutdown in progress")
    connection_closed = asyncio.Event()

    def send_error_and_close(node: RawClient) -> None:
        node.writer.write(last)
        node.writer.close()
        connection_closed.set()

    async with run_with_node(tmp_path, after_first_command(send_error_and_close)) as (proxy, _):
        for _ in range(20):
            client = await connect_logged_in(proxy)
            connection_closed.clear()
            client.writer.write(QUERY)
            if closed_first:
                await with_timeout(connection_closed.wait())
            client.writer.write(PING * 100)
            assert (await with_timeout(client.read_packet()))[1] == last[4:]


async def test_envoy_stops_cleanly_with_sessions_in_every_state(tmp_path: Path) -> None:
    async def never_greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet() if silent.connections % 2 else b"")

    async with (
        run_fake_server(answer_with_ok) as node,
        run_fake_server(never_greets) as silent,
        run_envoy(tmp_path, [node.endpoint, silent.endpoint], workers=2) as proxy,
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


async def test_many_sessions_leak_no_descriptors_or_memory(tmp_path: Path) -> None:
    async with run_with_node(tmp_path, answer_with_ok, ModuleConfig(live_settings={"login_timeout": 5})) as (
        proxy,
        _,
    ):

        async def run_client(number: int) -> None:
            client = await proxy.connect()
            if number % 4 == 0:
                reset_connection(client.writer)
                return
            await with_timeout(client.read_packet())
            if number % 4 == 1:
                client.writer.write(b"\x20\0\0\x01\0")
                client.writer.close()
            elif number % 4 == 2:
                client.writer.write(b"nonsense that is no login")
                await read_to_end(client)
            else:
                reset_connection(client.writer)

        async def run_clients() -> None:
            await asyncio.gather(*(run_client(number) for number in range(200)))

            async def are_closed() -> bool:
                stats = await proxy.stats("cx_active")
                return not any(value for name, value in stats.items() if "admin" not in name)

            await wait_until(are_closed)

        await run_clients()
        descriptors, memory = proxy.descriptor_count(), await proxy.allocated_bytes()
        for _ in range(4):
            await run_clients()
        assert proxy.descriptor_count() <= descriptors + 5
        # The limit is 1 KiB for each of 800 sessions. Envoy's stats and caches may use a part of it.
        assert await proxy.allocated_bytes() < memory + 800 * 1024
