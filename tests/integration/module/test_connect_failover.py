"""A node that cannot be used costs a client time, and nothing else, as long as there is another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
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
from tests.support.waiting import wait_until_read

NO_NODE = (
    b"\xff\x51\x04Tidevoy: no TiDB server takes new sessions at the moment; try again "
    b"(operator: `tidevoy nodes` tells why)"
)

BROKEN: dict[str, tuple[Handler, str]] = {
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
"""For tests in which each session has to try the bad node again."""


@pytest.fixture
def refusing() -> Iterator[str]:
    """An endpoint that refuses connections."""
    with refusing_port() as endpoint:
        yield endpoint


@pytest.mark.parametrize(("handler", "reason"), BROKEN.values(), ids=BROKEN.keys())
async def test_an_unusable_node_is_replaced_by_another(tmp_path: Path, handler: Handler, reason: str) -> None:
    quick = ModuleConfig(connect_timeout=0.5, node=NEVER_EJECTED)
    async with run_fake_server(handler) as bad, run_fake_server(serve_ok) as good:
        hosts = [Host(bad.endpoint, "bad"), Host(good.endpoint, "good")]
        async with run_envoy(tmp_path, hosts, quick) as proxy:
            # Those that stay level the two out, so the bad one is asked by each.
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


async def test_a_node_that_resets_is_replaced(tmp_path: Path) -> None:
    async with run_fake_server(reset_by_peer) as bad, run_fake_server(serve_ok) as good:
        hosts = [Host(bad.endpoint, "bad"), Host(good.endpoint, "good")]
        async with run_envoy(tmp_path, hosts, ModuleConfig(node=NEVER_EJECTED)) as proxy:
            for _ in range(3):
                await connect_logged_in(proxy)
            await proxy.wait_for_metrics({("logins", "good"): 3, ("sessions", "bad", "login"): 0})
            told = await proxy.metrics()
            # Envoy may hear of the reset before it has looked at the connection: then there was none.
            failures = [
                told.get(("connect_failures", ("bad", reason)), 0) for reason in ("connect", "closed")
            ]
            assert sum(failures) == bad.connections >= 2
            assert good.connections == 3


async def test_a_node_that_refuses_connections_is_replaced(tmp_path: Path, refusing: str) -> None:
    async with run_fake_server(serve_ok) as good:
        hosts = [Host(refusing, "bad"), Host(good.endpoint, "good")]
        async with run_envoy(tmp_path, hosts, ModuleConfig(node=NEVER_EJECTED)) as proxy:
            for _ in range(3):
                await connect_logged_in(proxy)
            told = await proxy.metrics()
            await proxy.wait_for_metrics({("logins", "good"): 3})
            told = await proxy.metrics()
            assert told["connect_failures", ("bad", "connect")] >= 2


async def test_a_node_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with full_backlog() as lost:
        async with run_fake_server(serve_ok) as good:
            hosts = [Host(lost, "bad"), Host(good.endpoint, "good")]
            async with run_envoy(tmp_path, hosts, ModuleConfig(connect_timeout=0.5)) as proxy:
                for _ in range(2):
                    await connect_logged_in(proxy)
                await proxy.wait_for_metrics({("logins", "good"): 2})
                assert (await proxy.metrics())["connect_failures", ("bad", "connect")] >= 1


async def test_a_greeting_may_come_byte_by_byte(tmp_path: Path) -> None:
    greeting = greeting_packet("8.0.11-slow")

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in greeting[:-1]:
            writer.write(bytes([byte]))
            await wait_until_read(writer)
        node = await accept_login(reader, writer, greeting[-1:])
        await node.read_packet()
        writer.write(frame(1, OK_PAYLOAD))

    async with run_fake_server(slow) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await proxy.connect()
        payload = await with_timeout(client.login())
        assert payload[0] == 0
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def test_when_all_fail_the_client_is_told_and_each_was_asked_once(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(run_fake_server(BROKEN["shuts down"][0])) for _ in range(3)]
        hosts = [Host(node.endpoint, f"n{number}") for number, node in enumerate(nodes)]
        proxy = await stack.enter_async_context(run_envoy(tmp_path, hosts, ModuleConfig(connect_attempts=10)))
        for _ in range(5):
            client = await proxy.connect()
            assert await read_to_end(client) == frame(0, NO_NODE)
        assert [node.connections for node in nodes] == [5, 5, 5]
        await proxy.wait_for_metrics(
            {("login_failures", "", "no_node"): 5}
            | {("connect_failures", f"n{number}", "error"): 5 for number in range(3)}
            | {("sessions", f"n{number}", "login"): 0 for number in range(3)}
        )


async def test_no_more_nodes_are_asked_than_the_attempts_allow(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(run_fake_server(BROKEN["shuts down"][0])) for _ in range(4)]
        proxy = await stack.enter_async_context(
            run_envoy(tmp_path, [node.endpoint for node in nodes], ModuleConfig(connect_attempts=2))
        )
        client = await proxy.connect()
        assert await read_to_end(client) == frame(0, NO_NODE)
        assert sorted(node.connections for node in nodes) == [0, 0, 1, 1]


async def test_without_a_node_the_client_is_told_at_once(tmp_path: Path) -> None:
    async with run_envoy(tmp_path, []) as proxy:
        client = await proxy.connect()
        assert await read_to_end(client) == frame(0, NO_NODE)
        await proxy.wait_for_metrics({("login_failures", "", "no_node"): 1})


async def test_a_client_that_speaks_first_reads_the_error_all_the_same(tmp_path: Path, refusing: str) -> None:
    async with run_envoy(tmp_path, [refusing]) as proxy:
        for _ in range(10):
            client = await proxy.connect()
            client.writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await read_to_end(client) == frame(0, NO_NODE)
