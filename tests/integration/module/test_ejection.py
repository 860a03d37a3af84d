"""A node that fails is ejected: it gets no new sessions for a while. A full one is only passed over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import frame
from tests.support.fake_servers import Peer, listening, resets, sends
from tests.support.module.bootstrap import Host, Parts
from tests.support.module.envoy import (
    OK,
    Envoy,
    envoy,
    greets,
    logged_in,
    refuses,
    response,
    rest,
    serve,
    within,
)
from tests.support.tidb_sim_clients import Raw
from tests.support.waiting import until

FULL = refuses(1040, "Too many connections")
NO_NODE = (
    b"\xff\x51\x04Tidevoy: no TiDB server takes new sessions at the moment; try again "
    b"(operator: `tidevoy nodes` tells why)"
)
shuts_down = sends(refuses(1053, "Server shutdown in progress"), then_close=True)


class Node:
    """A node whose behaviour can be changed."""

    def __init__(self) -> None:
        self.handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] = serve

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.handler(reader, writer)

    def is_full(self, packet: bytes = FULL) -> None:
        self.handler = sends(packet, then_close=True)

    def works(self) -> None:
        self.handler = serve


async def ejections(proxy: Envoy) -> dict[tuple[str, ...], int]:
    """Waits until there are any: since when, by node and reason."""
    found: dict[tuple[str, ...], int] = {}

    async def are_reported() -> bool:
        series = await proxy.metrics()
        found.update({labels: at for (name, labels), at in series.items() if name == "ejected_since" and at})
        return bool(found)

    await until(are_reported)
    return found


async def test_a_full_node_is_passed_over_for_each_login_and_used_as_soon_as_it_has_room(
    tmp_path: Path,
) -> None:
    node = Node()
    node.is_full()
    async with listening(node) as full, listening(serve) as other:
        # Its weight makes the full node the first choice of each login.
        hosts = [Host(full.endpoint, "full", weight=1000), Host(other.endpoint, "other")]
        async with envoy(tmp_path, hosts) as proxy:
            for number in range(1, 5):
                await logged_in(proxy)
                assert (full.connections, other.connections) == (number, number)
            node.works()
            await logged_in(proxy)
            assert (full.connections, other.connections) == (5, 4)
            await proxy.reports(
                {
                    ("connect_failures", "full", "full"): 4,
                    ("logins", "full"): 1,
                    ("logins", "other"): 4,
                    ("login_failures", "full", "node_full"): 0,
                }
            )


async def test_a_full_node_costs_a_client_no_attempt(tmp_path: Path) -> None:
    node = Node()
    node.handler = shuts_down
    full = sends(FULL, then_close=True)
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(listening(each)) for each in (full, full, full, node)]
        hosts = [Host(peer.endpoint, priority=number) for number, peer in enumerate(peers)]
        parts = Parts(policy={"connect_attempts": 1}, node={"eject_seconds": 0}, attempts=20)
        last = await stack.enter_async_context(listening(serve))
        proxy = await stack.enter_async_context(
            envoy(tmp_path, [*hosts, Host(last.endpoint, priority=4)], parts)
        )
        # One node that fails uses up the only attempt, although there is another node.
        assert await rest(await proxy.client()) == FULL
        assert [peer.connections for peer in (*peers, last)] == [1, 1, 1, 1, 0]
        node.works()
        await logged_in(proxy)
        assert [peer.connections for peer in (*peers, last)] == [2, 2, 2, 2, 0]


@pytest.mark.parametrize("state", [None, "08004"])
async def test_when_all_are_full_the_client_gets_the_error_of_a_full_node(
    tmp_path: Path, state: str | None
) -> None:
    """Also if other nodes failed in another way: that one is the most useful to the client."""
    node = Node()
    packet = refuses(1040, "Too many connections, says the node", state)
    node.is_full(packet)
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(listening(each)) for each in (shuts_down, resets)]
        full = await stack.enter_async_context(listening(node))
        for number, peers in enumerate(([full], [full, *others])):
            hosts = [Host(peer.endpoint, "full" if peer is full else "") for peer in peers]
            async with envoy(tmp_path / str(number), hosts) as proxy:
                for _ in range(5):
                    assert await rest(await proxy.client()) == packet
                node.works()
                await logged_in(proxy)
                node.is_full(packet)
                await proxy.reports({("login_failures", "full", "node_full"): 5, ("logins", "full"): 1})


@asynccontextmanager
async def bad_and_good(directory: Path, eject_seconds: float) -> AsyncIterator[tuple[Envoy, Node, Peer]]:
    """An Envoy before a node that fails, which is the first choice of each login, and one that works."""
    node = Node()
    node.handler = shuts_down
    parts = Parts(node={"eject_seconds": eject_seconds})
    async with listening(node) as bad, listening(serve) as good:
        hosts = [Host(bad.endpoint, "bad", weight=1000), Host(good.endpoint, "good")]
        async with envoy(directory, hosts, parts, workers=2) as proxy:
            yield proxy, node, bad


async def test_a_node_that_fails_gets_no_new_sessions(tmp_path: Path) -> None:
    async with bad_and_good(tmp_path, eject_seconds=60.0) as (proxy, _, bad):
        for _ in range(10):
            await logged_in(proxy)
        assert bad.connections == 1
        since = await ejections(proxy)
        assert set(since) == {("bad", "error")}
        assert time.time() - 60 < since["bad", "error"] <= time.time()


async def test_an_ejected_node_is_tried_again_and_used_once_it_works(tmp_path: Path) -> None:
    async with bad_and_good(tmp_path, eject_seconds=0.5) as (proxy, node, bad):

        async def is_tried(connections: int) -> bool:
            await logged_in(proxy)
            return bad.connections == connections

        await until(lambda: is_tried(1))
        await until(lambda: is_tried(2))
        node.works()
        await until(lambda: is_tried(3))
        # It greeted, so the ejection is over.
        await logged_in(proxy)
        assert bad.connections == 4
        await proxy.reports({("ejected_since", "bad", "error"): 0})


async def test_the_last_node_is_tried_by_everybody(tmp_path: Path) -> None:
    node = Node()
    node.handler = shuts_down
    async with listening(node) as only, envoy(tmp_path, [Host(only.endpoint, "only")]) as proxy:
        for number in range(1, 6):
            assert await rest(await proxy.client()) == frame(0, NO_NODE)
            assert only.connections == number
        node.works()
        await logged_in(proxy)
        assert only.connections == 6


async def test_when_all_have_failed_each_is_tried_and_the_first_that_works_is_used(tmp_path: Path) -> None:
    nodes = [Node() for _ in range(3)]
    async with AsyncExitStack() as stack:
        peers: list[Peer] = [await stack.enter_async_context(listening(node)) for node in nodes]
        hosts = [Host(peer.endpoint, f"n{number}") for number, peer in enumerate(peers)]
        async with envoy(tmp_path, hosts) as proxy:
            for node in nodes:
                node.handler = shuts_down
            for number in range(1, 4):
                assert await rest(await proxy.client()) == frame(0, NO_NODE)
                assert [peer.connections for peer in peers] == [number] * 3
            nodes[1].works()
            await logged_in(proxy)
            assert peers[1].connections == 4
            before = [peer.connections for peer in peers]
            for _ in range(3):
                await logged_in(proxy)
            # One of the others may be tried once more.
            assert sum(peer.connections for peer in peers) <= sum(before) + 4


FULL_LATE = b"\xff\x10\x04#08004Too many connections"


async def full_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Greets, and then refuses the login because it is full; TiDB sends this error twice."""
    writer.write(greets("8.0.11-full"))
    node = Raw(reader, writer)
    await node.packet()
    writer.write(frame(2, FULL_LATE) + frame(3, FULL_LATE))
    writer.close()


async def switches_plugin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Asks for the password with a new salt, as TiDB does if the plugin is not the account's."""
    writer.write(greets("8.0.11-room"))
    node = Raw(reader, writer)
    _, response = await node.packet()
    assert b"root\0\0tidevoy_asks_anew\0" in response
    writer.write(frame(2, b"\xfemysql_native_password\0" + b"s" * 20 + b"\0"))
    assert await node.packet() == (3, b"hash of s")
    writer.write(frame(4, OK))
    while True:
        await node.packet()
        writer.write(frame(1, OK))


async def test_a_node_that_is_full_after_its_greeting_is_passed_over_too(tmp_path: Path) -> None:
    full = sends(FULL, then_close=True)
    async with AsyncExitStack() as stack:
        nodes = {"late": full_late, "full": full, "room": switches_plugin}
        peers = [await stack.enter_async_context(listening(each)) for each in nodes.values()]
        hosts = [
            Host(peer.endpoint, name, priority=number)
            for number, (peer, name) in enumerate(zip(peers, nodes, strict=True))
        ]
        proxy = await stack.enter_async_context(envoy(tmp_path, hosts))
        for number in range(1, 4):
            client = await proxy.client()
            assert b"8.0.11-full" in (await within(client.packet()))[1]
            client.writer.write(response())
            assert await within(client.packet()) == (2, b"\xfemysql_native_password\0" + b"s" * 20 + b"\0")
            client.writer.write(frame(3, b"hash of s"))
            assert await within(client.packet()) == (4, OK)
            assert (await within(client.command(0x0E)))[0] == 0
            assert [peer.connections for peer in peers] == [number] * 3
        await proxy.reports(
            {
                ("connect_failures", "late", "full"): 3,
                ("connect_failures", "full", "full"): 3,
                ("logins", "room"): 3,
                ("sessions", "room", "idle"): 3,
                ("sessions", "late", "login"): 0,
                ("login_failures", "late", "node_full"): 0,
            }
        )


async def test_when_no_other_node_takes_it_the_client_gets_the_error_of_the_first_one(tmp_path: Path) -> None:
    full = sends(FULL, then_close=True)
    async with AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(listening(each))
            for each in (full_late, full_late, full, shuts_down)
        ]
        for number, some in enumerate((peers[:1], peers)):
            hosts = [Host(peer.endpoint, priority=at) for at, peer in enumerate(some)]
            async with envoy(tmp_path / str(number), hosts) as proxy:
                for _ in range(3):
                    client = await proxy.client()
                    await within(client.packet())
                    client.writer.write(response())
                    assert await within(client.packet()) == (2, FULL_LATE)
                    assert await rest(client) in (b"", frame(3, FULL_LATE))
