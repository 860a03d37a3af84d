"""Bytes that arrive before TLS are never treated as if they had come through TLS (STARTTLS injection)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import pytest

from sandbox.tidb_sim.greeting import OFFERED
from sandbox.tidb_sim.packets import Capability, Command, frame
from tests.integration.module.test_proxy_errors import documented, failures
from tests.support.clients.server import Certificates
from tests.support.fake_servers import Peer, listening
from tests.support.load import client_packets
from tests.support.module.bootstrap import Parts
from tests.support.module.envoy import Envoy, envoy, greets, logged_in, response, rest, serve, within
from tests.support.tidb_sim_clients import Raw
from tests.support.waiting import taken

GREETING = greets(offered=OFFERED | Capability.SSL)
SWITCH = frame(2, b"\xfemysql_clear_password\0")
"""Would make a client send its password in clear text."""
_LOGGED = "it sent data behind its greeting, before TLS"

Way = Callable[[Envoy, Raw, Raw, bytes], Awaitable[None]]


async def answers(client: Raw) -> None:
    """The client answers the greeting."""
    await within(client.packet())
    client.writer.write(response())


async def with_the_greeting(_: Envoy, node: Raw, client: Raw, sent: bytes) -> None:
    """In one segment."""
    node.writer.write(GREETING + sent)
    await answers(client)


async def behind_the_greeting(_: Envoy, node: Raw, client: Raw, sent: bytes) -> None:
    """Before the client answers."""
    node.writer.write(GREETING)
    await taken(node.writer)
    node.writer.write(sent)
    await taken(node.writer)
    await answers(client)


async def unread(proxy: Envoy, node: Raw, client: Raw, sent: bytes) -> None:
    """It is in the socket's buffer when Envoy reads the client's answer."""
    node.writer.write(GREETING)
    await within(client.packet())
    with stopped(proxy.pid):
        # Both are so short that they are in the sockets before Envoy continues.
        client.writer.write(response())
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
async def fronted(directory: Path, mode: str) -> AsyncIterator[tuple[Envoy, Peer, asyncio.Queue[Raw]]]:
    """An Envoy in front of a node that sends only what a test sends; and its connections."""
    connections: asyncio.Queue[Raw] = asyncio.Queue()

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.put_nowait(Raw(reader, writer))
        await asyncio.Event().wait()

    async with listening(node) as peer:
        parts = Parts(node={"tls": mode, "verify": "none"})
        async with envoy(directory, [peer.endpoint], parts) as proxy:
            yield proxy, peer, connections


@pytest.mark.parametrize("mode", ["preferred", "required"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_node_that_speaks_before_tls_gets_no_login(tmp_path: Path, mode: str, way: str) -> None:
    async with fronted(tmp_path, mode) as (proxy, peer, connections):
        cuts = (len(SWITCH), len(SWITCH) - 1, 5, 1)
        for cut in cuts:
            client = await proxy.client()
            node = await within(connections.get())
            await WAYS[way](proxy, node, client, SWITCH[:cut])
            _, told = await within(client.packet())
            assert documented("node_tls_failed")[2] in told
            client.writer.close()
            assert await within(node.reader.read()) == b"", "the node got a login"
        await failures(proxy, "node_tls_failed", len(cuts))
        await proxy.reports({("connect_failures", peer.endpoint, "tls"): len(cuts)})
        assert proxy.log.count(_LOGGED) == len(cuts)


async def test_a_node_that_waits_for_tls_gets_a_request_for_it(tmp_path: Path) -> None:
    """So the test above fails because of the early bytes alone."""
    async with fronted(tmp_path, "preferred") as (proxy, _, connections):
        client = await proxy.client()
        node = await within(connections.get())
        await with_the_greeting(proxy, node, client, b"")
        sequence, request = await within(node.packet())
        assert (sequence, len(request)) == (1, 32)


@pytest.mark.parametrize("way", ["in one segment", "behind it", "unread"])
async def test_what_a_client_sends_behind_its_request_for_tls_is_no_login(tmp_path: Path, way: str) -> None:
    certificates = Certificates.make(tmp_path / "certificates")
    async with listening(serve) as node:
        tls = {"tls": "optional", "cert": str(certificates.cert), "key": str(certificates.key)}
        async with envoy(tmp_path, [node.endpoint], Parts(client=tls)) as proxy:
            client = await proxy.client()
            await within(client.packet())
            login = client_packets.login("root", tls=True)
            if way == "in one segment":
                client.writer.write(client_packets.SSL_REQUEST + login)
            else:
                with stopped(proxy.pid) if way == "unread" else nullcontext():
                    client.writer.write(client_packets.SSL_REQUEST)
                    if way == "behind it":
                        await taken(client.writer)
                    client.writer.write(login)
            alert = await rest(client)
            assert alert[:3] == b"\x15\x03\x03", alert
            await failures(proxy, "client_gone", 1)
            assert await within(node.ended.get()) == "IncompleteReadError"
            assert (await within((await logged_in(proxy)).command(Command.PING)))[0] == 0
