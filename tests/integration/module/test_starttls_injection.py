"""Envoy never treats bytes that arrive before TLS as a part of the TLS session (STARTTLS injection)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import Capability, MySqlCommand, frame
from tests.integration.module.test_proxy_errors import documented_error, wait_login_failures
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import FakeServer, run_fake_server
from tests.support.load import client_packets
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    ModuleEnvoy,
    connect_logged_in,
    greeting_packet,
    login_packet,
    read_to_end,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.suspension import suspended
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until_read

GREETING = greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL)
AUTH_SWITCH = frame(2, b"\xfemysql_clear_password\0")
"""An AuthSwitchRequest that would make a client send its password in clear text."""
_LOG_TEXT = "it sent data behind its greeting, before TLS"

SendEarly = Callable[[ModuleEnvoy, RawClient, RawClient, bytes], Awaitable[None]]


async def answer_greeting(client: RawClient) -> None:
    """Read the greeting at the client, and send its login."""
    await with_timeout(client.read_packet())
    client.writer.write(login_packet())


async def send_with_greeting(_: ModuleEnvoy, node: RawClient, client: RawClient, early_bytes: bytes) -> None:
    """Send the bytes in one segment with the greeting."""
    node.writer.write(GREETING + early_bytes)
    await answer_greeting(client)


async def send_after_greeting(_: ModuleEnvoy, node: RawClient, client: RawClient, early_bytes: bytes) -> None:
    """Send the bytes after the greeting, before the client answers."""
    node.writer.write(GREETING)
    await wait_until_read(node.writer)
    node.writer.write(early_bytes)
    await wait_until_read(node.writer)
    await answer_greeting(client)


async def send_unread(proxy: ModuleEnvoy, node: RawClient, client: RawClient, early_bytes: bytes) -> None:
    """Send the bytes so that they are in the socket buffer, unread, when Envoy reads the client's login."""
    node.writer.write(GREETING)
    await with_timeout(client.read_packet())
    async with suspended(proxy.pid):
        # Both writes fit into socket buffers while Envoy is suspended.
        client.writer.write(login_packet())
        node.writer.write(early_bytes)


WAYS_TO_SEND: dict[str, SendEarly] = {
    "with the greeting": send_with_greeting,
    "after the greeting": send_after_greeting,
    "unread": send_unread,
}


@asynccontextmanager
async def run_with_raw_node(
    directory: Path, mode: str
) -> AsyncIterator[tuple[ModuleEnvoy, FakeServer, asyncio.Queue[RawClient]]]:
    """Run an Envoy in front of a node that sends nothing by itself. Also yield the node's connections."""
    connections: asyncio.Queue[RawClient] = asyncio.Queue()

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.put_nowait(RawClient(reader, writer))
        await asyncio.Event().wait()

    async with run_fake_server(node) as server:
        config = ModuleConfig(node={"tls": mode, "verify": "none"})
        async with run_envoy(directory, [server.endpoint], config) as proxy:
            yield proxy, server, connections


@pytest.mark.parametrize("mode", ["preferred", "required"])
@pytest.mark.parametrize("way", WAYS_TO_SEND)
async def test_node_that_sends_bytes_before_tls_receives_no_login(
    tmp_path: Path, mode: str, way: str
) -> None:
    async with run_with_raw_node(tmp_path, mode) as (proxy, server, connections):
        lengths = (len(AUTH_SWITCH), len(AUTH_SWITCH) - 1, 5, 1)
        for length in lengths:
            client = await proxy.connect()
            node = await with_timeout(connections.get())
            await WAYS_TO_SEND[way](proxy, node, client, AUTH_SWITCH[:length])
            _, error = await with_timeout(client.read_packet())
            assert documented_error("node_tls_failed")[2] in error
            client.writer.close()
            assert await with_timeout(node.reader.read()) == b"", "the node received a login"
        await wait_login_failures(proxy, "node_tls_failed", len(lengths))
        await proxy.wait_for_metrics({("connect_failures", server.endpoint, "tls"): len(lengths)})
        assert proxy.log.count(_LOG_TEXT) == len(lengths)


async def test_node_that_waits_receives_an_ssl_request(tmp_path: Path) -> None:
    """Without early bytes Envoy starts TLS, so only the early bytes cause the previous test's failure."""
    async with run_with_raw_node(tmp_path, "preferred") as (proxy, _, connections):
        client = await proxy.connect()
        node = await with_timeout(connections.get())
        await send_with_greeting(proxy, node, client, b"")
        sequence, request = await with_timeout(node.read_packet())
        assert (sequence, len(request)) == (1, 32)


@pytest.mark.parametrize("way", ["in one segment", "in the next segment", "unread"])
async def test_plain_login_after_an_ssl_request_is_rejected(tmp_path: Path, way: str) -> None:
    certificates = PemFiles.create(tmp_path / "certificates")
    async with run_fake_server(serve_ok) as node:
        tls = {"tls": "optional", "cert": str(certificates.cert), "key": str(certificates.key)}
        async with run_envoy(tmp_path, [node.endpoint], ModuleConfig(client=tls)) as proxy:
            client = await proxy.connect()
            await with_timeout(client.read_packet())
            login = client_packets.login("root", tls=True)
            if way == "in one segment":
                client.writer.write(client_packets.SSL_REQUEST + login)
            else:
                async with suspended(proxy.pid) if way == "unread" else nullcontext():
                    client.writer.write(client_packets.SSL_REQUEST)
                    if way == "in the next segment":
                        await wait_until_read(client.writer)
                    client.writer.write(login)
            alert = await read_to_end(client)
            assert alert[:3] == b"\x15\x03\x03", alert
            await wait_login_failures(proxy, "client_gone", 1)
            await proxy.wait_for_metrics({("login_failures", node.endpoint, "client_gone"): 1})
            assert await with_timeout(node.connection_ends.get()) == "IncompleteReadError"
            assert (await with_timeout((await connect_logged_in(proxy)).send_command(MySqlCommand.PING)))[
                0
            ] == 0
