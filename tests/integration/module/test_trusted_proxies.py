"""The module requires a PROXY header from trusted proxies, and accepts none from other clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    ModuleEnvoy,
    accept_login,
    read_to_end,
    run_envoy,
    with_timeout,
)

PROXY, OTHER_CLIENT = "127.0.0.5", "127.0.0.6"
V1_HEADER = b"PROXY TCP4 192.0.2.7 192.0.2.8 4711 6000\r\n"
V2_HEADER = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x07\xc0\0\x02\x08\x12\x67\x17\x70"


@asynccontextmanager
async def run_proxied_envoy(directory: Path) -> AsyncIterator[tuple[ModuleEnvoy, asyncio.Queue[bytes], str]]:
    """Yield an Envoy that trusts `PROXY`, the headers that its node receives, and the node's endpoint."""
    headers: asyncio.Queue[bytes] = asyncio.Queue()

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers.put_nowait(await reader.readline())
        await accept_login(reader, writer)

    config = ModuleConfig(trusted_proxies=[f"{PROXY}/32"], node={"proxy_protocol": "v1"})
    async with (
        run_fake_server(node) as server,
        run_envoy(directory, [server.endpoint], config) as envoy,
    ):
        yield envoy, headers, server.endpoint


@pytest.mark.parametrize("header", [V1_HEADER, V2_HEADER], ids=["v1", "v2"])
async def test_header_of_a_trusted_proxy_names_the_client(tmp_path: Path, header: bytes) -> None:
    async with run_proxied_envoy(tmp_path) as (envoy, headers, _):
        client = await envoy.connect(PROXY)
        for byte in header:  # TCP may deliver a header in any segments
            client.writer.write(bytes([byte]))
            await client.writer.drain()
        assert (await with_timeout(client.login()))[0] == 0
        assert await with_timeout(headers.get()) == V1_HEADER


async def test_other_clients_connect_without_a_header(tmp_path: Path) -> None:
    async with run_proxied_envoy(tmp_path) as (envoy, headers, _):
        client = await envoy.connect(OTHER_CLIENT)
        assert (await with_timeout(client.login()))[0] == 0
        assert (await with_timeout(headers.get())).split()[2] == OTHER_CLIENT.encode()


@pytest.mark.parametrize("header", [V1_HEADER, V2_HEADER], ids=["v1", "v2"])
async def test_header_of_another_client_is_a_protocol_error(tmp_path: Path, header: bytes) -> None:
    async with run_proxied_envoy(tmp_path) as (envoy, _, node):
        client = await envoy.connect(OTHER_CLIENT)
        await with_timeout(client.read_packet())
        client.writer.write(header)
        assert (await read_to_end(client))[4:7] == b"\xff\x13\x04"  # 1043: no MySQL packet
        await envoy.wait_for_metrics({("login_failures", node, "bad_packet"): 1})


async def test_trusted_proxy_must_send_a_header(tmp_path: Path) -> None:
    async with run_proxied_envoy(tmp_path) as (envoy, headers, _):
        client = await envoy.connect(PROXY)
        client.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            await read_to_end(client)
        assert headers.empty()
