"""A failing node is ejected: it gets no new sessions for a while. A full node is only skipped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import frame
from tests.support.fake_servers import FakeServer, Handler, reset_by_peer, run_fake_server, send_parts
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import (
    NO_NODE_ERROR,
    OK_PAYLOAD,
    ModuleEnvoy,
    connect_logged_in,
    error_packet,
    greeting_packet,
    login_packet,
    read_to_end,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

FULL = error_packet(1040, "Too many connections")
reject_with_shutdown = send_parts(error_packet(1053, "Server shutdown in progress"), then_close=True)


class SwitchableNode:
    """A node whose behavior a test can change."""

    def __init__(self) -> None:
        self.handler: Handler = serve_ok

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.handler(reader, writer)

    def set_full(self, packet: bytes = FULL) -> None:
        self.handler = send_parts(packet, then_close=True)

    def set_working(self) -> None:
        self.handler = serve_ok


async def ejections(proxy: ModuleEnvoy) -> dict[tuple[str, ...], int]:
    """Wait until a node is ejected. Return the start (Unix seconds) of each ejection by node and reason."""
    started_at: dict[tuple[str, ...], int] = {}

    async def are_reported() -> bool:
        series = await proxy.metrics()
        started_at.update(
            {labels: since for (name, labels), since in series.items() if name == "ejected_since" and since}
        )
        return bool(started_at)

    await wait_until(are_reported)
    return started_at


async def test_full_node_is_skipped_until_it_has_room(
    tmp_path: Path,
) -> None:
    node = SwitchableNode()
    node.set_full()
    async with run_fake_server(node) as full, run_fake_server(serve_ok) as other:
        # Each login tries the full node first, because of its high weight.
        hosts = [Host(full.endpoint, "full", weight=1000), Host(other.endpoint, "other")]
        async with run_envoy(tmp_path, hosts) as proxy:
            for number in range(1, 5):
                await connect_logged_in(proxy)
                assert (full.connections, other.connections) == (number, number)
            node.set_working()
            await connect_logged_in(proxy)
            assert (full.connections, other.connections) == (5, 4)
            await proxy.wait_for_metrics(
                {
                    ("connect_failures", "full", "full"): 4,
                    ("logins", "full"): 1,
                    ("logins", "other"): 4,
                    ("login_failures", "full", "node_full"): 0,
                }
            )


async def test_full_node_uses_up_no_connect_attempt(tmp_path: Path) -> None:
    node = SwitchableNode()
    node.handler = reject_with_shutdown
    full = send_parts(FULL, then_close=True)
    async with AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(run_fake_server(handler)) for handler in (full, full, full, node)
        ]
        hosts = [Host(peer.endpoint, priority=number) for number, peer in enumerate(peers)]
        config = ModuleConfig(policy={"connect_attempts": 1}, node={"eject_seconds": 0}, connect_attempts=20)
        last = await stack.enter_async_context(run_fake_server(serve_ok))
        proxy = await stack.enter_async_context(
            run_envoy(tmp_path, [*hosts, Host(last.endpoint, priority=4)], config)
        )
        # Three full nodes use up no attempt. The fourth node uses up the only one, so `last` is not tried.
        assert await read_to_end(await proxy.connect()) == FULL
        assert [peer.connections for peer in (*peers, last)] == [1, 1, 1, 1, 0]
        node.set_working()
        await connect_logged_in(proxy)
        assert [peer.connections for peer in (*peers, last)] == [2, 2, 2, 2, 0]


@pytest.mark.parametrize("state", [None, "08004"])
async def test_client_receives_the_error_of_a_full_node_if_all_fail(
    tmp_path: Path, state: str | None
) -> None:
    """The error of a full node takes precedence over other errors, because it helps the client most."""
    node = SwitchableNode()
    packet = error_packet(1040, "Too many connections on this node", state)
    node.set_full(packet)
    async with AsyncExitStack() as stack:
        others = [
            await stack.enter_async_context(run_fake_server(handler))
            for handler in (reject_with_shutdown, reset_by_peer)
        ]
        full = await stack.enter_async_context(run_fake_server(node))
        for number, peers in enumerate(([full], [full, *others])):
            hosts = [Host(peer.endpoint, "full" if peer is full else "") for peer in peers]
            async with run_envoy(tmp_path / str(number), hosts) as proxy:
                for _ in range(5):
                    assert await read_to_end(await proxy.connect()) == packet
                node.set_working()
                await connect_logged_in(proxy)
                node.set_full(packet)
                await proxy.wait_for_metrics(
                    {("login_failures", "full", "node_full"): 5, ("logins", "full"): 1}
                )


@asynccontextmanager
async def run_bad_and_good(
    directory: Path, eject_seconds: float
) -> AsyncIterator[tuple[ModuleEnvoy, SwitchableNode, FakeServer]]:
    """Run an Envoy in front of a failing node, which every login tries first, and a working node."""
    node = SwitchableNode()
    node.handler = reject_with_shutdown
    config = ModuleConfig(node={"eject_seconds": eject_seconds})
    async with run_fake_server(node) as bad, run_fake_server(serve_ok) as good:
        hosts = [Host(bad.endpoint, "bad", weight=1000), Host(good.endpoint, "good")]
        async with run_envoy(directory, hosts, config, workers=2) as proxy:
            yield proxy, node, bad


async def test_failing_node_gets_no_new_sessions(tmp_path: Path) -> None:
    async with run_bad_and_good(tmp_path, eject_seconds=60.0) as (proxy, _, bad):
        for _ in range(10):
            await connect_logged_in(proxy)
        assert bad.connections == 1
        since = await ejections(proxy)
        assert set(since) == {("bad", "error")}
        assert time.time() - 60 < since["bad", "error"] <= time.time()


async def test_ejected_node_is_retried_and_used_once_it_works(tmp_path: Path) -> None:
    async with run_bad_and_good(tmp_path, eject_seconds=0.5) as (proxy, node, bad):

        async def is_tried(connections: int) -> bool:
            await connect_logged_in(proxy)
            return bad.connections == connections

        await wait_until(lambda: is_tried(1))
        await wait_until(lambda: is_tried(2))
        node.set_working()
        await wait_until(lambda: is_tried(3))
        # The node sent a greeting, so the ejection is over.
        await connect_logged_in(proxy)
        assert bad.connections == 4
        await proxy.wait_for_metrics({("ejected_since", "bad", "error"): 0})


async def test_last_node_is_tried_for_every_login(tmp_path: Path) -> None:
    node = SwitchableNode()
    node.handler = reject_with_shutdown
    async with run_fake_server(node) as only, run_envoy(tmp_path, [Host(only.endpoint, "only")]) as proxy:
        for number in range(1, 6):
            assert await read_to_end(await proxy.connect()) == frame(0, NO_NODE_ERROR)
            assert only.connections == number
        node.set_working()
        await connect_logged_in(proxy)
        assert only.connections == 6


async def test_all_nodes_are_retried_when_all_have_failed(tmp_path: Path) -> None:
    nodes = [SwitchableNode() for _ in range(3)]
    async with AsyncExitStack() as stack:
        peers: list[FakeServer] = [await stack.enter_async_context(run_fake_server(node)) for node in nodes]
        hosts = [Host(peer.endpoint, f"n{number}") for number, peer in enumerate(peers)]
        async with run_envoy(tmp_path, hosts) as proxy:
            for node in nodes:
                node.handler = reject_with_shutdown
            for number in range(1, 4):
                assert await read_to_end(await proxy.connect()) == frame(0, NO_NODE_ERROR)
                assert [peer.connections for peer in peers] == [number] * 3
            nodes[1].set_working()
            await connect_logged_in(proxy)
            assert peers[1].connections == 4
            before = [peer.connections for peer in peers]
            for _ in range(3):
                await connect_logged_in(proxy)
            # One of the other nodes may be tried once more.
            assert sum(peer.connections for peer in peers) <= sum(before) + 4


FULL_AFTER_GREETING = b"\xff\x10\x04#08004Too many connections"


async def reject_login_as_full(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Greet, and then reject the login as a full TiDB node does: send the same error twice."""
    writer.write(greeting_packet("8.0.11-full"))
    node = RawClient(reader, writer)
    await node.read_packet()
    writer.write(frame(2, FULL_AFTER_GREETING) + frame(3, FULL_AFTER_GREETING))
    writer.close()


async def switch_plugin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Request the password with a new salt, as TiDB does if client and account use different plugins."""
    writer.write(greeting_packet("8.0.11-room"))
    node = RawClient(reader, writer)
    _, response = await node.read_packet()
    assert b"root\0\0tidevoy_asks_anew\0" in response
    writer.write(frame(2, b"\xfemysql_native_password\0" + b"s" * 20 + b"\0"))
    assert await node.read_packet() == (3, b"hash of s")
    writer.write(frame(4, OK_PAYLOAD))
    while True:
        await node.read_packet()
        writer.write(frame(1, OK_PAYLOAD))


async def run_nodes_by_priority(
    stack: AsyncExitStack, directory: Path, nodes: Mapping[str, Handler]
) -> tuple[ModuleEnvoy, list[FakeServer]]:
    """Run an Envoy in front of these nodes. It tries them in their order."""
    peers = [await stack.enter_async_context(run_fake_server(handler)) for handler in nodes.values()]
    hosts = [
        Host(peer.endpoint, name, priority=number)
        for number, (peer, name) in enumerate(zip(peers, nodes, strict=True))
    ]
    return await stack.enter_async_context(run_envoy(directory, hosts)), peers


async def test_node_that_is_full_after_its_greeting_is_skipped(tmp_path: Path) -> None:
    full = send_parts(FULL, then_close=True)
    async with AsyncExitStack() as stack:
        nodes = {"late": reject_login_as_full, "full": full, "room": switch_plugin}
        proxy, peers = await run_nodes_by_priority(stack, tmp_path, nodes)
        for number in range(1, 4):
            client = await proxy.connect()
            assert b"8.0.11-full" in (await with_timeout(client.read_packet()))[1]
            client.writer.write(login_packet())
            assert await with_timeout(client.read_packet()) == (
                2,
                b"\xfemysql_native_password\0" + b"s" * 20 + b"\0",
            )
            client.writer.write(frame(3, b"hash of s"))
            assert await with_timeout(client.read_packet()) == (4, OK_PAYLOAD)
            assert (await with_timeout(client.send_command(0x0E)))[0] == 0
            assert [peer.connections for peer in peers] == [number] * 3
        await proxy.wait_for_metrics(
            {
                ("connect_failures", "late", "full"): 3,
                ("connect_failures", "full", "full"): 3,
                ("logins", "room"): 3,
                ("sessions", "room", "idle"): 3,
                ("sessions", "late", "login"): 0,
                ("login_failures", "late", "node_full"): 0,
            }
        )


async def close_without_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close the connection instead of greeting."""
    writer.close()


async def test_node_that_closes_in_a_login_failover_counts_as_closed(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = {"late": reject_login_as_full, "closes": close_without_greeting, "room": switch_plugin}
        proxy, _ = await run_nodes_by_priority(stack, tmp_path, nodes)
        client = await proxy.connect()
        await with_timeout(client.read_packet())
        client.writer.write(login_packet())
        assert (await with_timeout(client.read_packet()))[0] == 2
        await proxy.wait_for_metrics(
            {("connect_failures", "closes", "closed"): 1, ("connect_failures", "closes", "connect"): 0}
        )


async def test_client_receives_the_first_error_if_no_node_has_room(tmp_path: Path) -> None:
    full = send_parts(FULL, then_close=True)
    async with AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(run_fake_server(handler))
            for handler in (reject_login_as_full, reject_login_as_full, full, reject_with_shutdown)
        ]
        for number, chosen in enumerate((peers[:1], peers)):
            hosts = [Host(peer.endpoint, priority=priority) for priority, peer in enumerate(chosen)]
            async with run_envoy(tmp_path / str(number), hosts) as proxy:
                for _ in range(3):
                    client = await proxy.connect()
                    await with_timeout(client.read_packet())
                    client.writer.write(login_packet())
                    assert await with_timeout(client.read_packet()) == (2, FULL_AFTER_GREETING)
                    assert await read_to_end(client) in (b"", frame(3, FULL_AFTER_GREETING))
                await proxy.wait_for_metrics(
                    {
                        ("login_failures", peer.endpoint, "node_full"): 3 if peer is chosen[0] else 0
                        for peer in chosen
                    }
                )
