"""The greeting probe, against well-behaved and misbehaving servers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket

import pytest

from controlplane.model.health import CheckStatus
from controlplane.observe.health.probes import GreetingProbe, LocalResourceError, ProbeResult
from sandbox.mariadb import MariaDb
from tests.support.fake_servers import (
    GREETING_PAYLOAD,
    Handler,
    full_backlog,
    mysql_packet,
    refusing_port,
    reset_by_peer,
    run_fake_server,
    send_parts,
)


async def probe_greeting(endpoint: str, timeout: float = 2.0) -> ProbeResult:
    return await GreetingProbe(endpoint, proxy_protocol=False).run(timeout)


async def test_mariadb_server_passes(mariadb: MariaDb) -> None:
    result = await probe_greeting(f"127.0.0.1:{mariadb.port}")
    assert result.status is CheckStatus.PASS
    assert "MariaDB" in result.version


@pytest.mark.parametrize("part_count", [1, 3, len(mysql_packet(GREETING_PAYLOAD))])
async def test_greeting_passes_in_any_parts(part_count: int) -> None:
    packet = mysql_packet(GREETING_PAYLOAD)
    size = -(-len(packet) // part_count)
    async with run_fake_server(
        send_parts(*[packet[i : i + size] for i in range(0, len(packet), size)])
    ) as peer:
        result = await probe_greeting(peer.endpoint)
        assert result == ProbeResult(
            CheckStatus.PASS, f"the SQL port {peer.endpoint} greets", version="8.0.11-TiDB-v8.5.3"
        )
        assert await peer.connection_ends.get() == "eof"  # the probe sent no data and no reset


async def test_proxy_protocol_sends_a_local_header_first() -> None:
    received = []

    async def greet_after_proxy_header(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readexactly(16))
        writer.write(mysql_packet(GREETING_PAYLOAD))

    async with run_fake_server(greet_after_proxy_header) as peer:
        result = await GreetingProbe(peer.endpoint, proxy_protocol=True).run(2.0)
        assert result.status is CheckStatus.PASS
        assert await peer.connection_ends.get() == "eof"
    assert received == [bytes.fromhex("0d0a0d0a000d0a515549540a20000000")]


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        pytest.param(
            send_parts(then_close=True),
            "closes connections without a greeting (TiDB does so when it has lost PD)",
            id="closed",
        ),
        pytest.param(
            send_parts(b"\x4a\x00", then_close=True), "in the middle of its greeting", id="cut header"
        ),
        pytest.param(
            send_parts(mysql_packet(GREETING_PAYLOAD)[:20], then_close=True),
            "in the middle of its greeting",
            id="cut",
        ),
        pytest.param(reset_by_peer, "resets connections", id="reset"),
        pytest.param(send_parts(b"SSH-2.0-OpenSSH_9.2\r\n"), "greets with 'SSH-2.0-OpenSSH_'", id="SSH"),
        pytest.param(send_parts(b"\xff\xff\xff\x00\x0a"), "which is not the MySQL protocol", id="oversize"),
        pytest.param(send_parts(b"\x00\x00\x00\x00"), "which is not the MySQL protocol", id="empty"),
        pytest.param(
            send_parts(mysql_packet(b"\xff\x10\x04Too many connections")), "error 1040, Too many", id="ERR"
        ),
        pytest.param(
            send_parts(mysql_packet(b"\xff\x10\x04#08004Too many connections"), then_close=True),
            "error 1040, Too many",
            id="ERR with SQLSTATE",
        ),
    ],
)
async def test_anything_else_fails_and_names_the_address(handler: Handler, reason: str) -> None:
    async with run_fake_server(handler) as peer:
        result = await probe_greeting(peer.endpoint)
    assert result.status is CheckStatus.FAIL
    assert reason in result.reason
    assert result.reason.startswith(f"the SQL port {peer.endpoint} ")


async def test_silent_server_fails_at_the_timeout() -> None:
    async with run_fake_server(send_parts()) as peer:
        result = await probe_greeting(peer.endpoint, timeout=0.1)
    assert result.reason == (
        f"the SQL port {peer.endpoint} accepts connections but sends no greeting within 0.1 s"
    )


async def test_unreachable_server_fails_at_the_timeout() -> None:
    with full_backlog() as endpoint:
        result = await probe_greeting(endpoint, 0.1)
    assert result.reason == f"the SQL port {endpoint} does not accept connections within 0.1 s"


async def test_closed_port_fails_as_refused() -> None:
    with refusing_port() as endpoint:
        result = await probe_greeting(endpoint)
    assert result == ProbeResult(CheckStatus.FAIL, f"the SQL port {endpoint} refuses connections")


async def test_ipv6_endpoint_passes() -> None:
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD)), host="::1") as peer:
        assert (await probe_greeting(peer.endpoint)).status is CheckStatus.PASS


async def test_descriptor_exhaustion_does_not_fail_the_node() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    sockets = []
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as peer:
        try:
            with socket.socket() as highest:
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno() + 1, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    sockets.append(socket.socket())
            with pytest.raises(LocalResourceError, match="limit of open files"):
                await probe_greeting(peer.endpoint)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for opened in sockets:
                opened.close()
        assert (await probe_greeting(peer.endpoint)).status is CheckStatus.PASS
