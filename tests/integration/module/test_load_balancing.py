"""The load-balancing policy: the fewest sessions for the weight, counted over all workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fake_servers import refusing_port, run_fake_server
from tests.support.module.bootstrap import Host
from tests.support.module.envoy import ModuleEnvoy, accept_login, greeting_packet, run_envoy, with_timeout
from tests.support.tidb_sim_clients import RawClient


@asynccontextmanager
async def weighted(
    directory: Path,
    weights: Sequence[int],
    *,
    workers: int = 1,
    priorities: Sequence[int] = (0, 0, 0),
    others: Sequence[Host] = (),
) -> AsyncIterator[ModuleEnvoy]:
    """An Envoy before nodes a, b, c ..., which say in their greeting who they are, and `others`."""
    async with AsyncExitStack() as stack:
        hosts = [*others]
        for name, weight, priority in zip("abc", weights, priorities, strict=True):

            async def node(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str = name
            ) -> None:
                await accept_login(reader, writer, greeting_packet(name))

            peer = await stack.enter_async_context(run_fake_server(node))
            hosts.append(Host(peer.endpoint, name, weight, priority=priority))
        yield await stack.enter_async_context(run_envoy(directory, hosts, workers=workers))


async def open_one(proxy: ModuleEnvoy) -> tuple[str, RawClient]:
    """One more session: the node that it is on."""
    client = await proxy.connect()
    _, greeting = await with_timeout(client.read_packet())
    return chr(greeting[1]), client


async def close_all(
    proxy: ModuleEnvoy, clients: Sequence[RawClient], left: dict[tuple[str, ...], int]
) -> None:
    for client in clients:
        client.writer.close()
    await proxy.wait_for_metrics(left)


@pytest.mark.parametrize("workers", [1, 2])
async def test_sessions_are_spread_evenly_and_gaps_are_refilled(tmp_path: Path, workers: int) -> None:
    async with weighted(tmp_path, [1, 1, 1], workers=workers) as proxy:
        held = [await open_one(proxy) for _ in range(60)]
        assert Counter(name for name, _ in held) == {"a": 20, "b": 20, "c": 20}
        gone = [client for name, client in held if name == "b"][:15]
        await close_all(proxy, gone, {("sessions", "b", "login"): 5})
        again = [await open_one(proxy) for _ in range(15)]
        assert Counter(name for name, _ in again) == {"b": 15}


@pytest.mark.parametrize("workers", [1, 2])
async def test_weights_decide_how_many_sessions_a_node_has(tmp_path: Path, workers: int) -> None:
    async with weighted(tmp_path, [2, 1, 1], workers=workers) as proxy:
        held = [await open_one(proxy) for _ in range(60)]
        assert Counter(name for name, _ in held) == {"a": 30, "b": 15, "c": 15}
        gone = [client for name, client in held if name == "a"]
        await close_all(proxy, gone, {("sessions", "a", "login"): 0})
        again = [await open_one(proxy) for _ in range(30)]
        assert Counter(name for name, _ in again) == {"a": 30}


async def test_many_at_once_are_spread_evenly_too(tmp_path: Path) -> None:
    async with weighted(tmp_path, [1, 1, 1], workers=2) as proxy:
        held = await asyncio.gather(*(open_one(proxy) for _ in range(150)))
        counts = Counter(name for name, _ in held)
        # Two workers may each see a node as the emptiest at the same moment.
        assert max(counts.values()) - min(counts.values()) <= 2
        assert counts.total() == 150


async def test_equal_nodes_take_turns(tmp_path: Path) -> None:
    """Else one client after another would all meet the same node."""
    async with weighted(tmp_path, [1, 1, 1], workers=1) as proxy:
        names = []
        for _ in range(9):
            name, client = await open_one(proxy)
            names.append(name)
            await close_all(proxy, [client], {("login_failures", name, "client_gone"): names.count(name)})
        assert Counter(names) == {"a": 3, "b": 3, "c": 3}


async def test_nodes_elsewhere_get_nobody_while_one_is_near(tmp_path: Path) -> None:
    async with weighted(tmp_path, [100, 1, 1], priorities=[1, 0, 2]) as proxy:
        held = [await open_one(proxy) for _ in range(6)]
        assert Counter(name for name, _ in held) == {"b": 6}


async def test_who_finds_no_node_near_is_led_to_the_next_ones(tmp_path: Path) -> None:
    with refusing_port() as endpoint:
        near = Host(endpoint, "near")
        async with weighted(tmp_path, [1, 1, 1], priorities=[1, 2, 1], others=[near]) as proxy:
            held = [await open_one(proxy) for _ in range(6)]
            assert Counter(name for name, _ in held) == {"a": 3, "c": 3}
