"""The probe of the status port, against servers that behave and servers that do not."""

from __future__ import annotations

import asyncio

import pytest

from controlplane import address as addresses
from controlplane.model.health import Outcome
from controlplane.observe.health.probes import Finding, StatusProbe
from tests.support.fake_servers import (
    GREETING,
    STATUS,
    Handler,
    answers,
    closed_port,
    full_backlog,
    http,
    listening,
    packet,
    resets,
    sends,
)

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def status(endpoint: str, timeout: float = 2.0) -> Finding:
    probe = StatusProbe(endpoint, addresses.split(endpoint)[0], None)
    try:
        return await probe.run(timeout)
    finally:
        probe.close()


async def test_a_status_passes_with_connections_and_version() -> None:
    async with listening(answers(http(200, STATUS))) as peer:
        finding = await status(peer.endpoint)
    url = f"http://{peer.endpoint}/status"
    assert finding == Finding(Outcome.PASS, f"{url} answers", 3, "8.0.11-TiDB-v8.5.3")


async def test_http_500_means_starting_up_or_shutting_down() -> None:
    async with listening(answers(http(500, b""))) as peer:
        finding = await status(peer.endpoint)
    assert finding == Finding(
        Outcome.STOPPING,
        f"says that it is starting up or shutting down (HTTP 500 from http://{peer.endpoint}/status)",
    )


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([bytes([b]) for b in http(200, STATUS)], id="byte by byte"),
        pytest.param(
            [
                CHUNKED,
                b"5;x=y\r\n",
                STATUS[:5] + b"\r\n",
                b"%X\r\n" % len(STATUS[5:]) + STATUS[5:],
                b"\r\n0\r\nTrailer: x\r\n\r\n",
            ],
            id="chunked",
        ),
    ],
)
async def test_a_status_in_pieces_passes(parts: list[bytes]) -> None:
    async with listening(sends(*parts)) as peer:
        assert (await status(peer.endpoint)).outcome is Outcome.PASS


async def test_a_status_that_ends_with_the_connection_passes() -> None:
    answer = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + STATUS
    async with listening(answers(answer, 1, then_close=True)) as peer:
        probe = StatusProbe(peer.endpoint, "127.0.0.1", None)
        for _ in range(2):
            assert (await probe.run(2.0)).outcome is Outcome.PASS
        probe.close()
    assert peer.connections == 2


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        pytest.param(answers(http(404, b"no")), "answers HTTP 404", id="other code"),
        pytest.param(answers(http(302, b"", "Location: /x")), "answers HTTP 302", id="redirect"),
        pytest.param(answers(http(200, b"<html>")), "not with TiDB's status as JSON", id="no JSON"),
        pytest.param(answers(http(200, b"[1]")), "not with TiDB's status as JSON", id="no object"),
        pytest.param(answers(http(200, b"[" * 60_000)), "not with TiDB's status as JSON", id="deep JSON"),
        pytest.param(
            answers(http(200, b'{"connections": true, "version": "x"}')),
            "not with TiDB's status as JSON",
            id="wrong type",
        ),
        pytest.param(answers(http(200, b" " * 65_537)), "answers with more than", id="long body"),
        pytest.param(
            sends(CHUNKED, b"ffff\r\n", b" " * 65_535, b"\r\n2\r\n  \r\n"),
            "answers with more than",
            id="long chunks",
        ),
        pytest.param(
            answers(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 80_000, 1, then_close=True),
            "answers with more than",
            id="endless body",
        ),
        pytest.param(sends(CHUNKED, b"zz\r\n"), "answers with malformed HTTP", id="bad chunk"),
        pytest.param(sends(CHUNKED, b"5" * 20_000), "answers with malformed HTTP", id="long chunk line"),
        pytest.param(sends(CHUNKED, b"5_0\r\n"), "answers with malformed HTTP", id="python number"),
        pytest.param(
            sends(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"),
            "answers with malformed HTTP",
            id="bad length",
        ),
        pytest.param(
            sends(b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"),
            "answers with malformed HTTP",
            id="absurd length",
        ),
        pytest.param(sends(b"SSH-2.0-OpenSSH\r\n\r\n"), "something else than HTTP", id="SSH"),
        pytest.param(answers(packet(GREETING), 1, then_close=True), "something else than HTTP", id="MySQL"),
        pytest.param(sends(b"x" * 200_000), "something else than HTTP", id="endless head"),
        pytest.param(
            answers(b"", 1, then_close=True), "closes connections without a whole answer", id="closed"
        ),
        pytest.param(
            answers(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", 1, then_close=True),
            "closes connections without a whole answer",
            id="cut short",
        ),
        pytest.param(resets, "resets connections", id="reset"),
    ],
)
async def test_any_other_answer_fails_and_names_the_address(handler: Handler, told: str) -> None:
    async with listening(handler) as peer:
        finding = await status(peer.endpoint)
    assert finding.outcome is Outcome.FAIL
    assert told in finding.reason
    assert finding.reason.startswith(f"http://{peer.endpoint}/status ")
    assert finding.connections is None


async def test_no_answer_fails_when_the_time_is_over() -> None:
    async with listening(sends()) as peer:
        finding = await status(peer.endpoint, timeout=0.1)
    url = f"http://{peer.endpoint}/status"
    assert finding == Finding(Outcome.FAIL, f"{url} accepts connections but gives no answer within 0.1 s")


async def test_a_trickle_of_bytes_does_not_extend_the_time() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.02)

    async with listening(trickle) as peer:
        finding = await status(peer.endpoint, timeout=0.2)
    assert "gives no answer within 0.2 s" in finding.reason


async def test_a_black_hole_cannot_be_connected_to() -> None:
    with full_backlog() as endpoint:
        finding = await status(endpoint, 0.1)
    assert finding.reason == f"http://{endpoint}/status cannot be connected to within 0.1 s"


async def test_a_closed_port_refuses() -> None:
    with closed_port() as endpoint:
        finding = await status(endpoint)
    assert finding == Finding(Outcome.FAIL, f"http://{endpoint}/status refuses connections")


async def test_the_connection_is_kept_and_a_lost_one_replaced_without_a_failure() -> None:
    async with listening(answers(http(200, STATUS), 3, then_close=True)) as peer:
        probe = StatusProbe(peer.endpoint, "127.0.0.1", None)
        outcomes = [(await probe.run(2.0)).outcome for _ in range(7)]
        assert outcomes == [Outcome.PASS] * 7
        assert peer.connections == 3
        for writer in peer.writers:
            writer.transport.abort()
        assert (await probe.run(2.0)).outcome is Outcome.PASS
        probe.close()


async def test_a_server_that_asks_for_close_gets_a_new_connection_each_time() -> None:
    async with listening(answers(http(200, STATUS, "Connection: Close"))) as peer:
        probe = StatusProbe(peer.endpoint, "127.0.0.1", None)
        for _ in range(3):
            assert (await probe.run(2.0)).outcome is Outcome.PASS
    assert peer.connections == 3


async def test_a_late_answer_is_not_taken_for_that_to_the_next_question() -> None:
    held = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await held.wait()
        writer.write(http(500, b""))

    async with listening(late) as peer:
        probe = StatusProbe(peer.endpoint, "127.0.0.1", None)
        assert (await probe.run(0.05)).outcome is Outcome.FAIL
        held.set()
        assert (await probe.run(2.0)).outcome is Outcome.STOPPING
        probe.close()
    assert peer.connections == 2


async def test_ipv6() -> None:
    async with listening(answers(http(200, STATUS)), host="::1") as peer:
        finding = await status(peer.endpoint)
    assert finding.reason == f"http://{peer.endpoint}/status answers"
