"""Each client is paired with the node connection opened for it; the PROXY header names the client."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import Capability
from tests.support.fake_servers import refusing_port, run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    ModuleEnvoy,
    accept_login,
    greeting_packet,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.tidb_sim_clients import RawClient

CLIENTS = 200
V2_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"

Header = tuple[str, int, str, int]


async def read_v2(reader: asyncio.StreamReader) -> Header:
    """Return the addresses of client and listener in a version 2 header (proxy-protocol.txt, 2.2)."""
    start = await reader.readexactly(16)
    assert start[:13] == V2_SIGNATURE + b"\x21"
    layout = {0x11: "4s4sHH", 0x21: "16s16sHH"}[start[13]]
    body = await reader.readexactly(int.from_bytes(start[14:], "big"))
    source, target, source_port, target_port = struct.unpack(f">{layout}", body)
    return _text(source), source_port, _text(target), target_port


def _text(packed: bytes) -> str:
    if len(packed) == 4:
        return ".".join(map(str, packed))
    return ":".join(packed[at : at + 2].hex() for at in range(0, 16, 2))


async def read_v1(reader: asyncio.StreamReader) -> Header:
    """Return the addresses of client and listener in a version 1 header (proxy-protocol.txt, 2.1)."""
    line = (await reader.readuntil(b"\r\n")).decode()
    keyword, family, source, target, source_port, target_port = line.split()
    assert (keyword, family) == ("PROXY", "TCP6" if ":" in source else "TCP4")
    return source, int(source_port), target, int(target_port)


def server_version(greeting: bytes) -> str:
    return greeting[1 : greeting.index(b"\0")].decode()


def local_port(client: RawClient) -> int:
    port: int = client.writer.get_extra_info("sockname")[1]
    return port


@pytest.mark.parametrize("workers", [1, 2])
async def test_greetings_in_any_order_reach_their_clients(tmp_path: Path, workers: int) -> None:
    waiting: list[tuple[int, asyncio.StreamWriter]] = []

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting.append(((await read_v2(reader))[1], writer))
        if len(waiting) == CLIENTS:
            for port, other in reversed(waiting):
                other.write(greeting_packet(str(port)))

    async with run_fake_server(node) as server:
        config = ModuleConfig(node={"proxy_protocol": "v2"}, connect_timeout=60.0)
        async with run_envoy(tmp_path, [server.endpoint], config, workers=workers) as proxy:
            clients = await asyncio.gather(*(proxy.connect() for _ in range(CLIENTS)))
            greetings = await with_timeout(asyncio.gather(*(client.read_packet() for client in clients)))
            ports = [local_port(client) for client in clients]
            assert [server_version(payload) for _, payload in greetings] == [str(port) for port in ports]
            assert len(set(ports)) == CLIENTS == server.connections


async def test_closed_clients_connection_is_not_reused(tmp_path: Path) -> None:
    """Without the module, Envoy would give the node connection of a closed client to the next client."""
    waiting: asyncio.Queue[tuple[int, asyncio.StreamWriter]] = asyncio.Queue()

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting.put_nowait(((await read_v2(reader))[1], writer))

    async with (
        run_fake_server(node) as server,
        run_envoy(tmp_path, [server.endpoint], ModuleConfig(node={"proxy_protocol": "v2"})) as proxy,
    ):
        closed = await proxy.connect()
        _, abandoned = await with_timeout(waiting.get())
        closed.writer.transport.abort()
        client = await proxy.connect()
        port, current = await with_timeout(waiting.get())
        abandoned.write(greeting_packet("abandoned"))
        current.write(greeting_packet(str(port)))
        _, greeting = await with_timeout(client.read_packet())
        assert server_version(greeting) == str(port) == str(local_port(client))


async def test_mixed_up_connections_are_rejected(tmp_path: Path) -> None:
    """The cluster is misconfigured: it lacks `connection_pool_per_downstream_connection`."""
    waiting: list[asyncio.StreamWriter] = []

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_v2(reader)
        waiting.append(writer)
        if len(waiting) == 20:  # an even number, so the reverse order changes every position
            for other in reversed(waiting):
                other.write(greeting_packet("another client's"))

    async with run_fake_server(node) as server:
        config = ModuleConfig(node={"proxy_protocol": "v2"}, connect_timeout=60.0, per_connection_pools=False)
        async with run_envoy(tmp_path, [server.endpoint], config) as proxy:
            clients = await asyncio.gather(*(proxy.connect() for _ in range(20)))
            packets = await with_timeout(asyncio.gather(*(client.read_packet() for client in clients)))
            assert {payload[:3] for _, payload in packets} == {b"\xff\x51\x04"}  # error 1105
            assert "connection_pool_per_downstream_connection" in proxy.process.output()


async def connect_and_read_header(
    proxy: ModuleEnvoy, headers: asyncio.Queue[Header]
) -> tuple[Header, tuple[str, int], tuple[str, int]]:
    client = await proxy.connect()
    await with_timeout(client.read_packet())
    header = await with_timeout(headers.get())
    return header, client.writer.get_extra_info("sockname")[:2], client.writer.get_extra_info("peername")[:2]


@pytest.mark.parametrize(
    ("protocol", "read"), [("v1", read_v1), ("v2", read_v2)], ids=["version 1", "version 2"]
)
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_proxy_header_names_client_and_listener(
    tmp_path: Path, address: str, protocol: str, read: Callable[[asyncio.StreamReader], Awaitable[Header]]
) -> None:
    headers: asyncio.Queue[Header] = asyncio.Queue()

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers.put_nowait(await read(reader))
        await accept_login(reader, writer)

    async with run_fake_server(node, host=address) as server:
        config = ModuleConfig(node={"proxy_protocol": protocol}, listen=address)
        async with run_envoy(tmp_path, [server.endpoint], config) as proxy:
            header, client_address, listener_address = await connect_and_read_header(proxy, headers)
            loopback = (
                "0000:0000:0000:0000:0000:0000:0000:0001" if (address, protocol) == ("::1", "v2") else address
            )
            assert header == (loopback, client_address[1], loopback, listener_address[1])


async def test_node_that_greets_first_receives_the_proxy_header(tmp_path: Path) -> None:
    """TiDB reads the header lazily, after its greeting."""

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        await read_v2(reader)
        assert (await reader.readexactly(4))[3] == 1

    async with (
        run_fake_server(node) as server,
        run_envoy(tmp_path, [server.endpoint], ModuleConfig(node={"proxy_protocol": "v2"})) as proxy,
    ):
        client = await proxy.connect()
        await with_timeout(client.read_packet())
        client.writer.write(b"\x01\0\0\x01\0")
        assert (await read_to_end(client))[4:7] == b"\xff\x13\x04"  # 1043, because it is not a login


async def test_nothing_precedes_the_login_without_proxy_protocol(tmp_path: Path) -> None:
    first: asyncio.Queue[bytes] = asyncio.Queue()

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        first.put_nowait(await reader.readexactly(8))

    async with run_fake_server(node) as server, run_envoy(tmp_path, [server.endpoint]) as proxy:
        client = await proxy.connect()
        login = asyncio.create_task(client.login())
        header = await with_timeout(first.get())
        assert header[3] == 1
        assert (
            Capability.PROTOCOL_41 in Capability(int.from_bytes(header[4:], "little")) & OFFERED_CAPABILITIES
        )
        login.cancel()


async def test_proxy_header_is_correct_after_a_failover(tmp_path: Path) -> None:
    headers: asyncio.Queue[Header] = asyncio.Queue()

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers.put_nowait(await read_v2(reader))
        await accept_login(reader, writer)

    with refusing_port() as refusing_endpoint:
        async with run_fake_server(node) as server:
            config = ModuleConfig(node={"proxy_protocol": "v2"})
            async with run_envoy(tmp_path, [refusing_endpoint, server.endpoint], config) as proxy:
                for _ in range(4):
                    header, client_address, _ = await connect_and_read_header(proxy, headers)
                    assert header[1] == client_address[1]
