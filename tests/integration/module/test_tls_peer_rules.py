"""Revoked certificates, and the oldest version of TLS, on both sides of the module."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import Capability, frame
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    OK_PAYLOAD,
    ModuleEnvoy,
    greeting_packet,
    login_packet,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.module.revocation import RevokingCa
from tests.support.module.tls_node import TlsNode, server_context
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient
from tests.support.waiting import wait_until

NODE_TLS_ERROR = b"\xff\x51\x04#HY000Tidevoy: the TLS handshake with the TiDB server failed"


@pytest.fixture
def ca(tmp_path: Path) -> RevokingCa:
    return RevokingCa(tmp_path / "ca")


async def log_in_with_tls(proxy: ModuleEnvoy, context: ssl.SSLContext) -> bytes:
    """Log in over TLS. Return the response. Raises ssl.SSLError or ConnectionError if Envoy rejects TLS."""
    client = await proxy.connect()
    await with_timeout(client.read_packet())
    capabilities = CAPABILITIES | Capability.SSL
    client.writer.write(frame(1, login_packet(capabilities)[4:36]))
    await with_timeout(client.writer.start_tls(context, server_hostname="localhost"))
    # With TLS 1.3, the client learns only now whether its certificate is accepted.
    client.writer.write(login_packet(capabilities, sequence=2))
    try:
        return (await with_timeout(client.read_packet()))[1]
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError from error


def client_context(ca: RevokingCa, pair: PemFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca.cert))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


async def test_revoked_client_certificate_is_rejected(tmp_path: Path, ca: RevokingCa) -> None:
    server, good, bad = ca.issue("server"), ca.issue("good"), ca.issue("bad")
    client = {"tls": "required", "cert": str(server.cert), "key": str(server.key)}
    client |= {"client_ca": str(ca.cert), "crl": str(ca.crl)}
    async with (
        run_fake_server(serve_ok) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(client=client)) as proxy,
    ):
        for pair in (good, bad):
            assert await log_in_with_tls(proxy, client_context(ca, pair)) == OK_PAYLOAD
        ca.revoke(bad)

        async def is_reloaded() -> bool:
            return "new clients get the new certificates" in proxy.log

        await wait_until(is_reloaded)
        assert await log_in_with_tls(proxy, client_context(ca, good)) == OK_PAYLOAD
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await log_in_with_tls(proxy, client_context(ca, bad))


@pytest.mark.parametrize("min_version", ["TLSv1.2", "TLSv1.3"])
async def test_clients_need_the_minimum_tls_version(tmp_path: Path, ca: RevokingCa, min_version: str) -> None:
    server = ca.issue("server")
    client = {"tls": "required", "cert": str(server.cert), "key": str(server.key), "min_version": min_version}
    old = client_context(ca)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with (
        run_fake_server(serve_ok) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(client=client)) as proxy,
    ):
        assert await log_in_with_tls(proxy, client_context(ca)) == OK_PAYLOAD
        if min_version == "TLSv1.2":
            assert await log_in_with_tls(proxy, old) == OK_PAYLOAD
        else:
            with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
                await log_in_with_tls(proxy, old)


async def log_in_to_tls_node(directory: Path, context: ssl.SSLContext, settings: dict[str, str]) -> bytes:
    """Log in at a node with TLS. Return the payload of the response."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL))
        with contextlib.suppress(asyncio.IncompleteReadError, ssl.SSLError):
            await RawClient(reader, writer).read_packet()
            node = TlsNode(reader, writer, context)
            await node.handshake()
            sequence, login = await node.read_packet()
            received.append(login)
            node.write(frame(sequence + 1, OK_PAYLOAD))
            await node.read_packet()
        writer.close()

    config = ModuleConfig(node={"tls": "required", **settings})
    async with run_fake_server(serve) as peer, run_envoy(directory, [peer.endpoint], config) as proxy:
        client = await proxy.connect()
        response = await with_timeout(client.login())
        client.writer.transport.abort()
        await with_timeout(peer.connection_ends.get())
        if response != OK_PAYLOAD:
            await proxy.wait_for_metrics({("connect_failures", peer.endpoint, "tls"): 1})
    assert bool(received) == (response == OK_PAYLOAD)
    return response


@pytest.mark.parametrize("verify", ["full", "ca"])
@pytest.mark.parametrize("is_revoked", [False, True], ids=["not revoked", "revoked"])
async def test_node_with_a_revoked_certificate_gets_no_login(
    tmp_path: Path, ca: RevokingCa, verify: str, is_revoked: bool
) -> None:
    pair, other = ca.issue("node"), ca.issue("other")
    ca.revoke(pair if is_revoked else other)
    settings = {"ca": str(ca.cert), "crl": str(ca.crl), "verify": verify}
    response = await log_in_to_tls_node(tmp_path, server_context(pair), settings)
    assert response == OK_PAYLOAD if not is_revoked else response.startswith(NODE_TLS_ERROR)


@pytest.mark.parametrize("min_version", ["TLSv1.2", "TLSv1.3"])
async def test_nodes_need_the_minimum_tls_version(tmp_path: Path, ca: RevokingCa, min_version: str) -> None:
    context = server_context(ca.issue("node"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    settings = {"ca": str(ca.cert), "verify": "full", "min_version": min_version}
    response = await log_in_to_tls_node(tmp_path, context, settings)
    assert response == OK_PAYLOAD if min_version == "TLSv1.2" else response.startswith(NODE_TLS_ERROR)
