"""What the control plane says of nodes while Envoy runs: it counts at once, and closes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from sandbox.mariadb import MariaDb
from tests.awaiting import until
from tests.module_rig import Envoy, Host, Parts, envoy, logged_in, publish, rest, serve, tell, tell_endpoints
from tests.moves_rig import fleet
from tests.peers import Peer, listening

NO_NODE = b"\xff\x51\x04"  # error 1105


@asynccontextmanager
async def before(
    directory: Path, nodes: int = 2, *, workers: int = 1
) -> AsyncIterator[tuple[Envoy, Path, list[Peer]]]:
    """An Envoy before nodes that let everybody in, the file of its endpoints, and the nodes."""
    async with AsyncExitStack() as running:
        peers = [await running.enter_async_context(listening(serve)) for _ in range(nodes)]
        parts = Parts(endpoints=directory / "endpoints.json")
        hosts = [Host(peer.endpoint) for peer in peers]
        proxy = await running.enter_async_context(envoy(directory, hosts, parts, workers=workers))
        assert parts.endpoints is not None
        yield proxy, parts.endpoints, peers


async def refused(proxy: Envoy) -> bool:
    """Whether a new client is told that there is no node for it."""
    return NO_NODE in await rest(await proxy.client())


async def taken(proxy: Envoy, count: int) -> None:
    """Returns when so many live configurations have reached all threads of Envoy."""

    async def are() -> bool:
        return sum((await proxy.stats("tidevoy.live-config.config_reload$")).values()) >= count

    await until(are)


async def test_a_node_gets_no_session_before_both_envoy_and_the_control_plane_have_named_it(
    tmp_path: Path,
) -> None:
    async with before(tmp_path) as (proxy, endpoints, (a, b)):
        for only in (publish, tell_endpoints):
            other = tell_endpoints if only is publish else publish
            tell(endpoints, [Host(a.endpoint)])
            await until(lambda: served_by(proxy, a))
            only(endpoints, [Host(b.endpoint)])
            await until(lambda: refused(proxy))
            other(endpoints, [Host(b.endpoint)])
            await until(lambda: served_by(proxy, b))


async def served_by(proxy: Envoy, node: Peer) -> bool:
    """Whether a new client is, which then leaves again."""
    connections = node.connections
    client = await proxy.client()
    first = await client.reader.read(1)
    client.writer.close()
    return bool(first) and node.connections > connections


async def test_a_node_is_closed_to_new_sessions_whoever_says_so_first(tmp_path: Path) -> None:
    async with before(tmp_path) as (proxy, endpoints, (a, b)):

        async def gets_none() -> bool:
            """Both have the same weight, so of several clients in a row each node would get some."""
            connections = a.connections
            for _ in range(4):
                await served_by(proxy, b)
            return a.connections == connections

        for only in (publish, tell_endpoints):
            tell(endpoints, [Host(a.endpoint), Host(b.endpoint)])
            await until(lambda: served_by(proxy, a))
            only(endpoints, [Host(a.endpoint, state="draining"), Host(b.endpoint)])
            await until(gets_none)


async def test_while_two_nodes_change_places_there_is_always_one(tmp_path: Path) -> None:
    """One change takes a node out and another in, and one of the two sources has heard of it."""
    async with before(tmp_path) as (proxy, endpoints, (a, b)):
        for only, still in ((publish, a), (tell_endpoints, b)):
            tell(endpoints, [Host(a.endpoint), Host(b.endpoint, state="draining")])
            await until(lambda: served_by(proxy, a))
            only(endpoints, [Host(a.endpoint, state="draining"), Host(b.endpoint)])

            async def is_used(node: Peer = still) -> bool:
                connections = a.connections + b.connections
                used = await served_by(proxy, node)
                assert a.connections + b.connections == connections + 1
                return used

            await until(is_used)


async def test_idle_sessions_of_all_workers_leave_when_the_control_plane_alone_says_so(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with fleet(tmp_path, mariadb, drained=[1], workers=4) as all_:
        clients = [await all_.client() for _ in range(12)]
        await all_.settled(12, 0)
        first, second = (Host(node.sql_address) for node in all_.nodes)
        tell(all_.endpoints, [first, second])
        left = dataclasses.replace(first, state="draining")
        publish(all_.endpoints, [left, second])
        await all_.settled(0, 12)
        for client in clients:
            await client.ensure_closed()


async def test_a_worker_hears_of_it_when_the_session_is_gone_by_which_it_was_woken(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with fleet(tmp_path, mariadb, drained=[1]) as all_:
        first, second = (Host(node.sql_address) for node in all_.nodes)
        tell(all_.endpoints, [first, second])
        publish(all_.endpoints, [first])
        clients = [await all_.client() for _ in range(6)]
        for gone in clients[:5]:
            await gone.ensure_closed()
        publish(all_.endpoints, [dataclasses.replace(first, state="draining"), second])
        await all_.settled(0, 1)
        await clients[5].ensure_closed()


async def test_a_change_closes_no_connection_and_drains_no_listener(tmp_path: Path) -> None:
    async with before(tmp_path, workers=2) as (proxy, endpoints, peers):
        clients = [await logged_in(proxy) for _ in range(8)]
        hosts = [Host(peer.endpoint) for peer in peers]
        for number in range(20):
            publish(endpoints, [dataclasses.replace(host, version=f"8.5.{number}") for host in hosts])
            await taken(proxy, number + 2)
        stats = await proxy.stats("listener_manager|cx_destroy|no_route|config_fail")
        assert stats["listener_manager.total_listeners_draining"] == 0
        assert stats["listener_manager.listener_modified"] == 0
        for client in clients:
            assert (await client.command(0x0E))[0] == 0


async def test_limits_change_for_sessions_that_begin_later(tmp_path: Path) -> None:
    async with before(tmp_path, 1) as (proxy, endpoints, (node,)):
        first = await logged_in(proxy)
        publish(endpoints, [Host(node.endpoint)], {"idle_timeout": 0.3})
        await taken(proxy, 2)
        second = await logged_in(proxy)
        assert await rest(second) is not None
        assert (await first.command(0x0E))[0] == 0


async def test_sessions_do_not_keep_what_was_said_when_they_began(tmp_path: Path) -> None:
    """Envoy keeps the text of a network filter's configuration as long as a connection of it lives."""
    async with before(tmp_path, 1) as (proxy, endpoints, (node,)):
        many = [Host(f"127.0.0.2:{port}", state="drained") for port in range(1000, 3000)]

        async def say(number: int) -> None:
            versions = [dataclasses.replace(host, version=f"8.5.{number}") for host in many]
            publish(endpoints, [Host(node.endpoint), *versions])
            await taken(proxy, number + 1)

        kept = []
        for number in range(1, 6):
            await say(number)
            kept.append(await logged_in(proxy))
        # With its first report of a node the module remembers what it reported.
        await proxy.reports({("logins", node.endpoint): 5})
        memory = await proxy.memory()
        for number in range(6, 21):
            await say(number)
            kept.append(await logged_in(proxy))
        size = endpoints.with_name(f"{endpoints.name}.live").stat().st_size
        assert size > 100_000
        # 15 more sessions with their buffers, but none of the 15 texts.
        assert await proxy.memory() - memory < 7 * size
