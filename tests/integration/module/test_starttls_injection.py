"""Bytes that arrive before TLS are never treated as if they had come through TLS (STARTTLS injection)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import pytest

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import Capability, MySqlCommand, frame
from tests.integration.module.test_proxy_errors import documented, failures
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
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until_read

GREETING = greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL)
SWITCH = frame(2, b"\xfemysql_clear_password\0")
"""Would make a client send its password in clear text."""
_LOGGED = "it sent data behind its greeting, before TLS"

Way = Callable[[ModuleEnvoy, RawClient, RawClient, bytes], Awaitable[None]]


async def answers(client: RawClient) -> None:
    """The client answers the greeting."""
    await with_timeout(client.read_packet())
    client.writer.write(login_packet())


async def with_the_greeting(_: ModuleEnvoy, node: RawClient, client: RawClient, sent: bytes) -> None:
    """In one segment."""
    node.writer.write(GREETING + sent)
    await answers(client)


async def behind_the_greeting(_: ModuleEnvoy, node: RawClient, client: RawClient, sent: bytes) -> None:
    """Before the client answers."""
    node.writer.write(GREETING)
    await wait_until_read(node.writer)
    node.writer.write(sent)
    await wait_until_read(node.writer)
    await answers(client)


async def unread(proxy: ModuleEnvoy, node: RawClient, client: RawClient, sent: bytes) -> None:
    """It is in the socket's buffer when Envoy reads the client's answer."""
    node.writer.write(GREETING)
    await with_timeout(client.read_packet())
    with stopped(proxy.pid):
        # Both are so short that they are in the sockets before Envoy continues.
        client.writer.write(login_packet())
        node.writer.write(sent)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A child of ours that runs nothing inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        # The signal only begins to stop its threads.
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


WAYS: dict[str, Way] = {
    "with the greeting": with_the_greeting,
    "behind the greeting": behind_the_greeting,
    "unread": unread,
}


@asynccontextmanager
async def fronted(
    directory: Path, mode: str
) -> AsyncIterator[tuple[ModuleEnvoy, FakeServer, asyncio.Queue[RawClient]]]:
    """An Envoy in front of a node that sends only what a test sends; and its connections."""
    connections: asyncio.Queue[RawClient] = asyncio.Queue()

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.put_nowait(RawClient(reader, writer))
        await asyncio.Event().wait()

    async with run_fake_server(node) as peer:
        parts = ModuleConfig(node={"tls": mode, "verify": "none"})
        async with run_envoy(directory, [peer.endpoint], parts) as proxy:
            yield proxy, peer, connections


@pytest.mark.parametrize("mode", ["preferred", "required"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_node_that_speaks_before_tls_gets_no_login(tmp_path: Path, mode: str, way: str) -> None:
    async with fronted(tmp_path, mode) as (proxy, peer, connections):
        cuts = (len(SWITCH), len(SWITCH) - 1, 5, 1)
        for cut in cuts:
            client = await proxy.connect()
            node = await with_timeout(connections.get())
            await WAYS[way](proxy, node, client, SWITCH[:cut])
            _, told = await with_timeout(client.read_packet())
            assert documented("node_tls_failed")[2] in told
            client.writer.close()
            assert await with_timeout(node.reader.read()) == b"", "the node got a login"
        await failures(proxy, "node_tls_failed", len(cuts))
        await proxy.wait_for_metrics({("connect_failures", peer.endpoint, "tls"): len(cuts)})
        assert proxy.log.count(_LOGGED) == len(cuts)


async def test_a_node_that_waits_for_tls_gets_a_request_for_it(tmp_path: Path) -> None:
    """So the test above fails because of the early bytes alone."""
    async with fronted(tmp_path, "preferred") as (proxy, _, connections):
        client = await proxy.connect()
        node = await with_timeout(connections.get())
        await with_the_greeting(proxy, node, client, b"")
        sequence, request = await with_timeout(node.read_packet())
        assert (sequence, len(request)) == (1, 32)


@pytest.mark.parametrize("way", ["in one segment", "behind it", "unread"])
async def test_what_a_client_sends_behind_its_request_for_tls_is_no_login(tmp_path: Path, way: str) -> None:
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
                with stopped(proxy.pid) if way == "unread" else nullcontext():
                    client.writer.write(client_packets.SSL_REQUEST)
                    if way == "behind it":
                        await wait_until_read(client.writer)
                    client.writer.write(login)
            alert = await read_to_end(client)
            assert alert[:3] == b"\x15\x03\x03", alert
            await failures(proxy, "client_gone", 1)
            assert await with_timeout(node.connection_ends.get()) == "IncompleteReadError"
            assert (await with_timeout((await connect_logged_in(proxy)).send_command(MySqlCommand.PING)))[
                0
            ] == 0
