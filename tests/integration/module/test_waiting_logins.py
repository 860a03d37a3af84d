"""While no node is in service, new clients wait for one."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.ports import Ports
from sandbox.tidb_sim.packets import frame
from tests.support.fake_servers import Handler, run_fake_server
from tests.support.module.bootstrap import Host, ModuleConfig, publish_nodes
from tests.support.module.envoy import (
    NO_NODE_ERROR,
    error_packet,
    read_to_end,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.tidb_sim_clients import RawClient, error_code
from tests.support.waiting import assert_nothing_received, wait_until

pytestmark = pytest.mark.timeout(60)

WAIT_SECONDS = 10.0
FULL_ERROR = error_packet(1040, "Too many connections")


def waiting_config(directory: Path, wait: float = WAIT_SECONDS, limit: int = 100) -> ModuleConfig:
    return ModuleConfig(
        live_settings={"wait_for_node": wait, "max_waiting_logins": limit},
        endpoints=directory / "endpoints.json",
        connect_attempts=100_000,
    )


async def log_in(client: RawClient) -> None:
    assert error_code(await with_timeout(client.login())) == 0


async def test_clients_wait_until_a_node_is_in_service(tmp_path: Path) -> None:
    config = waiting_config(tmp_path)
    assert config.endpoints is not None
    async with run_fake_server(serve_ok) as node, run_envoy(tmp_path, [], config) as proxy:
        clients = [await proxy.connect() for _ in range(5)]
        await asyncio.gather(*(assert_nothing_received(client.reader, 0.3) for client in clients))
        leaving = clients.pop(1).writer
        leaving.close()
        await leaving.wait_closed()
        publish_nodes(config.endpoints, [Host(node.endpoint)])
        await asyncio.gather(*map(log_in, clients))
        assert node.connections == len(clients)


async def test_client_gets_an_error_after_the_wait(tmp_path: Path) -> None:
    async with run_envoy(tmp_path, [], waiting_config(tmp_path, wait=0.5)) as proxy:
        started_at = time.monotonic()
        assert await read_to_end(await proxy.connect()) == frame(0, NO_NODE_ERROR)
        assert 0.5 <= time.monotonic() - started_at < 5.0
        await proxy.wait_for_metrics({("login_failures", "", "no_node"): 1})


async def test_number_of_waiting_clients_is_limited(tmp_path: Path) -> None:
    config = waiting_config(tmp_path, limit=2)
    assert config.endpoints is not None
    async with run_fake_server(serve_ok) as node, run_envoy(tmp_path, [], config) as proxy:
        waiting = [await proxy.connect() for _ in range(2)]
        await assert_nothing_received(waiting[1].reader, 0.2)
        assert await read_to_end(await proxy.connect()) == frame(0, NO_NODE_ERROR)
        waiting.pop().writer.transport.abort()  # makes room for another one
        await proxy.wait_for_metrics({("login_failures", "", "client_gone"): 1})
        waiting.append(await proxy.connect())
        await assert_nothing_received(waiting[1].reader, 0.2)
        publish_nodes(config.endpoints, [Host(node.endpoint)])
        await asyncio.gather(*map(log_in, waiting))


async def test_client_does_not_wait_behind_clients_that_have_left(tmp_path: Path) -> None:
    config = waiting_config(tmp_path)
    assert config.endpoints is not None
    async with run_fake_server(serve_ok) as node, run_envoy(tmp_path, [], config) as proxy:
        waiting = [await proxy.connect() for _ in range(3)]
        await assert_nothing_received(waiting[0].reader, 0.2)
        for client in waiting:
            client.writer.transport.abort()
        await proxy.wait_for_metrics({("login_failures", "", "client_gone"): 3})
        async with proxy.wait_applied():
            publish_nodes(config.endpoints, [Host(node.endpoint)], live_settings=config.live_settings)
        await asyncio.wait_for(log_in(await proxy.connect()), WAIT_SECONDS / 2)


async def test_clients_wait_while_all_nodes_refuse_connections(tmp_path: Path) -> None:
    """The nodes stay in service: the control plane has not noticed, or has no healthy node left."""
    config = replace(waiting_config(tmp_path), node={"sentinels": True})
    async with AsyncExitStack() as envoy:
        async with run_fake_server(serve_ok) as node:
            proxy = await envoy.enter_async_context(run_envoy(tmp_path, [node.endpoint], config))
            await wait_until(lambda: node.connections > 0)  # the sentinel
            await log_in(await proxy.connect())
        await wait_until(lambda: "all nodes in service refuse connections" in proxy.log)
        clients = [await proxy.connect() for _ in range(5)]
        await asyncio.gather(*(assert_nothing_received(client.reader, 0.3) for client in clients))
        port = int(node.endpoint.rpartition(":")[2])
        async with run_fake_server(serve_ok, port=port):
            await asyncio.gather(*map(log_in, clients))
        assert "a node in service accepts connections again" in proxy.log


@pytest.mark.parametrize("connect_attempts", [1, 3])
async def test_login_tries_nodes_again_until_one_accepts(
    connect_attempts: int, tmp_path: Path, ports: Ports
) -> None:
    """The login begins before Envoy has noticed that all nodes refuse connections."""
    refusing = [ports.allocate() for _ in range(2)]
    nodes = [f"127.0.0.1:{port}" for port in refusing]
    config = replace(waiting_config(tmp_path), policy={"connect_attempts": connect_attempts})
    async with run_envoy(tmp_path, nodes, config) as proxy:
        client = await proxy.connect()
        await assert_nothing_received(client.reader, 0.3)
        async with run_fake_server(serve_ok, port=refusing[1]):
            await log_in(client)


@pytest.mark.parametrize(("wait", "limit", "shortest"), [(0.5, 1, 0.5), (WAIT_SECONDS, 0, 0.0)])
async def test_login_fails_if_nodes_refuse_for_too_long(
    wait: float, limit: int, shortest: float, tmp_path: Path, ports: Ports
) -> None:
    node = f"127.0.0.1:{ports.allocate()}"
    async with run_envoy(tmp_path, [node], waiting_config(tmp_path, wait, limit)) as proxy:
        for _ in range(2):  # the first login releases its slot
            started_at = time.monotonic()
            assert await read_to_end(await proxy.connect()) == frame(0, NO_NODE_ERROR)
            assert shortest <= time.monotonic() - started_at < WAIT_SECONDS / 2
        assert f"a login found no node; tried: {node}" in proxy.log


async def send_full(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(FULL_ERROR)


async def close_at_once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize(
    ("serve", "expected"), [(send_full, FULL_ERROR), (close_at_once, frame(0, NO_NODE_ERROR))]
)
async def test_login_does_not_wait_for_a_node_that_answers(
    serve: Handler, expected: bytes, tmp_path: Path
) -> None:
    async with (
        run_fake_server(serve) as node,
        run_envoy(tmp_path, [node.endpoint], waiting_config(tmp_path)) as proxy,
    ):
        async with asyncio.timeout(WAIT_SECONDS / 2):
            assert await read_to_end(await proxy.connect()) == expected
