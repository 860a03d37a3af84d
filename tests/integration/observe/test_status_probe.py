"""The status probe, against well-behaved and misbehaving servers."""

from __future__ import annotations

import asyncio

import pytest

from controlplane import address as addresses
from controlplane.model.health import CheckStatus
from controlplane.observe.health.probes import ProbeResult, StatusProbe
from tests.support.fake_servers import (
    GREETING_PAYLOAD,
    STATUS_BODY,
    Handler,
    answer_http,
    full_backlog,
    http_response,
    mysql_packet,
    refusing_port,
    reset_by_peer,
    run_fake_server,
    send_parts,
)

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def probe_status(endpoint: str, timeout: float = 2.0) -> ProbeResult:
    probe = StatusProbe(endpoint, addresses.split(endpoint)[0], None)
    try:
        return await probe.run(timeout)
    finally:
        probe.close()


async def test_status_passes_with_connections_and_version() -> None:
    async with run_fake_server(answer_http(http_response(200, STATUS_BODY))) as peer:
        result = await probe_status(peer.endpoint)
    url = f"http://{peer.endpoint}/status"
    assert result == ProbeResult(CheckStatus.PASS, f"{url} answers", 3, "8.0.11-TiDB-v8.5.3")


async def test_http_500_means_starting_up_or_shutting_down() -> None:
    async with run_fake_server(answer_http(http_response(500, b""))) as peer:
        result = await probe_status(peer.endpoint)
    assert result == ProbeResult(
        CheckStatus.STOPPING,
        f"reports that it is starting up or shutting down (HTTP 500 from http://{peer.endpoint}/status)",
    )


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([bytes([b]) for b in http_response(200, STATUS_BODY)], id="byte by byte"),
        pytest.param(
            [
                CHUNKED,
                b"5;x=y\r\n",
                STATUS_BODY[:5] + b"\r\n",
                b"%X\r\n" % len(STATUS_BODY[5:]) + STATUS_BODY[5:],
                b"\r\n0\r\nTrailer: x\r\n\r\n",
            ],
            id="chunked",
        ),
    ],
)
async def test_status_in_several_parts_passes(parts: list[bytes]) -> None:
    async with run_fake_server(send_parts(*parts)) as peer:
        assert (await probe_status(peer.endpoint)).status is CheckStatus.PASS


async def test_status_without_length_passes() -> None:
    answer = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + STATUS_BODY
    async with run_fake_server(answer_http(answer, 1, then_close=True)) as peer:
        probe = StatusProbe(peer.endpoint, "127.0.0.1", None)
        for _ in range(2):
            assert (await probe.run(2.0)).status is CheckStatus.PASS
        probe.close()
    assert peer.connections == 2


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        pytest.param(answer_http(http_response(404, b"no")), "answers HTTP 404", id="other code"),
        pytest.param(answer_http(http_response(302, b"", "Location: /x")), "answers HTTP 302", id="redirect"),
        pytest.param(
            answer_http(http_response(200, b"<html>")), "not with TiDB's status as JSON", id="no JSON"
        ),
        pytest.param(
            answer_http(http_response(200, b"[1]")), "not with TiDB's status as JSON", id="no object"
        ),
        pytest.param(
            answer_http(http_response(200, b"[" * 60_000)), "not with TiDB's status as JSON", id="deep JSON"
        ),
        pytest.param(
            answer_http(http_response(200, b'{"connections": true, "version": "x"}')),
            "not with TiDB's status as JSON",
            id="wrong type",
        ),
        pytest.param(
            answer_http(http_response(200, b" " * 65_537)), "answers with more data than", id="long body"
        ),
        pytest.param(
            send_parts(CHUNKED, b"ffff\r\n", b" " * 65_535, b"\r\n2\r\n  \r\n"),
            "answers with more data than",
            id="long chunks",
        ),
        pytest.param(
            answer_http(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 80_000, 1, then_close=True),
            "answers with more data than",
            id="endless body",
        ),
        pytest.param(send_parts(CHUNKED, b"zz\r\n"), "answers with malformed HTTP", id="bad chunk"),
        pytest.param(send_parts(CHUNKED, b"5" * 20_000), "answers with malformed HTTP", id="long chunk line"),
        pytest.param(send_parts(CHUNKED, b"5_0\r\n"), "answers with malformed HTTP", id="python number"),
        pytest.param(
            send_parts(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"),
            "answers with malformed HTTP",
            id="bad length",
        ),
        pytest.param(
            send_parts(b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"),
            "answers with malformed HTTP",
            id="absurd length",
        ),
        pytest.param(send_parts(b"SSH-2.0-OpenSSH\r\n\r\n"), "something other than HTTP", id="SSH"),
        pytest.param(
            answer_http(mysql_packet(GREETING_PAYLOAD), 1, then_close=True),
            "something other than HTTP",
            id="MySQL",
        ),
        pytest.param(send_parts(b"x" * 200_000), "something other than HTTP", id="endless head"),
        pytest.param(
            answer_http(b"", 1, then_close=True), "closes connections before a complete response", id="closed"
        ),
        pytest.param(
            answer_http(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", 1, then_close=True),
            "closes connections before a complete response",
            id="cut short",
        ),
        pytest.param(reset_by_peer, "resets connections", id="reset"),
    ],
)
async def test_any_other_response_fails_and_names_the_address(handler: Handler, reason: str) -> None:
    async with run_fake_server(handler) as peer:
        result = await probe_status(peer.endpoint)
    assert result.status is CheckStatus.FAIL
    assert reason in result.reason
    assert result.reason.startswith(f"http://{peer.endpoint}/status ")
    assert result.connections is None


async def test_silent_server_fails_at_the_timeout() -> None:
    async with run_fake_server(send_parts()) as peer:
        result = await probe_status(peer.endpoint, timeout=0.1)
    url = f"http://{peer.endpoint}/status"
    assert result == ProbeResult(
        CheckStatus.FAIL, f"{url} accepts connections but does not answer within 0.1 s"
    )


async def test_slow_bytes_do_not_extend_the_timeout() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.02)

    async with run_fake_server(trickle) as peer:
        result = await probe_status(peer.endpoint, timeout=0.2)
    assert "does not answer within 0.2 s" in result.reason


async def test_unreachable_server_fails_at_the_timeout() -> None:
    with full_backlog() as endpoint:
        result = await probe_status(endpoint, 0.1)
    assert result.reason == f"http://{endpoint}/status does not accept connections within 0.1 s"


async def test_closed_port_fails_as_refused() -> None:
    with refusing_port() as endpoint:
        result = await probe_status(endpoint)
    assert result == ProbeResult(CheckStatus.FAIL, f"http://{endpoint}/status refuses connections")


async def test_connection_is_reused_and_replaced_without_a_failure() -> None:
    async with run_fake_server(answer_http(http_response(200, STATUS_BODY), 3, then_close=True)) as peer:
        probe = StatusProbe(peer.endpoint, "127.0.0.1", None)
        statuses = [(await probe.run(2.0)).status for _ in range(7)]
        assert statuses == [CheckStatus.PASS] * 7
        assert peer.connections == 3
        for writer in peer.writers:
            writer.transport.abort()
        assert (await probe.run(2.0)).status is CheckStatus.PASS
        probe.close()


async def test_connection_close_header_is_honored() -> None:
    async with run_fake_server(answer_http(http_response(200, STATUS_BODY, "Connection: Close"))) as peer:
        probe = StatusProbe(peer.endpoint, "127.0.0.1", None)
        for _ in range(3):
            assert (await probe.run(2.0)).status is CheckStatus.PASS
    assert peer.connections == 3


async def test_late_response_does_not_answer_the_next_request() -> None:
    release = asyncio.Event()

    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await release.wait()
        writer.write(http_response(500, b""))

    async with run_fake_server(answer_late) as peer:
        probe = StatusProbe(peer.endpoint, "127.0.0.1", None)
        assert (await probe.run(0.05)).status is CheckStatus.FAIL
        release.set()
        assert (await probe.run(2.0)).status is CheckStatus.STOPPING
        probe.close()
    assert peer.connections == 2


async def test_ipv6_endpoint_passes() -> None:
    async with run_fake_server(answer_http(http_response(200, STATUS_BODY)), host="::1") as peer:
        result = await probe_status(peer.endpoint)
    assert result.reason == f"http://{peer.endpoint}/status answers"
