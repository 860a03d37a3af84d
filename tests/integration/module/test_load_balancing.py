"""The load-balancing policy chooses the node with the fewest sessions (of all workers) per unit of weight."""

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
async def run_with_weights(
    directory: Path,
    weights: Sequence[int],
    *,
    workers: int = 1,
    priorities: Sequence[int] = (0, 0, 0),
    others: Sequence[Host] = (),
) -> AsyncIterator[ModuleEnvoy]:
    """Run an Envoy in front of `others` and the nodes a, b and c, whose greetings contain their names."""
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


async def open_session(proxy: ModuleEnvoy) -> tuple[str, RawClient]:
    """Open a session. Return the name of its node, and the client."""
    client = await proxy.connect()
    _, greeting = await with_timeout(client.read_packet())
    return chr(greeting[1]), client


async def close_all(
    proxy: ModuleEnvoy, clients: Sequence[RawClient], expected_metrics: dict[tuple[str, ...], int]
) -> None:
    for client in clients:
        client.writer.close()
    await proxy.wait_for_metrics(expected_metrics)


@pytest.mark.parametrize("workers", [1, 2])
async def test_sessions_are_spread_evenly_and_gaps_are_refilled(tmp_path: Path, workers: int) -> None:
    async with run_with_weights(tmp_path, [1, 1, 1], workers=workers) as proxy:
        sessions = [await open_session(proxy) for _ in range(60)]
        assert Counter(name for name, _ in sessions) == {"a": 20, "b": 20, "c": 20}
        closed = [client for name, client in sessions if name == "b"][:15]
        await close_all(proxy, closed, {("sessions", "b", "login"): 5})
        reopened = [await open_session(proxy) for _ in range(15)]
        assert Counter(name for name, _ in reopened) == {"b": 15}


@pytest.mark.parametrize("workers", [1, 2])
async def test_weights_decide_how_many_sessions_a_node_has(tmp_path: Path, workers: int) -> None:
    async with run_with_weights(tmp_path, [2, 1, 1], workers=workers) as proxy:
        sessions = [await open_session(proxy) for _ in range(60)]
        assert Counter(name for name, _ in sessions) == {"a": 30, "b": 15, "c": 15}
        closed = [client for name, client in sessions if name == "a"]
        await close_all(proxy, closed, {("sessions", "a", "login"): 0})
        reopened = [await open_session(proxy) for _ in range(30)]
        assert Counter(name for name, _ in reopened) == {"a": 30}


async def test_simultaneous_sessions_are_spread_evenly(tmp_path: Path) -> None:
    async with run_with_weights(tmp_path, [1, 1, 1], workers=2) as proxy:
        sessions = await asyncio.gather(*(open_session(proxy) for _ in range(150)))
        counts = Counter(name for name, _ in sessions)
        # Two workers may pick the same least loaded node at the same moment.
        assert max(counts.values()) - min(counts.values()) <= 2
        assert counts.total() == 150


async def test_equal_nodes_get_sessions_alternately(tmp_path: Path) -> None:
    """Nodes with equally many sessions take turns. Otherwise short sessions would all reach the same node."""
    async with run_with_weights(tmp_path, [1, 1, 1], workers=1) as proxy:
        node_names = []
        for _ in range(9):
            name, client = await open_session(proxy)
            node_names.append(name)
            await close_all(
                proxy, [client], {("login_failures", name, "client_gone"): node_names.count(name)}
            )
        assert Counter(node_names) == {"a": 3, "b": 3, "c": 3}


async def test_lower_priority_nodes_get_no_sessions_while_a_near_one_serves(tmp_path: Path) -> None:
    async with run_with_weights(tmp_path, [100, 1, 1], priorities=[1, 0, 2]) as proxy:
        sessions = [await open_session(proxy) for _ in range(6)]
        assert Counter(name for name, _ in sessions) == {"b": 6}


async def test_sessions_fall_back_to_the_next_priority(tmp_path: Path) -> None:
    with refusing_port() as endpoint:
        near = Host(endpoint, "near")
        async with run_with_weights(tmp_path, [1, 1, 1], priorities=[1, 2, 1], others=[near]) as proxy:
            sessions = [await open_session(proxy) for _ in range(6)]
            assert Counter(name for name, _ in sessions) == {"a": 3, "c": 3}
