"""A node that cannot be used gets no new sessions for a while; a full one is passed over, and no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import frame
from tests.awaiting import until
from tests.module_rig import Envoy, Host, Parts, envoy, logged_in, refuses, rest, serve
from tests.peers import Peer, listening, resets, sends

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


async def ejected(proxy: Envoy) -> dict[tuple[str, ...], int]:
    """Who is ejected, by node and reason, and since when; waits until somebody is."""
    found: dict[tuple[str, ...], int] = {}

    async def is_told() -> bool:
        told = await proxy.metrics()
        found.update({labels: at for (name, labels), at in told.items() if name == "ejected_since" and at})
        return bool(found)

    await until(is_told)
    return found


async def test_a_full_node_is_passed_over_for_each_login_and_used_as_soon_as_it_has_room(
    tmp_path: Path,
) -> None:
    node = Node()
    node.is_full()
    async with listening(node) as full, listening(serve) as other:
        # The other one comes second, so that the full one is asked by all.
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
        # One node that cannot be used ends it, although there is another.
        assert await rest(await proxy.client()) == FULL
        assert [peer.connections for peer in (*peers, last)] == [1, 1, 1, 1, 0]
        node.works()
        await logged_in(proxy)
        assert [peer.connections for peer in (*peers, last)] == [2, 2, 2, 2, 0]


@pytest.mark.parametrize("state", [None, "08004"])
async def test_when_all_are_full_the_client_reads_what_the_node_said(
    tmp_path: Path, state: str | None
) -> None:
    """Also where another node failed otherwise: that nobody takes it is the better reason to tell."""
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


async def test_a_node_that_fails_is_left_alone_for_a_while_and_then_tried_by_one(tmp_path: Path) -> None:
    node = Node()
    node.handler = shuts_down
    async with listening(node) as bad, listening(serve) as good:
        hosts = [Host(bad.endpoint, "bad", weight=1000), Host(good.endpoint, "good")]
        async with envoy(tmp_path, hosts, Parts(node={"eject_seconds": 2.0}), workers=2) as proxy:
            for _ in range(10):
                await logged_in(proxy)
            assert bad.connections == 1
            told = await ejected(proxy)
            assert set(told) == {("bad", "error")}
            assert time.time() - 60 < told["bad", "error"] <= time.time()

            async def asked_again() -> bool:
                await logged_in(proxy)
                return bad.connections == 2

            await until(asked_again)
            node.works()

            async def used_again() -> bool:
                await logged_in(proxy)
                return bad.connections == 3

            await until(used_again)
            # It greets, so it is back at once.
            before = bad.connections
            await logged_in(proxy)
            assert bad.connections == before + 1
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
            assert (
                sum(peer.connections for peer in peers) <= sum(before) + 4
            )  # one of them may be tried once more
