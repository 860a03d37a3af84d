"""Connect failover: if a node is unusable, the client reaches another node and notices only a delay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import frame
from tests.support.fake_servers import (
    Handler,
    full_backlog,
    refusing_port,
    reset_by_peer,
    run_fake_server,
    send_parts,
)
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import (
    NO_NODE_ERROR,
    OK_PAYLOAD,
    accept_login,
    connect_logged_in,
    error_packet,
    greeting_packet,
    read_to_end,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.waiting import wait_until, wait_until_read

UNUSABLE_NODES: dict[str, tuple[Handler, str]] = {
    "closes": (send_parts(then_close=True), "closed"),
    "is silent": (send_parts(), "closed"),
    "closes in its greeting": (send_parts(greeting_packet()[:40], then_close=True), "closed"),
    "stops in its greeting": (send_parts(greeting_packet()[:40]), "closed"),
    "is full": (send_parts(error_packet(1040, "Too many connections"), then_close=True), "full"),
    "is full, with a state": (
        send_parts(error_packet(1040, "Too many connections", "08004"), then_close=True),
        "full",
    ),
    "shuts down": (send_parts(error_packet(1053, "Server shutdown in progress")), "error"),
    "shuts down, with a state": (
        send_parts(error_packet(1053, "Server shutdown in progress", "08S01")),
        "error",
    ),
    "speaks HTTP": (send_parts(b"HTTP/1.1 400 Bad Request\r\n\r\n", then_close=True), "invalid"),
    "speaks protocol 9": (send_parts(frame(0, b"\x093.20\0" + bytes(20))), "invalid"),
    "begins with packet 1": (send_parts(b"\x4a\x00\x00\x01" + greeting_packet()[4:]), "invalid"),
    "greets with 70 KB": (send_parts((70_000).to_bytes(3, "little") + b"\0\x0a" + b"x" * 70_000), "invalid"),
}

NEVER_EJECTED = {"eject_seconds": 0}
"""Module settings that eject no node, so that each new session may try a failing node again."""


@pytest.fixture
def refusing_endpoint() -> Iterator[str]:
    with refusing_port() as endpoint:
        yield endpoint


@pytest.mark.parametrize(("handler", "reason"), UNUSABLE_NODES.values(), ids=UNUSABLE_NODES.keys())
async def test_session_fails_over_from_an_unusable_node(
    tmp_path: Path, handler: Handler, reason: str
) -> None:
    config = ModuleConfig(connect_timeout=0.5, node=NEVER_EJECTED)
    async with run_fake_server(handler) as bad, run_fake_server(serve_ok) as good:
        hosts = [Host(bad.endpoint, "bad"), Host(good.endpoint, "good")]
        async with run_envoy(tmp_path, hosts, config) as proxy:
            # The good node has more sessions after each login, so the next client tries the bad node first.
            for _ in range(3):
                await connect_logged_in(proxy)
            await proxy.wait_for_metrics(
                {
                    ("connect_failures", "bad", reason): bad.connections,
                    ("logins", "good"): 3,
                    ("sessions", "bad", "login"): 0,
                    ("sessions", "good", "idle"): 3,
                }
            )
            failures = sum(
                n for (name, _), n in (await proxy.metrics()).items() if name == "connect_failures"
            )
            assert failures == bad.connections >= 2
            assert good.connections == 3


async def test_session_fails_over_from_a_node_that_resets(tmp_path: Path) -> None:
    async with run_fake_server(reset_by_peer) as bad, run_fake_server(serve_ok) as good:
        hosts = [Host(bad.endpoint, "bad"), Host(good.endpoint, "good")]
        async with run_envoy(tmp_path, hosts, ModuleConfig(node=NEVER_EJECTED)) as proxy:
            for _ in range(3):
                await connect_logged_in(proxy)
            await proxy.wait_for_metrics({("logins", "good"): 3, ("sessions", "bad", "login"): 0})

            async def are_counted() -> bool:
                metrics = await proxy.metrics()
                # If Envoy sees the reset before it handles the connection, it counts a failed connect.
                failures = [
                    metrics.get(("connect_failures", ("bad", reason)), 0) for reason in ("connect", "closed")
                ]
                return sum(failures) == bad.connections

            await wait_until(are_counted)
            assert bad.connections >= 2
            assert good.connections == 3


@pytest.mark.parametrize("unreachable_node", [refusing_port, full_backlog])
async def test_session_fails_over_from_an_unreachable_node(
    tmp_path: Path, unreachable_node: Callable[[], AbstractContextManager[str]]
) -> None:
    config = ModuleConfig(connect_timeout=0.5, node=NEVER_EJECTED)
    with unreachable_node() as bad_endpoint:
        async with run_fake_server(serve_ok) as good:
            hosts = [Host(bad_endpoint, "bad"), Host(good.endpoint, "good")]
            async with run_envoy(tmp_path, hosts, config) as proxy:
                for _ in range(3):
                    await connect_logged_in(proxy)
                await proxy.wait_for_metrics({("logins", "good"): 3})

                async def are_counted() -> bool:
                    return (await proxy.metrics()).get(("connect_failures", ("bad", "connect")), 0) >= 2

                await wait_until(are_counted)


async def test_greeting_may_arrive_byte_by_byte(tmp_path: Path) -> None:
    greeting = greeting_packet("8.0.11-slow")

    async def greet_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in greeting[:-1]:
            writer.write(bytes([byte]))
            await wait_until_read(writer)
        node = await accept_login(reader, writer, greeting[-1:])
        await node.read_packet()
        writer.write(frame(1, OK_PAYLOAD))

    async with run_fake_server(greet_slowly) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await proxy.connect()
        payload = await with_timeout(client.login())
        assert payload[0] == 0
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def test_client_receives_error_after_each_node_failed_once(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(run_fake_server(UNUSABLE_NODES["shuts down"][0]))
            for _ in range(3)
        ]
        hosts = [Host(node.endpoint, f"n{number}") for number, node in enumerate(nodes)]
        proxy = await stack.enter_async_context(run_envoy(tmp_path, hosts, ModuleConfig(connect_attempts=10)))
        for _ in range(5):
            client = await proxy.connect()
            assert await read_to_end(client) == frame(0, NO_NODE_ERROR)
        assert [node.connections for node in nodes] == [5, 5, 5]
        await proxy.wait_for_metrics(
            {("login_failures", "", "no_node"): 5}
            | {("connect_failures", f"n{number}", "error"): 5 for number in range(3)}
            | {("sessions", f"n{number}", "login"): 0 for number in range(3)}
        )


async def test_connect_attempts_limits_the_nodes_tried(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(run_fake_server(UNUSABLE_NODES["shuts down"][0]))
            for _ in range(4)
        ]
        proxy = await stack.enter_async_context(
            run_envoy(tmp_path, [node.endpoint for node in nodes], ModuleConfig(connect_attempts=2))
        )
        client = await proxy.connect()
        assert await read_to_end(client) == frame(0, NO_NODE_ERROR)
        assert sorted(node.connections for node in nodes) == [0, 0, 1, 1]
        (line,) = (line for line in proxy.log.splitlines() if "a login found no node" in line)
        tried, _, known = line.partition("; known: ")
        assert [node.endpoint in tried for node in nodes] == [node.connections == 1 for node in nodes]
        assert [f"{node.endpoint} (active, weight 1" in known for node in nodes] == [True] * 4
        assert known.count(", ejected: error") == 2


async def test_client_receives_error_at_once_without_nodes(tmp_path: Path) -> None:
    async with run_envoy(tmp_path, []) as proxy:
        client = await proxy.connect()
        assert await read_to_end(client) == frame(0, NO_NODE_ERROR)
        await proxy.wait_for_metrics({("login_failures", "", "no_node"): 1})


async def test_client_that_sends_first_receives_the_error(tmp_path: Path, refusing_endpoint: str) -> None:
    async with run_envoy(tmp_path, [refusing_endpoint]) as proxy:
        for _ in range(10):
            client = await proxy.connect()
            client.writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await read_to_end(client) == frame(0, NO_NODE_ERROR)
