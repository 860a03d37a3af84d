"""The probe of the SQL port, against servers that behave and servers that do not."""

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


async def greeting(endpoint: str, timeout: float = 2.0) -> ProbeResult:
    return await GreetingProbe(endpoint, proxy_protocol=False).run(timeout)


async def test_a_real_server_passes(mariadb: MariaDb) -> None:
    finding = await greeting(f"127.0.0.1:{mariadb.port}")
    assert finding.status is CheckStatus.PASS
    assert "MariaDB" in finding.version


@pytest.mark.parametrize("pieces", [1, 3, len(mysql_packet(GREETING_PAYLOAD))])
async def test_a_greeting_passes_whole_or_in_pieces(pieces: int) -> None:
    whole = mysql_packet(GREETING_PAYLOAD)
    size = -(-len(whole) // pieces)
    async with run_fake_server(
        send_parts(*[whole[i : i + size] for i in range(0, len(whole), size)])
    ) as peer:
        finding = await greeting(peer.endpoint)
        assert finding == ProbeResult(
            CheckStatus.PASS, f"the SQL port {peer.endpoint} greets", version="8.0.11-TiDB-v8.5.3"
        )
        assert await peer.connection_ends.get() == "eof"  # not a reset, and nothing was sent


async def test_with_proxy_protocol_a_local_header_comes_first() -> None:
    received = []

    async def demanding(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readexactly(16))
        writer.write(mysql_packet(GREETING_PAYLOAD))

    async with run_fake_server(demanding) as peer:
        finding = await GreetingProbe(peer.endpoint, proxy_protocol=True).run(2.0)
        assert finding.status is CheckStatus.PASS
        assert await peer.connection_ends.get() == "eof"
    assert received == [bytes.fromhex("0d0a0d0a000d0a515549540a20000000")]


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        pytest.param(
            send_parts(then_close=True),
            "accepts connections and closes them without a greeting (a TiDB that lost PD does so)",
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
        pytest.param(send_parts(b"\xff\xff\xff\x00\x0a"), "which is not MySQL's protocol", id="oversize"),
        pytest.param(send_parts(b"\x00\x00\x00\x00"), "which is not MySQL's protocol", id="empty"),
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
async def test_anything_but_a_greeting_fails_and_names_the_address(handler: Handler, told: str) -> None:
    async with run_fake_server(handler) as peer:
        finding = await greeting(peer.endpoint)
    assert finding.status is CheckStatus.FAIL
    assert told in finding.reason
    assert finding.reason.startswith(f"the SQL port {peer.endpoint} ")


async def test_silence_fails_when_the_time_is_over() -> None:
    async with run_fake_server(send_parts()) as peer:
        finding = await greeting(peer.endpoint, timeout=0.1)
    assert finding.reason == (
        f"the SQL port {peer.endpoint} accepts connections but sends no greeting within 0.1 s"
    )


async def test_a_black_hole_cannot_be_connected_to() -> None:
    with full_backlog() as endpoint:
        finding = await greeting(endpoint, 0.1)
    assert finding.reason == f"the SQL port {endpoint} cannot be connected to within 0.1 s"


async def test_a_closed_port_refuses() -> None:
    with refusing_port() as endpoint:
        finding = await greeting(endpoint)
    assert finding == ProbeResult(CheckStatus.FAIL, f"the SQL port {endpoint} refuses connections")


async def test_ipv6() -> None:
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD)), host="::1") as peer:
        assert (await greeting(peer.endpoint)).status is CheckStatus.PASS


async def test_running_out_of_descriptors_is_not_blamed_on_the_node() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as peer:
        try:
            with socket.socket() as highest:
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno() + 1, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.append(socket.socket())
            with pytest.raises(LocalResourceError, match="limit of open files"):
                await greeting(peer.endpoint)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for one in held:
                one.close()
        assert (await greeting(peer.endpoint)).status is CheckStatus.PASS
