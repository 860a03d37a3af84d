"""The live configuration: changes take effect at once, and close no connection."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from sandbox.mariadb import MariaDb
from tests.support.fake_servers import Peer, listening
from tests.support.migration.fleet import fleet
from tests.support.module.bootstrap import (
    Host,
    Parts,
    change_endpoints,
    change_live_config,
    live_config_file,
    tell,
)
from tests.support.module.envoy import Envoy, envoy, logged_in, rest, serve, within
from tests.support.waiting import until

NO_NODE = b"\xff\x51\x04"  # error 1105


@asynccontextmanager
async def before(
    directory: Path, nodes: int = 2, *, workers: int = 1
) -> AsyncIterator[tuple[Envoy, Path, list[Peer]]]:
    """An Envoy in front of nodes that admit everybody, the file of its endpoints, and the nodes."""
    async with AsyncExitStack() as running:
        peers = [await running.enter_async_context(listening(serve)) for _ in range(nodes)]
        parts = Parts(endpoints=directory / "endpoints.json")
        hosts = [Host(peer.endpoint) for peer in peers]
        proxy = await running.enter_async_context(envoy(directory, hosts, parts, workers=workers))
        assert parts.endpoints is not None
        yield proxy, parts.endpoints, peers


async def refused(proxy: Envoy) -> bool:
    """Whether a new client gets the error that there is no node for it."""
    client = await proxy.client()
    _, first = await within(client.packet())
    client.writer.close()
    return first.startswith(NO_NODE)


async def applied(proxy: Envoy, count: int) -> None:
    """Returns when so many live configurations have reached all threads of Envoy."""

    async def are_applied() -> bool:
        return sum((await proxy.stats("tidevoy.live-config.config_reload$")).values()) >= count

    await until(are_applied)


async def test_a_node_gets_sessions_once_it_is_in_the_endpoints_and_in_the_live_configuration(
    tmp_path: Path,
) -> None:
    async with before(tmp_path) as (proxy, endpoints, (a, b)):
        for only in (change_live_config, change_endpoints):
            other = change_endpoints if only is change_live_config else change_live_config
            tell(endpoints, [Host(a.endpoint)])
            await until(lambda: served_by(proxy, a))
            only(endpoints, [Host(b.endpoint)])
            await until(lambda: refused(proxy))
            other(endpoints, [Host(b.endpoint)])
            await until(lambda: served_by(proxy, b))


async def served_by(proxy: Envoy, node: Peer) -> bool:
    """Whether this node serves a new client, which then disconnects."""
    connections = node.connections
    client = await proxy.client()
    first = await client.reader.read(1)
    client.writer.close()
    return bool(first) and node.connections > connections


async def test_a_node_is_closed_to_new_sessions_by_whichever_changes_first(tmp_path: Path) -> None:
    async with before(tmp_path) as (proxy, endpoints, (a, b)):

        async def gets_none() -> bool:
            """The weights are equal, so each node would get some of several clients in a row."""
            connections = a.connections
            for _ in range(4):
                await served_by(proxy, b)
            return a.connections == connections

        for only in (change_live_config, change_endpoints):
            tell(endpoints, [Host(a.endpoint), Host(b.endpoint)])
            await until(lambda: served_by(proxy, a))
            only(endpoints, [Host(a.endpoint, state="draining"), Host(b.endpoint)])
            await until(gets_none)


async def test_while_one_node_replaces_another_there_is_always_one(tmp_path: Path) -> None:
    """The change has reached only the endpoints, or only the live configuration."""
    async with before(tmp_path) as (proxy, endpoints, (a, b)):
        for only, still in ((change_live_config, a), (change_endpoints, b)):
            tell(endpoints, [Host(a.endpoint), Host(b.endpoint, state="draining")])
            await until(lambda: served_by(proxy, a))
            only(endpoints, [Host(a.endpoint, state="draining"), Host(b.endpoint)])

            async def is_used(node: Peer = still) -> bool:
                connections = a.connections + b.connections
                used = await served_by(proxy, node)
                assert a.connections + b.connections == connections + 1
                return used

            await until(is_used)


async def test_idle_sessions_of_all_workers_leave_when_only_the_live_configuration_changes(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with fleet(tmp_path, mariadb, drained=[1], workers=4) as all_:
        for _ in range(12):
            await all_.raw()
        await all_.settled(12, 0)
        first, second = (Host(node.sql_address) for node in all_.nodes)
        tell(all_.endpoints, [first, second])
        left = dataclasses.replace(first, state="draining")
        change_live_config(all_.endpoints, [left, second])
        await all_.settled(0, 12)


async def test_a_worker_is_notified_after_the_sessions_through_which_it_was_notified_have_ended(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    """Changes reach a worker by an event that belongs to one of its sessions."""
    async with fleet(tmp_path, mariadb, drained=[1]) as all_:
        first, second = (Host(node.sql_address) for node in all_.nodes)
        change_endpoints(all_.endpoints, [first, second])
        change_live_config(all_.endpoints, [first])
        clients = [await all_.raw() for _ in range(6)]
        for ended in clients[:5]:
            ended.writer.close()
        await all_.settled(1, 0)
        change_live_config(all_.endpoints, [dataclasses.replace(first, state="draining"), second])
        await all_.settled(0, 1)


async def test_a_change_closes_no_connection_and_drains_no_listener(tmp_path: Path) -> None:
    async with before(tmp_path, workers=2) as (proxy, endpoints, peers):
        clients = [await logged_in(proxy) for _ in range(8)]
        hosts = [Host(peer.endpoint) for peer in peers]
        for number in range(20):
            change_live_config(
                endpoints, [dataclasses.replace(host, version=f"8.5.{number}") for host in hosts]
            )
            await applied(proxy, number + 2)
        stats = await proxy.stats("listener_manager|cx_destroy|no_route|config_fail")
        assert stats["listener_manager.total_listeners_draining"] == 0
        assert stats["listener_manager.listener_modified"] == 0
        for client in clients:
            assert (await client.command(0x0E))[0] == 0


async def test_changed_limits_apply_to_new_sessions(tmp_path: Path) -> None:
    async with before(tmp_path, 1) as (proxy, endpoints, (node,)):
        first = await logged_in(proxy)
        change_live_config(endpoints, [Host(node.endpoint)], {"idle_timeout": 0.3})
        await applied(proxy, 2)
        second = await logged_in(proxy)
        assert await rest(second) == b""
        assert (await first.command(0x0E))[0] == 0


async def test_sessions_do_not_keep_old_live_configurations(tmp_path: Path) -> None:
    """Envoy keeps the text of a network filter's configuration as long as one of its connections lives."""
    async with before(tmp_path, 1) as (proxy, endpoints, (node,)):
        many = [Host(f"127.0.0.2:{port}", state="drained") for port in range(1000, 3000)]

        async def change(number: int) -> None:
            versions = [dataclasses.replace(host, version=f"8.5.{number}") for host in many]
            change_live_config(endpoints, [Host(node.endpoint), *versions])
            await applied(proxy, number + 1)

        kept = []
        for number in range(1, 6):
            await change(number)
            kept.append(await logged_in(proxy))
        # After its first report of a node the module keeps a copy.
        await proxy.reports({("logins", node.endpoint): 5})
        memory = await proxy.memory()
        for number in range(6, 21):
            await change(number)
            kept.append(await logged_in(proxy))
        size = live_config_file(endpoints).stat().st_size
        assert size > 100_000
        # Memory grows by 15 sessions with their buffers, not by 15 texts.
        assert await proxy.memory() - memory < 7 * size
