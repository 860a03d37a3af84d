"""The live configuration: changes take effect at once, and close no connection."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from sandbox.mariadb import MariaDb
from tests.support.fake_servers import FakeServer, run_fake_server
from tests.support.migration.fleet import run_fleet
from tests.support.module.bootstrap import (
    Host,
    ModuleConfig,
    live_config_file,
    publish_nodes,
    write_endpoints,
    write_live_config,
)
from tests.support.module.envoy import (
    ModuleEnvoy,
    connect_logged_in,
    read_to_end,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.waiting import wait_until

NO_NODE = b"\xff\x51\x04"  # error 1105


@asynccontextmanager
async def before(
    directory: Path, nodes: int = 2, *, workers: int = 1
) -> AsyncIterator[tuple[ModuleEnvoy, Path, list[FakeServer]]]:
    """An Envoy in front of nodes that admit everybody, the file of its endpoints, and the nodes."""
    async with AsyncExitStack() as running:
        peers = [await running.enter_async_context(run_fake_server(serve_ok)) for _ in range(nodes)]
        parts = ModuleConfig(endpoints=directory / "endpoints.json")
        hosts = [Host(peer.endpoint) for peer in peers]
        proxy = await running.enter_async_context(run_envoy(directory, hosts, parts, workers=workers))
        assert parts.endpoints is not None
        yield proxy, parts.endpoints, peers


async def refused(proxy: ModuleEnvoy) -> bool:
    """Whether a new client gets the error that there is no node for it."""
    client = await proxy.connect()
    _, first = await with_timeout(client.read_packet())
    client.writer.close()
    return first.startswith(NO_NODE)


async def applied(proxy: ModuleEnvoy, count: int) -> None:
    """Returns when so many live configurations have reached all threads of Envoy."""

    async def are_applied() -> bool:
        return sum((await proxy.stats("tidevoy.live-config.config_reload$")).values()) >= count

    await wait_until(are_applied)


async def test_a_node_gets_sessions_once_it_is_in_the_endpoints_and_in_the_live_configuration(
    tmp_path: Path,
) -> None:
    async with before(tmp_path) as (proxy, endpoints, (a, b)):
        for only in (write_live_config, write_endpoints):
            other = write_endpoints if only is write_live_config else write_live_config
            publish_nodes(endpoints, [Host(a.endpoint)])
            await wait_until(lambda: served_by(proxy, a))
            only(endpoints, [Host(b.endpoint)])
            await wait_until(lambda: refused(proxy))
            other(endpoints, [Host(b.endpoint)])
            await wait_until(lambda: served_by(proxy, b))


async def served_by(proxy: ModuleEnvoy, node: FakeServer) -> bool:
    """Whether this node serves a new client, which then disconnects."""
    connections = node.connections
    client = await proxy.connect()
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

        for only in (write_live_config, write_endpoints):
            publish_nodes(endpoints, [Host(a.endpoint), Host(b.endpoint)])
            await wait_until(lambda: served_by(proxy, a))
            only(endpoints, [Host(a.endpoint, state="draining"), Host(b.endpoint)])
            await wait_until(gets_none)


async def test_while_one_node_replaces_another_there_is_always_one(tmp_path: Path) -> None:
    """The change has reached only the endpoints, or only the live configuration."""
    async with before(tmp_path) as (proxy, endpoints, (a, b)):
        for only, still in ((write_live_config, a), (write_endpoints, b)):
            publish_nodes(endpoints, [Host(a.endpoint), Host(b.endpoint, state="draining")])
            await wait_until(lambda: served_by(proxy, a))
            only(endpoints, [Host(a.endpoint, state="draining"), Host(b.endpoint)])

            async def is_used(node: FakeServer = still) -> bool:
                connections = a.connections + b.connections
                used = await served_by(proxy, node)
                assert a.connections + b.connections == connections + 1
                return used

            await wait_until(is_used)


async def test_idle_sessions_of_all_workers_leave_when_only_the_live_configuration_changes(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1], workers=4) as all_:
        for _ in range(12):
            await all_.connect_raw()
        await all_.wait_session_counts(12, 0)
        first, second = (Host(node.sql_address) for node in all_.nodes)
        publish_nodes(all_.endpoints, [first, second])
        left = dataclasses.replace(first, state="draining")
        write_live_config(all_.endpoints, [left, second])
        await all_.wait_session_counts(0, 12)


async def test_a_worker_is_notified_after_the_sessions_through_which_it_was_notified_have_ended(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    """Changes reach a worker by an event that belongs to one of its sessions."""
    async with run_fleet(tmp_path, mariadb, drained=[1]) as all_:
        first, second = (Host(node.sql_address) for node in all_.nodes)
        write_endpoints(all_.endpoints, [first, second])
        write_live_config(all_.endpoints, [first])
        clients = [await all_.connect_raw() for _ in range(6)]
        for ended in clients[:5]:
            ended.writer.close()
        await all_.wait_session_counts(1, 0)
        write_live_config(all_.endpoints, [dataclasses.replace(first, state="draining"), second])
        await all_.wait_session_counts(0, 1)


async def test_a_change_closes_no_connection_and_drains_no_listener(tmp_path: Path) -> None:
    async with before(tmp_path, workers=2) as (proxy, endpoints, peers):
        clients = [await connect_logged_in(proxy) for _ in range(8)]
        hosts = [Host(peer.endpoint) for peer in peers]
        for number in range(20):
            write_live_config(
                endpoints, [dataclasses.replace(host, version=f"8.5.{number}") for host in hosts]
            )
            await applied(proxy, number + 2)
        stats = await proxy.stats("listener_manager|cx_destroy|no_route|config_fail")
        assert stats["listener_manager.total_listeners_draining"] == 0
        assert stats["listener_manager.listener_modified"] == 0
        for client in clients:
            assert (await client.send_command(0x0E))[0] == 0


async def test_changed_limits_apply_to_new_sessions(tmp_path: Path) -> None:
    async with before(tmp_path, 1) as (proxy, endpoints, (node,)):
        first = await connect_logged_in(proxy)
        write_live_config(endpoints, [Host(node.endpoint)], {"idle_timeout": 0.3})
        await applied(proxy, 2)
        second = await connect_logged_in(proxy)
        assert await read_to_end(second) == b""
        assert (await first.send_command(0x0E))[0] == 0


async def test_sessions_do_not_keep_old_live_configurations(tmp_path: Path) -> None:
    """Envoy keeps the text of a network filter's configuration as long as one of its connections lives."""
    async with before(tmp_path, 1) as (proxy, endpoints, (node,)):
        many = [Host(f"127.0.0.2:{port}", state="drained") for port in range(1000, 3000)]

        async def change(number: int) -> None:
            versions = [dataclasses.replace(host, version=f"8.5.{number}") for host in many]
            write_live_config(endpoints, [Host(node.endpoint), *versions])
            await applied(proxy, number + 1)

        kept = []
        for number in range(1, 6):
            await change(number)
            kept.append(await connect_logged_in(proxy))
        # After its first report of a node the module keeps a copy.
        await proxy.wait_for_metrics({("logins", node.endpoint): 5})
        memory = await proxy.allocated_bytes()
        for number in range(6, 21):
            await change(number)
            kept.append(await connect_logged_in(proxy))
        size = live_config_file(endpoints).stat().st_size
        assert size > 100_000
        # Memory grows by 15 sessions with their buffers, not by 15 texts.
        assert await proxy.allocated_bytes() - memory < 7 * size
