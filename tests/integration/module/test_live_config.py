"""The live configuration: its changes take effect at once, and close no connection.

Envoy learns nodes from two files: the endpoints and the live configuration. `publish_nodes` writes both.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

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
    NO_NODE_ERROR,
    ModuleEnvoy,
    connect_logged_in,
    read_to_end,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.waiting import wait_until


@asynccontextmanager
async def run_with_nodes(
    directory: Path, nodes: int = 2, *, workers: int = 1
) -> AsyncIterator[tuple[ModuleEnvoy, Path, list[FakeServer]]]:
    """Run an Envoy in front of nodes that accept every login. Yield it, its endpoints file and the nodes."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(run_fake_server(serve_ok)) for _ in range(nodes)]
        config = ModuleConfig(endpoints=directory / "endpoints.json")
        hosts = [Host(server.endpoint) for server in servers]
        proxy = await stack.enter_async_context(run_envoy(directory, hosts, config, workers=workers))
        assert config.endpoints is not None
        yield proxy, config.endpoints, servers


async def is_rejected(proxy: ModuleEnvoy) -> bool:
    """Return whether a new client receives the error that no node is available."""
    client = await proxy.connect()
    _, first = await with_timeout(client.read_packet())
    client.writer.close()
    return first.startswith(NO_NODE_ERROR)


async def wait_configs_applied(proxy: ModuleEnvoy, count: int) -> None:
    """Wait until `count` live configurations have reached all threads of Envoy."""

    async def are_applied() -> bool:
        return sum((await proxy.stats("tidevoy.live-config.config_reload$")).values()) >= count

    await wait_until(are_applied)


async def test_node_gets_sessions_once_both_files_name_it(
    tmp_path: Path,
) -> None:
    async with run_with_nodes(tmp_path) as (proxy, endpoints, (a, b)):
        for write_first in (write_live_config, write_endpoints):
            write_second = write_endpoints if write_first is write_live_config else write_live_config
            publish_nodes(endpoints, [Host(a.endpoint)])
            await wait_until(lambda: served_by(proxy, a))
            write_first(endpoints, [Host(b.endpoint)])
            await wait_until(lambda: is_rejected(proxy))
            write_second(endpoints, [Host(b.endpoint)])
            await wait_until(lambda: served_by(proxy, b))


async def served_by(proxy: ModuleEnvoy, node: FakeServer) -> bool:
    """Return whether this node serves a new client, which then disconnects."""
    connections = node.connections
    client = await proxy.connect()
    first = await client.reader.read(1)
    client.writer.close()
    return bool(first) and node.connections > connections


async def test_node_gets_no_new_sessions_once_either_file_closes_it(tmp_path: Path) -> None:
    async with run_with_nodes(tmp_path) as (proxy, endpoints, (a, b)):

        async def gets_no_sessions() -> bool:
            """Return whether `a` gets none of four clients. An active node of equal weight would get some."""
            connections = a.connections
            for _ in range(4):
                await served_by(proxy, b)
            return a.connections == connections

        for write_first in (write_live_config, write_endpoints):
            publish_nodes(endpoints, [Host(a.endpoint), Host(b.endpoint)])
            await wait_until(lambda: served_by(proxy, a))
            write_first(endpoints, [Host(a.endpoint, state="draining"), Host(b.endpoint)])
            await wait_until(gets_no_sessions)


async def test_a_node_is_available_while_the_files_disagree(tmp_path: Path) -> None:
    """One node replaces another, and only one of the two files has changed so far."""
    async with run_with_nodes(tmp_path) as (proxy, endpoints, (a, b)):
        for write_first, expected_node in ((write_live_config, a), (write_endpoints, b)):
            publish_nodes(endpoints, [Host(a.endpoint), Host(b.endpoint, state="draining")])
            await wait_until(lambda: served_by(proxy, a))
            write_first(endpoints, [Host(a.endpoint, state="draining"), Host(b.endpoint)])

            async def is_used(node: FakeServer = expected_node) -> bool:
                connections = a.connections + b.connections
                is_served = await served_by(proxy, node)
                assert a.connections + b.connections == connections + 1
                return is_served

            await wait_until(is_used)


@pytest.mark.needs_migration
async def test_live_config_drain_migrates_sessions_of_all_workers(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1], workers=4) as fleet:
        for _ in range(12):
            await fleet.connect_raw()
        await fleet.wait_session_counts(12, 0)
        first, second = (Host(node.sql_address) for node in fleet.nodes)
        publish_nodes(fleet.endpoints, [first, second])
        draining = dataclasses.replace(first, state="draining")
        write_live_config(fleet.endpoints, [draining, second])
        await fleet.wait_session_counts(0, 12)


@pytest.mark.needs_migration
async def test_worker_applies_change_after_the_session_that_wakes_it_ended(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    """The main thread wakes a worker through one of the worker's sessions, which may end at that moment."""
    async with run_fleet(tmp_path, mariadb, drained=[1]) as fleet:
        first, second = (Host(node.sql_address) for node in fleet.nodes)
        write_endpoints(fleet.endpoints, [first, second])
        write_live_config(fleet.endpoints, [first])
        clients = [await fleet.connect_raw() for _ in range(6)]
        for client in clients[:5]:
            client.writer.close()
        await fleet.wait_session_counts(1, 0)
        write_live_config(fleet.endpoints, [dataclasses.replace(first, state="draining"), second])
        await fleet.wait_session_counts(0, 1)


async def test_change_closes_no_connection_and_drains_no_listener(tmp_path: Path) -> None:
    async with run_with_nodes(tmp_path, workers=2) as (proxy, endpoints, servers):
        clients = [await connect_logged_in(proxy) for _ in range(8)]
        hosts = [Host(server.endpoint) for server in servers]
        for number in range(20):
            write_live_config(
                endpoints, [dataclasses.replace(host, version=f"8.5.{number}") for host in hosts]
            )
            await wait_configs_applied(proxy, number + 2)
        stats = await proxy.stats("listener_manager|cx_destroy|no_route|config_fail")
        assert stats["listener_manager.total_listeners_draining"] == 0
        assert stats["listener_manager.listener_modified"] == 0
        for client in clients:
            assert (await client.send_command(0x0E))[0] == 0


async def test_changed_limits_apply_to_new_sessions(tmp_path: Path) -> None:
    async with run_with_nodes(tmp_path, 1) as (proxy, endpoints, (node,)):
        first = await connect_logged_in(proxy)
        write_live_config(endpoints, [Host(node.endpoint)], {"idle_timeout": 0.3})
        await wait_configs_applied(proxy, 2)
        second = await connect_logged_in(proxy)
        assert await read_to_end(second) == b""
        assert (await first.send_command(0x0E))[0] == 0


async def test_sessions_do_not_keep_old_live_configurations(tmp_path: Path) -> None:
    """Envoy stores a network filter's configuration until the last connection that uses it is closed."""
    async with run_with_nodes(tmp_path, 1) as (proxy, endpoints, (node,)):
        drained_hosts = [Host(f"127.0.0.2:{port}", state="drained") for port in range(1000, 3000)]

        async def change(number: int) -> None:
            versions = [dataclasses.replace(host, version=f"8.5.{number}") for host in drained_hosts]
            write_live_config(endpoints, [Host(node.endpoint), *versions])
            await wait_configs_applied(proxy, number + 1)

        clients = []
        for number in range(1, 6):
            await change(number)
            clients.append(await connect_logged_in(proxy))
        # The module's first report of a node allocates permanent memory, which must not be measured.
        await proxy.wait_for_metrics({("logins", node.endpoint): 5})
        memory = await proxy.allocated_bytes()
        for number in range(6, 21):
            await change(number)
            clients.append(await connect_logged_in(proxy))
        size = live_config_file(endpoints).stat().st_size
        assert size > 100_000
        # Memory grows by 15 sessions with their buffers, not by 15 configurations.
        assert await proxy.allocated_bytes() - memory < 7 * size


async def test_idle_timeouts_that_end_together_close_all_idle_sessions_and_no_other(tmp_path: Path) -> None:
    """Between two turns in which it closes sessions, a worker serves its other connections."""
    async with run_with_nodes(tmp_path, 1, workers=2) as (proxy, endpoints, (node,)):
        write_live_config(endpoints, [Host(node.endpoint)], {"idle_timeout": 2})
        await wait_configs_applied(proxy, 2)
        active = [await connect_logged_in(proxy) for _ in range(4)]
        idle = [await connect_logged_in(proxy) for _ in range(200)]
        ends = asyncio.gather(*(read_to_end(client) for client in idle))
        while not ends.done():
            for client in active:
                assert (await with_timeout(client.send_command(0x0E)))[0] == 0
        assert set(await ends) == {b""}
        for client in active:
            assert (await with_timeout(client.send_command(0x0E)))[0] == 0
