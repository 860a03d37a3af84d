"""A node that cannot be used costs a client time, and nothing else, as long as there is another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import frame
from tests.support.fake_servers import Handler, closed_port, full_backlog, listening, resets, sends
from tests.support.module.bootstrap import Host, Parts
from tests.support.module.envoy import OK, admit, envoy, greets, logged_in, refuses, rest, serve, within
from tests.support.waiting import taken

NO_NODE = (
    b"\xff\x51\x04Tidevoy: no TiDB server takes new sessions at the moment; try again "
    b"(operator: `tidevoy nodes` tells why)"
)

BROKEN: dict[str, tuple[Handler, str]] = {
    "closes": (sends(then_close=True), "closed"),
    "is silent": (sends(), "closed"),
    "closes in its greeting": (sends(greets()[:40], then_close=True), "closed"),
    "stops in its greeting": (sends(greets()[:40]), "closed"),
    "is full": (sends(refuses(1040, "Too many connections"), then_close=True), "full"),
    "is full, with a state": (
        sends(refuses(1040, "Too many connections", "08004"), then_close=True),
        "full",
    ),
    "shuts down": (sends(refuses(1053, "Server shutdown in progress")), "error"),
    "shuts down, with a state": (sends(refuses(1053, "Server shutdown in progress", "08S01")), "error"),
    "speaks HTTP": (sends(b"HTTP/1.1 400 Bad Request\r\n\r\n", then_close=True), "invalid"),
    "speaks protocol 9": (sends(frame(0, b"\x093.20\0" + bytes(20))), "invalid"),
    "begins with packet 1": (sends(b"\x4a\x00\x00\x01" + greets()[4:]), "invalid"),
    "greets with 70 KB": (sends((70_000).to_bytes(3, "little") + b"\0\x0a" + b"x" * 70_000), "invalid"),
}

NEVER_EJECTED = {"eject_seconds": 0}
"""For tests in which each session has to try the bad node again."""


@pytest.fixture
def refusing() -> Iterator[str]:
    """An endpoint that refuses connections."""
    with closed_port() as endpoint:
        yield endpoint


@pytest.mark.parametrize(("handler", "reason"), BROKEN.values(), ids=BROKEN.keys())
async def test_an_unusable_node_is_replaced_by_another(tmp_path: Path, handler: Handler, reason: str) -> None:
    quick = Parts(connect_timeout=0.5, node=NEVER_EJECTED)
    async with listening(handler) as bad, listening(serve) as good:
        hosts = [Host(bad.endpoint, "bad"), Host(good.endpoint, "good")]
        async with envoy(tmp_path, hosts, quick) as proxy:
            # Those that stay level the two out, so the bad one is asked by each.
            for _ in range(3):
                await logged_in(proxy)
            await proxy.reports(
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
    async with listening(resets) as bad, listening(serve) as good:
        hosts = [Host(bad.endpoint, "bad"), Host(good.endpoint, "good")]
        async with envoy(tmp_path, hosts, Parts(node=NEVER_EJECTED)) as proxy:
            for _ in range(3):
                await logged_in(proxy)
            await proxy.reports({("logins", "good"): 3, ("sessions", "bad", "login"): 0})
            told = await proxy.metrics()
            # Envoy may hear of the reset before it has looked at the connection: then there was none.
            failures = [
                told.get(("connect_failures", ("bad", reason)), 0) for reason in ("connect", "closed")
            ]
            assert sum(failures) == bad.connections >= 2
            assert good.connections == 3


async def test_a_node_that_refuses_connections_is_replaced(tmp_path: Path, refusing: str) -> None:
    async with listening(serve) as good:
        hosts = [Host(refusing, "bad"), Host(good.endpoint, "good")]
        async with envoy(tmp_path, hosts, Parts(node=NEVER_EJECTED)) as proxy:
            for _ in range(3):
                await logged_in(proxy)
            told = await proxy.metrics()
            await proxy.reports({("logins", "good"): 3})
            told = await proxy.metrics()
            assert told["connect_failures", ("bad", "connect")] >= 2


async def test_a_node_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with full_backlog() as lost:
        async with listening(serve) as good:
            hosts = [Host(lost, "bad"), Host(good.endpoint, "good")]
            async with envoy(tmp_path, hosts, Parts(connect_timeout=0.5)) as proxy:
                for _ in range(2):
                    await logged_in(proxy)
                await proxy.reports({("logins", "good"): 2})
                assert (await proxy.metrics())["connect_failures", ("bad", "connect")] >= 1


async def test_a_greeting_may_come_byte_by_byte(tmp_path: Path) -> None:
    greeting = greets("8.0.11-slow")

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in greeting[:-1]:
            writer.write(bytes([byte]))
            await taken(writer)
        node = await admit(reader, writer, greeting[-1:])
        await node.packet()
        writer.write(frame(1, OK))

    async with listening(slow) as node, envoy(tmp_path, [node.endpoint]) as proxy:
        client = await proxy.client()
        payload = await within(client.login())
        assert payload[0] == 0
        assert (await within(client.command(0x0E)))[0] == 0


async def test_when_all_fail_the_client_is_told_and_each_was_asked_once(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(listening(BROKEN["shuts down"][0])) for _ in range(3)]
        hosts = [Host(node.endpoint, f"n{number}") for number, node in enumerate(nodes)]
        proxy = await stack.enter_async_context(envoy(tmp_path, hosts, Parts(attempts=10)))
        for _ in range(5):
            client = await proxy.client()
            assert await rest(client) == frame(0, NO_NODE)
        assert [node.connections for node in nodes] == [5, 5, 5]
        await proxy.reports(
            {("login_failures", "", "no_node"): 5}
            | {("connect_failures", f"n{number}", "error"): 5 for number in range(3)}
            | {("sessions", f"n{number}", "login"): 0 for number in range(3)}
        )


async def test_no_more_nodes_are_asked_than_the_attempts_allow(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(listening(BROKEN["shuts down"][0])) for _ in range(4)]
        proxy = await stack.enter_async_context(
            envoy(tmp_path, [node.endpoint for node in nodes], Parts(attempts=2))
        )
        client = await proxy.client()
        assert await rest(client) == frame(0, NO_NODE)
        assert sorted(node.connections for node in nodes) == [0, 0, 1, 1]


async def test_without_a_node_the_client_is_told_at_once(tmp_path: Path) -> None:
    async with envoy(tmp_path, []) as proxy:
        client = await proxy.client()
        assert await rest(client) == frame(0, NO_NODE)
        await proxy.reports({("login_failures", "", "no_node"): 1})


async def test_a_client_that_speaks_first_reads_the_error_all_the_same(tmp_path: Path, refusing: str) -> None:
    async with envoy(tmp_path, [refusing]) as proxy:
        for _ in range(10):
            client = await proxy.client()
            client.writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await rest(client) == frame(0, NO_NODE)
